"""What only a machine with a GPU shows: ``make test-gpu``."""
