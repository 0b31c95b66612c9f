"""Numbers that a program logs, such as its loss, and its progress: checked, averaged, and kept for the next report."""

from __future__ import annotations

import operator
import time
import zlib
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._observe.counters import EARLY_SECONDS, EARLY_TIMES, Counters
from hvdgloo.errors import InvalidArgumentError, MismatchError

MOST = 64
"""Most names that a process may log."""

LONGEST_NAME = 100
LONGEST_NOTE = 1000

Values = Mapping[str, float]
AddUp = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""A function that adds up an array over ranks."""

SECONDS = 1.0
"""Seconds from one report to the next, by default: callbacks look at a step's numbers no more often, once the early
ones are kept."""


class Pause:
    """A pause between two looks at numbers that cost time to look at."""

    def __init__(self) -> None:
        self._due = 0.0
        self._looks = 0

    def over(self) -> bool:
        """Return whether it is time for another look, and begin the next pause if it is."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._looks += 1
        self._due = now + (SECONDS if self._looks > EARLY_TIMES else EARLY_SECONDS)
        return True


def record(
    counters: Counters | None,
    rank: int,
    values: Mapping[str, Any] | None,
    named: Mapping[str, Any],
    note: str | None,
    add_up: AddUp | None,
    **progress: int | None,
) -> None:
    """Check what a call of ``log`` gives, and keep it for the next report; see ``Frontend.log``.

    Args:
        counters: counters of the process; None if nothing is kept.
        rank: this rank. Only rank 0's note is kept.
        values, named: values passed as a dictionary, and by name.
        note: line for the job's events.
        add_up: computes averages; None to log this rank's own values.
        **progress: step, steps, epoch and epochs.

    Raises:
        InvalidArgumentError: something of it cannot be logged.
        MismatchError: ranks average different names.
    """
    check_note(note)
    counts = check_progress(**progress)
    numbers = checked(values, named, None if counters is None else counters.logged)
    if add_up is not None:
        numbers = averaged(numbers, add_up)
    if counters is not None:
        counters.log(numbers, **counts)
        if note is not None and rank == 0:
            counters.note("note", note)


def record_metrics(counters: Counters, metrics: Mapping[str, Any], **progress: object) -> None:
    """Keep a training library's metrics and progress for the next report, as far as they can be logged.

    Metrics that are no single numbers and counts that the library does not know are left out: no training should fail
    because of something that is only displayed.

    Args:
        counters: counters of the process.
        metrics: the library's, by name.
        **progress: step, steps, epoch and epochs; anything but a count stands for an unknown one.
    """
    counts = {name: value for name, value in progress.items() if isinstance(value, int) and value >= _least(name)}
    counters.log(fitting(metrics, counters.logged), **counts)


def fitting(metrics: Mapping[str, Any], before: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that can be logged: single numbers, under the names logged before and the first new ones.

    Args:
        metrics: a training library's, by name.
        before: values logged earlier.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name in before or len(before.keys() | found.keys()) < MOST:
            try:
                found |= checked({name: value}, {}, None)
            except InvalidArgumentError:
                continue
    return found


def checked(
    given: Mapping[str, Any] | None, named: Mapping[str, Any], before: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the values of a call of ``log`` as numbers.

    Args:
        given: values passed as a dictionary.
        named: values passed by name.
        before: values logged earlier.

    Raises:
        InvalidArgumentError: a name or a value cannot be logged.
    """
    if given is not None and not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"hvd.log: {shortened(given)} has no name; write hvd.log(loss=...), or pass a dictionary of names and "
            "numbers"
        )
    values = {**(given or {}), **named}
    for name in values:
        if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
            raise InvalidArgumentError(
                f"hvd.log: {shortened(name)} is not a name; names are texts of 1 to {LONGEST_NAME} characters"
            )
    if len({*values, *(before or ())}) > MOST:
        raise InvalidArgumentError(
            f"hvd.log: more than {MOST} names; log a few numbers under names that stay the same, and the number of the "
            "step as step="
        )
    return {name: _number(name, value) for name, value in values.items()}


def check_progress(**given: object) -> dict[str, int]:
    """Return the counts among step, steps, epoch and epochs that a call of ``log`` gives.

    Raises:
        InvalidArgumentError: one of them is not a count.
    """
    counts = {}
    for name, value in given.items():
        if value is None:
            continue
        least = _least(name)
        try:
            count = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            count = -1
        if count < least or isinstance(value, bool):
            counted = "" if least else ", counted from 0 as by enumerate() and range()"
            raise InvalidArgumentError(
                f"hvd.log({name}={shortened(value)}): {name} is a whole number, at least {least}{counted}"
            )
        counts[name] = count
    return counts


def _least(name: str) -> int:
    """Return the least value of a count: step, steps, epoch or epochs."""
    return 1 if name in ("steps", "epochs") else 0


def check_note(note: str | None) -> None:
    """Raise InvalidArgumentError if a call of ``log`` gives a note that is not a text."""
    if note is not None and (not isinstance(note, str) or not note.strip() or len(note) > LONGEST_NOTE):
        raise InvalidArgumentError(
            f"hvd.log(note={shortened(note)}): a note is a text of 1 to {LONGEST_NOTE} characters, which appears among "
            "the job's events"
        )


def averaged(values: Values, add_up: AddUp) -> dict[str, float]:
    """Return the values' averages over the ranks that log them.

    Args:
        values: this rank's.
        add_up: adds up an array over ranks.

    Raises:
        MismatchError: the ranks log different names.
    """
    names = sorted(values)
    digest = zlib.crc32("\n".join(names).encode("utf-8", "replace"))
    # A rank that has joined adds nothing, not even to the number of ranks.
    ranks, digests, *sums = add_up(np.array([1.0, digest, *(values[name] for name in names)])).tolist()
    if digests != ranks * digest:
        raise MismatchError(
            f"hvd.log(average=True): this rank logs {', '.join(names)}, and another rank logs other names; averages "
            "need the same names on all ranks"
        )
    return {name: total / ranks for name, total in zip(names, sums, strict=True)}


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("it is a text")
        item = getattr(value, "item", None) or getattr(value, "asscalar", None)  # the latter of MXNet's arrays
        return float(value if item is None else item())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"hvd.log({name}=...): {shortened(value)} is not one number ({error}); pass a Python number or a tensor "
            "with a single element, outside of compiled functions"
        ) from error
