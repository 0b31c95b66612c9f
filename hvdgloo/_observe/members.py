"""The hosts and ranks of a job: the state of each, and its form in a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdgloo._observe import view
from hvdgloo._observe.rates import HostWindow, Rates, Window
from hvdgloo._observe.samples import Missing
from hvdgloo._observe.series import Recording, brief
from hvdgloo._observe.words import duration

_POINTS = 256
_STALLED = 10.0
"""Seconds of others' waiting after which a rank is shown as stalled."""

_STATE = {name: index for index, name in enumerate(view.STATES)}
_DOING = ("starting", "computing", "waiting", "communicating", "idle")


class Host:
    """A host: its state as in ``view.Host``, and its last samples, if there are any."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "up"
        self.window: HostWindow | None = None

    def show(self) -> view.Host:
        """Return the host as readers see it."""
        return self.window.show(self.name, self.state) if self.window else view.Host(self.name, self.state)


class Rank:
    """A rank.

    Attributes:
        rank, host, local_rank, pid: its identity and place.
        fate, reason: "lost", "failed" or "ended", and the reason; empty while it runs.
        window: its last samples.
        rates: its rates at the last tick.
        recording: its curves; they continue when another process takes its place.
    """

    def __init__(self, rank: int, host: str, local_rank: int, pid: int, started: float) -> None:
        self.rank = rank
        self.host = host
        self.local_rank = local_rank
        self.pid = pid
        self.fate = ""
        self.reason = ""
        self.window = Window()
        self.rates = Rates()
        self.recording: Recording[str] = Recording(started, _POINTS)

    @property
    def ended(self) -> bool:
        """True if its part of the job has ended as it should, even if its process still runs."""
        sample = self.window.last
        return self.fate == "ended" or (sample is not None and sample.doing == "ended")

    def move(self, host: str, local_rank: int, pid: int) -> None:
        """Move the rank to another slot, or to another process."""
        if (host, local_rank) != (self.host, self.local_rank):
            self.window = Window()
        if (host, local_rank) != (self.host, self.local_rank) or (self.pid and pid != self.pid):
            self.fate = self.reason = ""
        self.host, self.local_rank, self.pid = host, local_rank, pid

    def waits_for(self, least: float, now: float) -> str:
        """Return the operation that it has waited for at least ``least`` seconds; empty if there is none."""
        sample = self.window.last
        if sample is None or sample.doing != "waiting":
            return ""
        return sample.pending if sample.pending_seconds + now - self.window.heard >= least else ""

    def row(self, hosts: Mapping[str, int], waits: Waits) -> tuple[Any, ...]:
        """Return what readers see of the rank, in the order of ``view.Ranks``' fields.

        Args:
            hosts: name to index.
            waits: the ranks that operations wait for.
        """
        sample = self.window.last
        rates = self.rates
        state, detail = self._doing(waits)
        step = rates.step_seconds
        return (
            self.rank,
            hosts[self.host],
            self.local_rank,
            sample.pid if sample else self.pid,
            _STATE[state],
            detail,
            sample.steps.count if sample else 0,
            sample.operations if sample else 0,
            sample.bytes if sample else 0,
            brief(step),
            brief(rates.computing / step) if step else 0.0,
            brief(rates.waiting / step) if step else 0.0,
            brief(rates.communicating / step) if step else 0.0,
            brief(rates.before_first),
            brief(rates.bytes_per_second),
            brief(rates.cpu),
            sample.memory if sample else 0,
            sample.gpu if sample else -1,
        )

    def _doing(self, waits: Waits) -> tuple[str, str]:
        """Return the rank's state, and a detail about it."""
        if self.fate or self.ended:
            return self.fate or "ended", self.reason
        sample = self.window.last
        if sample is None:
            return "starting", ""
        if self.rank in waits.stalled:
            return "stalled", waits.stalled[self.rank]
        doing = sample.doing if sample.doing in _DOING else "computing"
        if doing != "waiting" or not sample.pending:
            return doing, ""
        return doing, waits.detail(sample.pending)


class Waits:
    """The ranks that others wait for at the moment, in words.

    Args:
        missing: operations that some ranks wait for, as rank 0 reported.
        age: seconds since that report.
        ranks: all ranks.
    """

    def __init__(self, missing: Sequence[Missing], age: float, ranks: Mapping[int, Rank]) -> None:
        self.stalled: dict[int, str] = {}
        """Ranks that others have waited for unusually long, and a text about each."""
        self._for_whom = {one.name: _named(one, ranks) for one in missing if one.ranks}
        for one in missing:
            seconds = one.seconds + age
            if seconds >= _STALLED:
                for rank in one.ranks:
                    text = f"others have waited for it for {duration(int(seconds))}: {one.name[:_LONGEST]}"
                    self.stalled.setdefault(rank, text)

    def detail(self, name: str) -> str:
        """Return a text about a rank that waits for the operation of this name."""
        for_whom = self._for_whom.get(name)
        return f"waits for {for_whom}: {name[:_LONGEST]}" if for_whom else f"waits for {name[:_LONGEST]}"


_LONGEST = 500  # characters of an operation's name


def _named(missing: Missing, ranks: Mapping[int, Rank]) -> str:
    """Return the missing ranks in words."""
    if missing.count > max(3, len(missing.ranks)) or len(missing.ranks) > 3:
        return f"{missing.count:,} ranks"
    names = [f"rank {rank} ({ranks[rank].host})" if rank in ranks else f"rank {rank}" for rank in missing.ranks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def columns(rows: Mapping[int, tuple[Any, ...]]) -> view.Ranks:
    """Return rows of ranks as columns."""
    return view.Ranks(*(list(column) for column in zip(*rows.values(), strict=True)))
