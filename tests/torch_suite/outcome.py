"""The result of one of torch's cases."""

from __future__ import annotations

from dataclasses import dataclass

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """A case's result.

    Attributes:
        result: ``PASSED``, ``FAILED`` or ``SKIPPED``.
        text: why it was skipped, or how it failed.
    """

    name: str
    ranks: int
    result: str
    text: str
    seconds: float
