"""The page of a job in Chromium: ``make test-page``."""
