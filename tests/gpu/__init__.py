"""Tests that need a machine with a GPU: ``make test-gpu``."""
