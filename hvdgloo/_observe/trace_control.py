"""What a page's button may set off: tracing some steps. Whoever runs the job implements it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from hvdgloo.errors import HvdglooError

MOST_STEPS = 1000


class BusyError(HvdglooError):
    """It cannot be done now; the text says why, and is shown to who asked."""


class Trace(msgspec.Struct, frozen=True):
    """A trace that somebody asked for.

    Attributes:
        number: counts up from 1.
        steps: how many it is of.
        state: "tracing", "ready" or "failed".
        text: for people: how far it is, or why it failed.
        bytes: of the merged file, once it is ready.
    """

    number: int
    steps: int
    state: str
    text: str
    bytes: int = 0


class Control(Protocol):
    """Has steps of a job traced; called on any thread."""

    def trace(self, steps: int) -> Trace:
        """Have all ranks trace their next ``steps`` steps, 1 to ``MOST_STEPS``.

        Raises:
            BusyError: a trace is being made, or the job is not running.
        """

    def traces(self) -> list[Trace]:
        """All of them, in ascending order."""

    def path(self, number: int) -> str:
        """The merged file.

        Raises:
            KeyError: there is no such trace.
            BusyError: it is not ready, or has failed.
        """
