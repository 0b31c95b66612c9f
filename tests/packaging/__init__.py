"""What is installed from distributions: ``make test-packaging``."""
