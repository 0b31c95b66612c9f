"""``hvdgloo-run top``: a running job in a terminal, as JSON, or as a fresh link to its page."""
