"""``hvdgloo-run doctor``: what a job would meet on its hosts, and what to do about it."""
