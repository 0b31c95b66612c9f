"""``--autotune``: rank 0 tries settings during the first steps, and keeps what is faster.

The coordinator shows every batch that it orders to the ``Tuner``, which tells steps apart by the operation that comes
again, and answers with other settings whenever a sample is complete. They apply on all ranks from the same operation
on. ``search`` chooses what to try: it varies one setting after the other by successive halving (all candidates are
measured once, the better half twice more, and so on), then those next to the best once more, and compares what it found
with the settings of the start, in turns, until it is clear which is faster. Where that is not the choice, the job goes
on as it began.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, TypeAlias, TypeVar

from hvdgloo._engine import fusion, inline
from hvdgloo._engine.messages import Response
from hvdgloo._engine.settings import Choice
from hvdgloo._platform.files import overwrite
from hvdgloo._platform.writable import make_directory_of
from hvdgloo.errors import ConfigError

LEAST_GAIN = 1.015
"""The least factor by which a choice must be faster, in the median of all comparisons, in order to be taken."""

MOST_CHANCE = 0.05
"""The largest probability that all comparisons together came out so well by chance."""

MOST_CHANCE_EARLY = 0.02
"""The same as long as there may be more comparisons: who looks more often is mistaken more often."""

FEWEST_PAIRS = 6
"""With fewer comparisons, ``MOST_CHANCE_EARLY`` cannot be reached."""

ROUNDS = 4
"""The largest number of rounds through all settings; noise could go on to change what is best for ever."""

LOOKS = 4
"""The largest number of times that the comparisons are checked for being enough."""

_FUSION = tuple(megabytes << 20 for megabytes in (1, 2, 4, 8, 16, 32, 64))
_HIERARCHICAL = tuple(kilobytes << 10 for kilobytes in (32, 128, 512, 2048, 8192))
_CYCLE = (0.0, 0.0005, 0.001, 0.0025, 0.005)
_INLINE = (0, 1 << 10, 1 << 12, 1 << 14)

_HOPELESS = 1.5
"""A candidate is given up after three steps if the best one so far is this many times as fast."""

_MOST_NAMES = 1 << 16
"""After so many operations of which none came again, the program has no steps."""


@dataclass(frozen=True)
class AutotuneSettings:
    """The way in which settings are tried.

    Attributes:
        log: path of a file for every sample, empty for none.
        warmup_samples: so many are thrown away at the beginning.
        steps_per_sample: steps of a sample, whose median counts; one more, in which the settings change, does not.
        most: candidates that are tried at most.
        noise: from 0 to 1, how much step times vary: the more they do, the more often the choice is compared with the
            settings of the start, before that is believed.
        fixed: names of ``Choice`` that stay as the user wants them.
    """

    log: str = ""
    warmup_samples: int = 3
    steps_per_sample: int = 10
    most: int = 20
    noise: float = 0.8
    fixed: frozenset[str] = frozenset()


Axis: TypeAlias = tuple[str, Sequence[Any]]
"""The name of a setting, and values to try."""

Tried = TypeVar("Tried", bound=Any)
"""A frozen dataclass with a field for each setting."""

Search: TypeAlias = Generator[Tried, float, tuple[Tried, float]]
"""Yields what to measure, is sent its score, and returns the choice, and how many times as fast as the start it is."""


def search(start: Tried, axes: Sequence[Axis], *, most: int, pairs: int, looks: int) -> Search[Tried]:
    """Look for settings with a higher score; scores vary from one measurement to the next, and drift.

    Args:
        start: what must be beaten.
        axes: what may be varied, the most important first; values are numbers.
        most: different candidates that are measured at most, beside the start.
        pairs: comparisons with the start in the end, before it is looked whether they suffice.
        looks: how often so many comparisons are made at most, while it is uncertain which is faster.
    """
    best = start
    measured = {start}
    varied_from: dict[str, Tried] = {}
    for number in range(ROUNDS):
        before = best
        for name, values in axes:
            ordered = sorted({getattr(best, name), *values})
            if number > 0:  # what suits one setting may depend on those that were varied later
                if replace(varied_from[name], **{name: getattr(best, name)}) == best:
                    continue
                place = ordered.index(getattr(best, name))
                ordered = ordered[max(0, place - 1) : place + 2]
            varied_from[name] = best
            alive = [best]
            for candidate in [replace(best, **{name: value}) for value in ordered]:
                if candidate != best and (candidate in measured or len(measured) <= most):
                    measured.add(candidate)
                    alive.append(candidate)
            best = yield from _halving(alive)
        if best == before:
            break
    if best == start:
        return start, 1.0
    gain = yield from _confirmed(start, best, pairs, looks)
    return (start, 1.0) if gain is None else (best, gain)


def _halving(candidates: Sequence[Tried]) -> Generator[Tried, float, Tried]:
    """The best of several: all are measured once, the better half twice more, and so on.

    They are measured in turns, and a score counts relative to the others of its turn: what is slow for a while is slow
    for all.
    """
    alive = list(candidates)
    turns: list[dict[Tried, float]] = []
    samples = 1
    while len(alive) > 1:
        for _ in range(samples):
            turn = {}
            for candidate in alive if len(turns) % 2 == 0 else reversed(alive):
                turn[candidate] = yield candidate
            turns.append(turn)
        relative: defaultdict[Tried, list[float]] = defaultdict(list)
        for turn in turns:
            middle = statistics.median(turn[candidate] for candidate in alive)
            for candidate in alive:
                relative[candidate].append(turn[candidate] / middle)
        alive.sort(key=lambda candidate: -statistics.median(relative[candidate]))
        del alive[len(alive) // 2 :]
        samples *= 2
    return alive[0]


def _confirmed(start: Tried, best: Tried, pairs: int, looks: int) -> Generator[Tried, float, float | None]:
    """Return the factor by which a choice is faster than the start; None if it is not clearly faster."""
    ratios: list[float] = []
    for look in range(1, looks + 1):
        for _ in range(pairs):
            found = {}
            for candidate in [start, best] if len(ratios) % 2 else [best, start]:
                found[candidate] = yield candidate
            ratios.append(found[best] / found[start])
        gain = statistics.median(ratios)
        if gain >= LEAST_GAIN and chance(ratios) <= (MOST_CHANCE if look == looks else MOST_CHANCE_EARLY):
            return gain
        if chance([LEAST_GAIN / ratio for ratio in ratios]) <= MOST_CHANCE:
            break  # the gain is too small, and more comparisons would hardly say anything else
    return None


def chance(ratios: Sequence[float]) -> float:
    """Return how probable ratios would be that are as much above 1 as these, or more, if they varied around 1
    (Wilcoxon's
    signed ranks: a single one that is far off says no more than the most extreme rank)."""
    ordered = sorted(map(math.log, ratios), key=abs)
    found = sum(rank for rank, value in enumerate(ordered, 1) if value > 0)
    ways: Counter[int] = Counter({0: 1})  # how many combinations of signs have a sum of ranks
    for rank in range(1, len(ordered) + 1):
        ways += Counter({total + rank: count for total, count in ways.items()})
    return float(sum(count for total, count in ways.items() if total >= found) / 2 ** len(ordered))


def axes_for(
    start: Choice, step: Sequence[Response], batches: int, fixed: Collection[str], *, deterministic: bool
) -> list[Axis]:
    """List the values worth trying: of those that would make no difference to a step, only one.

    Args:
        step: the operations of one step, in order.
        batches: in which they were ordered.
        fixed: settings that must stay.
        deterministic: the bits of results must not depend on the choice.
    """
    plans: dict[tuple[tuple[fusion.Part, ...], ...], int] = {}
    for limit in (start.fusion_threshold, *_FUSION):
        plans.setdefault(tuple(bucket.parts for bucket in fusion.plan(step, limit)), limit)
    axes: list[Axis] = [("fusion_threshold", list(plans.values()))]
    if start.hierarchical_threshold and not deterministic:
        # A step's operations do not become ready at once, so buckets are of any size up to those that are planned.
        sizes = sorted({nbytes for response in step for nbytes in response.sizes})
        sizes += [sum(part.nbytes for part in parts) for plan in plans for parts in plan]
        axes.append(("hierarchical_threshold", _distinct(start.hierarchical_threshold, _HIERARCHICAL, sizes)))
    if batches > 1:
        axes.append(("cycle_time", _CYCLE))
    if start.inline_threshold and not deterministic:
        alone = [response.sizes[0] for response in step if inline.suits(response.request, _INLINE[-1])]
        # A threshold includes its own size here.
        axes.append(("inline_threshold", _distinct(start.inline_threshold, _INLINE, [size - 1 for size in alone])))
    return [(name, values) for name, values in axes if name not in fixed and len(set(values)) > 1]


def _distinct(start: int, thresholds: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Those thresholds that divide sizes differently, the start first."""
    found: dict[tuple[bool, ...], int] = {}
    for threshold in (start, *thresholds):
        found.setdefault(tuple(size >= threshold for size in sizes), threshold)
    return list(found.values())


class Tuner:
    """Measures a job's steps, and says which settings come next. Pure but for the log file: rank 0's coordinator shows
    it what is ordered.

    Args:
        start: the settings of the beginning.
        rules: see ``AutotuneSettings``.
        deterministic: the bits of results must not depend on what is tried.

    Attributes:
        conclusion: a line for people, when the search has ended; empty before.

    Raises:
        ConfigError: the log file cannot be written.
    """

    def __init__(self, start: Choice, rules: AutotuneSettings, *, deterministic: bool) -> None:
        self.conclusion = ""
        self._start = self._current = start
        self._rules = rules
        self._deterministic = deterministic
        self._log = _Log(rules.log) if rules.log else None
        self._search: Search[Choice] | None = None
        self._warmup = rules.warmup_samples * rules.steps_per_sample + 1
        self._seen: set[tuple[int, str]] = set()
        self._step: list[Response] = []
        self._batches = 0
        self._begun = 0.0
        self._steps = 0
        self._settling = True  # the step that is under way does not count
        self._rates: list[float] = []
        self._fastest = 0.0
        self._samples = 0

    @property
    def undecided(self) -> str:
        """The line for people if the job ends now, before the search has."""
        spent = f"{self._samples} samples in {self._steps} steps"
        return f"autotune: ended before anything was chosen ({spent}); the job needs more steps"

    def ordered(self, batch: Sequence[Response], now: float) -> Choice | None:
        """The coordinator orders a batch.

        Returns:
            the settings that apply from this batch on; None if they stay as they are.
        """
        if self.conclusion:
            return None
        named = [response.request.key for response in batch if ".noname." not in response.request.name]
        choice = None
        if not self._seen.isdisjoint(named):
            choice = self._end_step(now)
            self._seen.clear()
            self._step, self._batches, self._begun = [], 0, now
        elif len(self._step) > _MOST_NAMES:
            return self._conclude(self._start, 1.0, "the program's operations do not come again")
        if not self._begun:
            self._begun = now
        self._seen.update(named)
        self._step.extend(batch)
        self._batches += 1
        return choice

    def _end_step(self, now: float) -> Choice | None:
        self._steps += 1
        nbytes = sum(sum(response.sizes) for response in self._step)
        if self._search is None:
            return self._begin() if self._steps >= self._warmup and nbytes else None
        if not nbytes:
            return None  # barriers say nothing about any setting
        if self._settling:
            self._settling = False
            return None
        self._rates.append(nbytes / max(now - self._begun, 1e-9))
        rate = statistics.median(self._rates)
        hopeless = len(self._rates) == 3 and rate * _HOPELESS < self._fastest
        if len(self._rates) < self._rules.steps_per_sample and not hopeless:
            return None
        self._fastest = max(self._fastest, rate)
        self._samples += 1
        if self._log is not None:
            self._log.add(self._current, rate)
        self._rates, self._settling = [], True
        try:
            return self._change(self._search.send(rate))
        except StopIteration as end:
            return self._conclude(*end.value)

    def _begin(self) -> Choice | None:
        rules = self._rules
        axes = axes_for(self._start, self._step, self._batches, rules.fixed, deterministic=self._deterministic)
        if not axes:
            return self._conclude(self._start, 1.0, "there is nothing that would make a difference")
        pairs = max(FEWEST_PAIRS, round(10 * rules.noise))
        self._search = search(self._start, axes, most=rules.most, pairs=pairs, looks=LOOKS)
        return self._change(next(self._search))

    def _change(self, choice: Choice) -> Choice | None:
        if choice == self._current:
            return None
        self._current = choice
        return choice

    def _conclude(self, choice: Choice, gain: float, reason: str = "") -> Choice | None:
        spent = f"({self._samples} samples in {self._steps} steps)"
        if reason:
            self.conclusion = f"autotune: settings stay as they were: {reason}"
        elif choice == self._start:
            self.conclusion = f"autotune: settings stay as they were: no others were clearly faster {spent}"
        else:
            self.conclusion = (
                f"autotune: {choice.as_flags(self._start)} from now on: {100 * (gain - 1):.0f} % faster {spent}"
            )
        if self._log is not None:
            self._log.end(choice)
        return self._change(choice)


class _Log:
    """A line for each sample and, last, one for the choice: Horovod's columns, and then ours."""

    _COLUMNS = (
        "hierarchical_allreduce",
        "hierarchical_allgather",
        "torus_allreduce",
        "cache_enabled",
        "cycle_time_ms",
        "tensor_fusion_threshold",
        "score",
        "hierarchical_threshold",
        "inline_threshold",
    )

    def __init__(self, path: str) -> None:
        try:
            make_directory_of(path)
            self._file: IO[str] | None = os.fdopen(overwrite(path), "w", encoding="utf-8", newline="", buffering=1)
        except OSError as error:
            raise ConfigError(f"--autotune-log-file {path}: {error.strerror}") from None
        self._scores: dict[Choice, list[float]] = {}
        self._write(self._COLUMNS)

    def add(self, choice: Choice, rate: float) -> None:
        self._scores.setdefault(choice, []).append(rate)
        self._sample(choice, rate)

    def end(self, choice: Choice) -> None:
        self._sample(choice, statistics.median(self._scores.get(choice, [0.0])))
        if self._file is not None:
            self._file.close()

    def _sample(self, choice: Choice, rate: float) -> None:
        hierarchical = int(choice.hierarchical_threshold > 0)
        times = f"{choice.cycle_time * 1000:g}", str(choice.fusion_threshold), f"{rate / 1e6:g}"
        own = choice.hierarchical_threshold, choice.inline_threshold
        self._write((hierarchical, hierarchical, 0, 1, *times, *own))

    def _write(self, row: Sequence[object]) -> None:
        if self._file is None:
            return
        try:
            csv.writer(self._file, lineterminator="\n").writerow(row)
        except OSError:  # a full disk is no reason to end a job; what was written stays
            self._file = None
