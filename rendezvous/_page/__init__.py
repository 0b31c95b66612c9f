"""The page of a job: an HTTP server over its observatory, for browsers, scripts, Prometheus and ``hvdgloo-run top``."""
