"""Causes that a rank adds to its stacks in a stall report: stacks do not show them, and only a front-end knows them."""

from __future__ import annotations

from collections.abc import Callable

_looks: list[Callable[[], str | None]] = []


def register(look: Callable[[], str | None]) -> None:
    """From now on ask ``look`` for each stall report, in a thread of the engine's: it must not wait.

    Args:
        look: returns a sentence if it knows why this rank may be late, else None.
    """
    _looks.append(look)


def known() -> list[str]:
    """Return the causes known at the moment, a sentence each."""
    return [cause for cause in (look() for look in _looks) if cause]
