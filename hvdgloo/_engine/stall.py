"""Who is late: what to say about operations that wait for ranks which have not submitted them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvdgloo._engine.negotiation import Waiting, format_ranks

_NAMES_SHOWN = 10
_GROUPS_SHOWN = 4


def overdue(waiting: Sequence[Waiting], now: float, limit: float) -> list[Waiting]:
    """The operations that have waited at least ``limit`` seconds."""
    return [operation for operation in waiting if now - operation.since >= limit]


def missing_ranks(waiting: Sequence[Waiting]) -> tuple[int, ...]:
    return tuple(sorted({rank for operation in waiting for rank in operation.missing}))


def first_to_wait(waiting: Sequence[Waiting]) -> tuple[int, ...]:
    """One rank for each group that waits for the same ranks: it may be the one that should not be there."""
    late = missing_ranks(waiting)
    firsts = [next((rank for rank in group[0].submitted if rank not in late), None) for group in _groups(waiting)]
    return tuple(sorted({rank for rank in firsts[:_GROUPS_SHOWN] if rank is not None}))


def report(
    waiting: Sequence[Waiting],
    now: float,
    describe: Callable[[int], str],
    stacks: Mapping[int, str | None],
    told: Mapping[int, str | None] | None = None,
) -> str:
    """The one message about a stall.

    Args:
        waiting: the overdue operations.
        now: the present, on the clock of ``Waiting.since``.
        describe: a rank with its host and pid.
        stacks: what each missing rank, and those ``first_to_wait``, answered; None if one did not answer in time.
        told: the stacks in the previous message about the same stall, which are not repeated.
    """
    still = "Stalled" if told is None else "Still stalled"
    lines = [f"{still}: some ranks wait for tensors that others have not submitted."]
    lines += [f"  {_wait(group, now, format_ranks)}" for group in _groups(waiting)]
    for rank in missing_ranks(waiting):
        lines += _place(describe(rank), stacks.get(rank), None if told is None else told.get(rank))
    for rank in first_to_wait(waiting):
        if stacks.get(rank) and (told is None or rank not in told):
            lines += _place(f"{describe(rank)}, which waits,", stacks[rank], None)
    if told is None:
        lines.append(
            "  Usual causes: a rank takes another branch or leaves a loop earlier (uneven data), or waits for "
            "something else (a lock, a file, a slow loader). Names must match on all ranks; a gradient has its "
            "variable's, and a rank whose loss does not use the variable has none."
        )
    return "\n".join(lines)


def verdict(waiting: Sequence[Waiting], now: float, describe: Callable[[int], str]) -> str:
    """The text of a stall's error: only a few lines, since they end a rank's output. ``report`` has already said where
    ranks are.

    Args:
        waiting, now, describe: as for ``report``.
    """

    def missing(ranks: Sequence[int]) -> str:
        return describe(ranks[0]) if len(ranks) == 1 else format_ranks(ranks)

    groups = _groups(waiting)
    lines = [_wait(group, now, missing) for group in groups[:_GROUPS_SHOWN]]
    if len(groups) > _GROUPS_SHOWN:
        lines.append(f"and {sum(map(len, groups[_GROUPS_SHOWN:]))} more, which other ranks have not submitted")
    return "\n  ".join(lines)


def _groups(waiting: Sequence[Waiting]) -> list[list[Waiting]]:
    """Those that the same ranks have not submitted, together."""
    groups: dict[tuple[int, ...], list[Waiting]] = {}
    for operation in waiting:
        groups.setdefault(operation.missing, []).append(operation)
    return list(groups.values())


def _wait(group: Sequence[Waiting], now: float, missing: Callable[[Sequence[int]], str]) -> str:
    """One group in a line; ``missing`` formats the ranks that it waits for."""
    oldest = max(now - operation.since for operation in group)
    names = ", ".join(operation.name for operation in group[:_NAMES_SHOWN])
    more = f" and {len(group) - _NAMES_SHOWN} more" if len(group) > _NAMES_SHOWN else ""
    first = group[0]
    return (
        f"{names}{more}: for {oldest:.0f} s, submitted by {format_ranks(first.submitted)}, "
        f"missing on {missing(first.missing)}"
    )


def _place(rank: str, stack: str | None, told: str | None) -> list[str]:
    if not stack:
        return [f"  {rank} does not answer."]
    if stack == told:
        return [f"  {rank} is where it was."]
    return [f"  {rank} is here:", *(f"    {line}" for line in stack.splitlines())]
