"""Waits that may be cancelled from another thread, and look whether they were."""

from __future__ import annotations

TURN = 0.2
"""Seconds between two such looks."""
