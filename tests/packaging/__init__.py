"""Tests of installed distributions: ``make test-packaging``."""
