"""``hvdgloo-run top``: a running job in a terminal, as JSON, or as a new link to its page."""
