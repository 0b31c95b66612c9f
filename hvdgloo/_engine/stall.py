"""Reports about operations that wait for ranks which have not submitted them. Pure."""

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
    others: Sequence[Waiting] = (),
) -> str:
    """The one message about a stall.

    Args:
        waiting: the overdue operations.
        now: the present, on the clock of ``Waiting.since``.
        describe: a rank with its host and pid.
        stacks: what each missing rank, and those ``first_to_wait``, answered; None if one did not answer in time.
        told: the stacks in the previous message about the same stall, which are not repeated.
        others: everything that waits at present, overdue or not.
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
        crossed = _crossed(waiting, others)
        if crossed is not None:
            lines.append(
                f"  Each of {crossed[0].name} and {crossed[1].name} waits for the ranks that submitted the other one. "
                "If they are the same call in the program, give it the same name on all ranks (name=...)."
            )
        lines.append(
            "  Usual causes: a rank took another branch, left a loop early because it has less data, or is blocked by "
            "something else (a lock, a file, a slow data loader). An operation needs the same name on all ranks. A "
            "gradient is named after its variable; a rank whose loss does not depend on the variable submits none."
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


def _crossed(waiting: Sequence[Waiting], others: Sequence[Waiting]) -> tuple[Waiting, Waiting] | None:
    """Find two operations of one kind, each of which was submitted by all ranks that the other one waits for."""
    for operation in waiting[:_NAMES_SHOWN]:
        for other in others:
            alike = operation.name.partition(".")[0] == other.name.partition(".")[0]
            if (
                alike
                and set(operation.missing) <= set(other.submitted)
                and set(other.missing) <= set(operation.submitted)
            ):
                return operation, other
    return None


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
