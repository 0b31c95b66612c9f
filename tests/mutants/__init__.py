"""Planted faults, and the command that shows that the tests catch each of them (``python -m tests.mutants``)."""
