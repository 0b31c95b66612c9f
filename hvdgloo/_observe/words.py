"""Numbers in words, the same as on the page. Pure functions."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Format a number with three significant digits: ``0.0123``, ``1.23``, ``12.3``, ``1,234``."""
    if not value:
        return "0"
    digits = max(0, min(4, 2 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def measured(value: float | None) -> str:
    """Format a number of any scale that a program logs, with four significant digits: ``0.00001234``, ``1.234e-9``,
    ``0.9876``, ``12,345.7``; None is not finite."""
    if value is None:
        return "not finite"
    if value and not 1e-6 <= abs(value) < 1e15:
        return f"{value:.3e}".replace("e-0", "e-").replace("e+0", "e+")
    digits = 1 if abs(value) >= 1000 or not value else 3 - math.floor(math.log10(abs(value)))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def progress(
    step: int | None, steps: int | None, epoch: int | None, epochs: int | None, share_done: float | None
) -> list[str]:
    """Return the progress of a training in words, which count from 1: "24 %", "epoch 3 of 10", "step 7 of 500"."""
    parts = [] if share_done is None else [f"{math.floor(100 * share_done)} %"]
    for what, number_of, total in (("epoch", epoch, epochs), ("step", step, steps)):
        if number_of is not None:
            parts.append(f"{what} {number_of + 1:,}" + (f" of {total:,}" if total else ""))
    return parts


def left(seconds: float | None) -> list[str]:
    """Return the time that remains in words, "about 5 min left"; nothing if it is not known."""
    return [] if seconds is None else [f"about {duration(round(seconds))} left"]


def size(count: float) -> str:
    """Format a number of bytes: ``12 B``, ``3.4 MB``."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count /= 1000
        power += 1
    return f"{number(count if power else round(count))} {units[power]}"


def cores(value: float) -> str:
    """Format processor time per second: "9 % of a core", "1.53 cores"."""
    if value < 0.995:
        return f"{share(value)} of a core"
    text = number(value)
    return f"{text} core{'' if text == '1' else 's'}"


def duration(seconds: float) -> str:
    """Format a duration: ``120 µs``, ``14 ms``, ``3.2 s``, ``2 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if not seconds:
        return "0 s"
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (99.95, 1.0, "s")):
        if seconds < limit:
            return f"{number(seconds * factor)} {unit}"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest = round(seconds) if seconds < 3600 else round(seconds / 60) * 60
    parts = []
    for unit, length in units:
        whole, rest = divmod(rest, length)
        if whole:
            parts.append(f"{whole} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def share(part: float) -> str:
    """Format a share: ``12 %``."""
    return f"{round(part * 100)} %"
