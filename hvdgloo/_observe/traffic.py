"""The bytes that ranks exchange, by data plane and in outer steps, added up from their last samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from hvdgloo._observe import view
from hvdgloo._observe.members import Rank
from hvdgloo._observe.series import brief
from hvdgloo._observe.words import duration, share, size

MOST_PLANES = 64
_LONGEST_REASON = 2000


def planes(ranks: Collection[Rank]) -> list[view.PlaneUse]:
    """Return the use that ranks make of each data plane, the greatest of each process set first."""
    found: dict[tuple[str, int, str, str], view.PlaneUse] = {}
    # By the identity of a plane's use: bytes, and errors and forms of encoded gradients.
    crossed: Counter[int] = Counter()
    errors: dict[int, float] = {}
    forms: dict[int, str] = {}

    def use(name: str, process_set: int, device: str, why: str) -> view.PlaneUse | None:
        key = (name, process_set, device, why)
        if key not in found and len(found) < MOST_PLANES:
            found[key] = view.PlaneUse(name, process_set, device, why[:_LONGEST_REASON], 0, 0, 0, 0.0)
        return found.get(key)

    for rank in ranks:
        sample = rank.window.last
        if sample is None:
            continue
        own: dict[tuple[str, int], view.PlaneUse] = {}
        for opened in sample.planes:
            used = use(opened.name, opened.process_set, opened.device, opened.why)
            if used:
                used.ranks += 1
                own.setdefault((opened.name, opened.process_set), used)
        for flow in sample.flows:
            used = own.get((flow.plane, flow.process_set))
            if used is None:
                why = "small tensors travel with the negotiation" if flow.plane == "agreement" else ""
                used = use(flow.plane, flow.process_set, "cpu", why)
                if used:
                    used.ranks += 1
            if used:
                used.operations += flow.operations
                used.bytes += flow.bytes
                crossed[id(used)] += flow.wire_bytes
                if flow.form:
                    errors[id(used)] = max(errors.get(id(used), 0.0), flow.wire_error)
                    forms[id(used)] = flow.form
                used.bytes_per_second += rank.rates.flows.get((flow.plane, flow.process_set), 0.0)
    steps = sum(rank.window.last.steps.count for rank in ranks if rank.window.last)  # of all ranks
    for plane in found.values():
        plane.bytes_per_second = brief(plane.bytes_per_second)
        if form := forms.get(id(plane)):
            if steps:
                part = f"{size(crossed[id(plane)] / steps)} a step instead of {size(plane.bytes / steps)}"
            else:
                part = f"{100 * crossed[id(plane)] / plane.bytes:.0f} % of the bytes" if plane.bytes else "nothing"
            plane.crossed = f"between hosts: {part} ({form}), error {100 * errors[id(plane)]:.2g} %"
    return sorted(found.values(), key=lambda plane: (plane.process_set, -plane.bytes, plane.name, plane.why))


def outer_steps(ranks: Iterable[Rank], now: float | None) -> str:
    """Return a sentence about the ranks' outer steps; empty if they make none.

    Args:
        now: the time; None once the job has ended.
    """
    making = [(rank, last) for rank in ranks if (last := rank.window.last) and last.outer.count]
    if not making:
        return ""
    count, nbytes = sum(last.outer.count for _, last in making), sum(last.outer.bytes for _, last in making)
    text = f"an outer step every {making[0][1].outer.every} steps, {size(nbytes / count)} each"
    if now is not None:
        since = min(now - rank.window.heard + last.at - last.outer.ended for rank, last in making)
        text += f", the last {duration(max(0.0, round(since, 1)))} ago"
    if seconds := sum(last.steps.seconds for _, last in making):
        text += f", {share(min(1.0, sum(last.outer.seconds for _, last in making) / seconds))} of the time"
    return text
