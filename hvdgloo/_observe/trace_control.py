"""Control over a job's traces, for the page's button and ``hvdgloo-run top``. The launcher implements it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from hvdgloo.errors import HvdglooError

MOST_STEPS = 1000


class BusyError(HvdglooError):
    """The order cannot be carried out now; the text says why, and is shown to the user."""


class Trace(msgspec.Struct, frozen=True):
    """A trace that was ordered.

    Attributes:
        number: number of the trace, ascending from 1.
        steps: number of its steps.
        state: "tracing", "ready" or "failed".
        text: its progress, or why it failed, for people.
        bytes: size of the merged file, once it is ready.
    """

    number: int
    steps: int
    state: str
    text: str
    bytes: int = 0


class TraceControl(Protocol):
    """Has steps of a job traced; called on any thread."""

    def trace(self, steps: int) -> Trace:
        """Have all ranks trace their next ``steps`` steps, 1 to ``MOST_STEPS``.

        Raises:
            BusyError: a trace is being made, or the job is not running.
        """

    def traces(self) -> list[Trace]:
        """Return all traces, in ascending order."""

    def path(self, number: int) -> str:
        """Return the path of the merged file.

        Raises:
            KeyError: there is no such trace.
            BusyError: the trace is not ready, or has failed.
        """
