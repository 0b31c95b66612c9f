"""``hvdgloo-run doctor``: the problems that a job would meet on its hosts, with remedies."""
