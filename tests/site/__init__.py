"""The documentation as a site: ``make test-docs``."""
