"""``hvdgloo-run tune``: settings that suit the user's hosts, measured on them."""
