"""Conventions shared by several parts of the engine and by the code that submits to it."""

from __future__ import annotations

COORDINATOR = 0
"""The rank whose negotiator orders the operations of all ranks."""

EVERYONE = -1
"""As a destination of the coordinator's messages: all ranks, its own included."""


def ping_interval(operation_timeout: float) -> float:
    """Seconds between two pings while something is pending: several chances before silence means death."""
    return min(5.0, operation_timeout / 4)


def divide_rows(rows: int, size: int) -> list[int]:
    """Divide the rows of a reducescatter among the ranks: the first ones get one more where they do not divide
    evenly."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


ATTRIBUTION_SECONDS = 0.5
"""Seconds that ranks have to show that they are alive after one of them reported a broken data plane."""
