"""Curves of a job and of each rank, and their form in a snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hvdgloo._observe import samples, view
from hvdgloo._observe.rates import Rates
from hvdgloo._observe.series import Recording, brief

_NAMES = ("steps_per_second", "step_seconds", "computing", "waiting", "communicating", "cpu", "memory")
_BYTES = "bytes per second by "
_LOGGED = "logged as "


def point(
    rates: Rates,
    cpu: float | None,
    memory: float,
    planes: Iterable[tuple[str, float]],
    logged: Mapping[str, float | None] | None = None,
) -> dict[str, float]:
    """Return a point of each curve; curves about steps get none while no step is made.

    Args:
        rates: rates of steps.
        cpu: cores in use; None if that is not known yet.
        memory: bytes.
        planes: (plane, bytes per second); items of the same plane are added up.
        logged: numbers that the program logged, by name; None for one that is not finite, which makes a gap.
    """
    values = {"memory": memory}
    if cpu is not None:
        values["cpu"] = cpu
    if rates.steps_per_second:
        values |= {
            "steps_per_second": rates.steps_per_second,
            "step_seconds": rates.step_seconds,
            "computing": rates.computing,
            "waiting": rates.waiting,
            "communicating": rates.communicating,
        }
    elif rates.step_seconds:
        values["steps_per_second"] = 0.0
    for plane, rate in planes:
        values[_BYTES + plane] = values.get(_BYTES + plane, 0.0) + rate
    return values | of_logged(logged or {})


def of_logged(logged: Mapping[str, float | None]) -> dict[str, float]:
    """Return the points of what the program logged, as for ``point``."""
    return {_LOGGED + name: value for name, value in logged.items() if value is not None}


def series(recording: Recording[str], begin: int = 0) -> view.Series:
    """Return a recording of such points, from item ``begin`` on."""
    planes = [key.removeprefix(_BYTES) for key in recording if key.startswith(_BYTES)]
    logged = [key.removeprefix(_LOGGED) for key in recording if key.startswith(_LOGGED)]
    return view.Series(
        at=recording.at(begin),
        width=recording.width,
        bytes_per_second={plane: recording.curve(_BYTES + plane, begin) for plane in planes},
        logged={name: recording.curve(_LOGGED + name, begin) for name in logged},
        **{name: recording.curve(name, begin) for name in _NAMES},
    )


def early(given: samples.Early, later: float, names: Iterable[str]) -> view.Early:
    """Return the points of what was logged first.

    Args:
        given: points as rank 0 reports them.
        later: seconds from its host's clock to this one's.
        names: the names to take.
    """
    points = [(at, values) for at, values in zip(given.at, given.values, strict=False) if math.isfinite(at)]
    return view.Early(
        [round(at + later, 2) for at, _ in points],
        {name: [_finite(values.get(name, math.nan)) for _, values in points] for name in names},
    )


def _finite(value: float) -> float | None:
    return brief(value) if math.isfinite(value) else None


def heat(recording: Recording[int], begin: int = 0) -> view.Heat:
    """Return a recording of the time for which each rank made others wait, from item ``begin`` on."""
    rows = {rank: recording.totals(rank, begin) for rank in sorted(recording)}
    rows = {rank: row for rank, row in rows.items() if any(row)}
    return view.Heat(recording.at(begin), recording.width, list(rows), list(rows.values()))
