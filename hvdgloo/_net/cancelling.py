"""Polling intervals of waits that another thread may cancel."""

from __future__ import annotations

TURN = 0.05
"""Seconds between two such looks: survivors of an elastic job who are cancelled stand still for so long."""

LONGEST_TURN = 0.2
"""The same, in a wait that has been long already, where each look has a cost elsewhere, such as a request to the server
from each of many ranks."""
