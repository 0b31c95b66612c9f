"""Stragglers: the ranks that others wait for, and what is unusual about them. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdgloo._observe import words
from hvdgloo._observe.rates import Rates
from hvdgloo._observe.samples import HostSample, Lateness
from hvdgloo._observe.series import brief
from hvdgloo._observe.view import Straggler

_MOST = 8
_LEAST_ROUNDS = 10
_SIGMAS = 4
"""Standard deviations above chance from which being last is frequent: among a thousand ranks, some are at three."""
_LEAST_COST = 0.01
"""Share of a step's time, on average over all steps, below which a straggler is not worth mentioning."""
_LEAST_SECONDS = 0.001
"""The same in seconds of each operation, where no steps are counted."""


@dataclass(frozen=True)
class Candidate:
    """A rank that may be a straggler.

    Attributes:
        rank, host: the rank and its host.
        gpu: index of its GPU on that host; -1 for none.
        rates: its rates at the moment.
        steps: True if it counts steps.
    """

    rank: int
    host: str
    gpu: int
    rates: Rates
    steps: bool


def find(
    lateness: Lateness | None, candidates: Mapping[int, Candidate], hosts: Mapping[str, HostSample]
) -> list[Straggler]:
    """Find the ranks that others wait for more than by chance, the costliest first.

    Args:
        lateness: rank 0's counts.
        candidates: all ranks, by number.
        hosts: the last seconds of each host, as far as they are known.
    """
    if lateness is None or lateness.recent < _LEAST_ROUNDS or len(candidates) < 2:
        return []
    counted = [
        candidate.rates.step_seconds
        for candidate in candidates.values()
        if candidate.steps and candidate.rates.step_seconds > 0
    ]
    steps = 0 in candidates and candidates[0].steps  # rank 0 counts rounds by its own steps
    step = statistics.median(counted) if counted else 0.0
    # Among two ranks one is always the last: "often" has to mean more often than chance makes it.
    expected = lateness.recent / len(candidates)
    often = max(1.5 * expected, expected + _SIGMAS * math.sqrt(expected))
    least = _LEAST_COST * step if step else _LEAST_SECONDS
    found = [
        late
        for late in lateness.ranks
        if late.rank in candidates
        and late.recent_count
        and late.recent_count >= often
        and late.recent_seconds >= least * lateness.recent
    ]
    found.sort(key=lambda late: late.recent_seconds, reverse=True)
    return [
        _straggler(
            candidates[late.rank],
            min(1.0, late.recent_count / lateness.recent),
            lateness.recent,
            "steps" if steps else "operations",
            late.recent_seconds / late.recent_count,
            causes(candidates[late.rank], candidates, hosts),
        )
        for late in found[:_MOST]
    ]


def _straggler(candidate: Candidate, share: float, of: int, unit: str, seconds: float, why: list[str]) -> Straggler:
    text = (
        f"Rank {candidate.rank} ({candidate.host}) was last in {words.share(share)} of the last {of:,} {unit} "
        f"and cost the others {words.duration(seconds)} each time"
    )
    text += f": {'; '.join(why)}." if why else "."
    return Straggler(candidate.rank, candidate.host, brief(share), of, unit, brief(seconds), why, text)


def causes(candidate: Candidate, candidates: Mapping[int, Candidate], hosts: Mapping[str, HostSample]) -> list[str]:
    """List what is unusual about a rank and its host, compared with all others: sentences without a full stop."""
    others = [other for other in candidates.values() if other.rank != candidate.rank]
    found = []
    host = hosts.get(candidate.host)
    if host is not None:
        elsewhere = [other for name, other in hosts.items() if name != candidate.host]
        found += [text for rule in _OF_HOSTS if (text := rule(candidate.host, host, elsewhere))]
        if text := _crowded(candidate.host, candidates, hosts):
            found.append(text)
        if text := _slow_gpu(candidate, host, others, hosts):
            found.append(text)
    if text := _input(candidate, others):
        found.append(text)
    if text := _processor(candidate, others):
        found.append(text)
    return found


def _share_rule(
    value: Callable[[HostSample], float], least: float, more: float, sentence: str, *, alone: bool = True
) -> Callable[[str, HostSample, Sequence[HostSample]], str]:
    """Make a rule about a share of a host's time: it is unusual from ``least`` on, if it is ``more`` above the other
    hosts'; without other hosts, only if ``alone`` is set.
    """

    def rule(name: str, host: HostSample, elsewhere: Sequence[HostSample]) -> str:
        here = value(host)
        usual = statistics.median([value(other) for other in elsewhere]) if elsewhere else 0.0
        if here < least or here < usual + more or not (elsewhere or alone):
            return ""
        text = sentence.format(host=name, share=words.share(here))
        return f"{text} ({words.share(usual)} on the other hosts)" if elsewhere else text

    return rule


_OF_HOSTS = (
    _share_rule(
        lambda host: host.stolen,
        0.03,
        0.02,
        "the hypervisor gives {share} of {host}'s processor time to other machines",
    ),
    _share_rule(
        lambda host: host.throttled,
        0.05,
        0.04,
        "a limit on processor time holds the job on {host} back {share} of the time",
    ),
    _share_rule(
        lambda host: host.memory_pressure, 0.05, 0.04, "processes on {host} wait for memory {share} of the time"
    ),
    _share_rule(
        lambda host: host.memory / host.memory_total if host.memory_total else 0.0,
        0.95,
        0.1,
        "{share} of {host}'s memory is in use",
    ),
    _share_rule(lambda host: host.cpu, 0.95, 0.2, "the processors of {host} are {share} busy", alone=False),
)


def _crowded(name: str, candidates: Mapping[int, Candidate], hosts: Mapping[str, HostSample]) -> str:
    """Describe a host that runs more ranks per core than others, and more than one."""
    ranks: dict[str, int] = {}
    for candidate in candidates.values():
        ranks[candidate.host] = ranks.get(candidate.host, 0) + 1
    density = {host: ranks[host] / hosts[host].cores for host in ranks if host in hosts and hosts[host].cores}
    elsewhere = [value for host, value in density.items() if host != name]
    if not elsewhere or name not in density:
        return ""
    if density[name] <= 1 or density[name] < 1.5 * statistics.median(elsewhere):
        return ""
    cores = hosts[name].cores
    return f"{name} runs {ranks[name]} ranks on {cores} {'core' if cores == 1 else 'cores'}, other hosts fewer"


def _slow_gpu(
    candidate: Candidate, host: HostSample, others: Sequence[Candidate], hosts: Mapping[str, HostSample]
) -> str:
    """Describe a busy GPU whose clock is lower than that model's on other ranks."""
    own = next((gpu for gpu in host.gpus if gpu.index == candidate.gpu), None)
    if own is None or own.use < 0.2:
        return ""
    clocks = [
        gpu.clock
        for other in others
        if other.host in hosts
        for gpu in hosts[other.host].gpus
        if gpu.index == other.gpu and gpu.name == own.name and gpu.use >= 0.2
    ]
    if not clocks or own.clock >= 0.9 * statistics.median(clocks):
        return ""
    return f"its GPU runs at {own.clock:,} MHz, other ranks' GPUs at {round(statistics.median(clocks)):,} MHz"


def _input(candidate: Candidate, others: Sequence[Candidate]) -> str:
    """Describe steps whose first tensor is late, usually because of the input pipeline."""
    usual = _median_of(others, lambda rates: rates.before_first)
    here = candidate.rates.before_first
    if usual is None or not candidate.steps or here < usual + max(0.002, 0.1 * candidate.rates.step_seconds):
        return ""
    return (
        f"a step's first tensor is submitted {words.duration(here)} after its beginning, "
        f"on other ranks after {words.duration(usual)}: the input pipeline or the forward pass is slower"
    )


def _processor(candidate: Candidate, others: Sequence[Candidate]) -> str:
    """Describe a process that uses many more cores than others', or hardly any."""
    usual = _median_of(others, lambda rates: rates.cpu)
    here = candidate.rates.cpu
    if usual is None or not here:
        return ""
    if here > 2 * usual + 0.5:
        return f"its process keeps {words.cores(here)} busy, other ranks' processes {words.cores(usual)}"
    if usual >= 0.5 and here < usual / 3:
        return (
            f"its process keeps only {words.cores(here)} busy, other ranks' processes {words.cores(usual)}: "
            "it waits for something, such as a disk or the network"
        )
    return ""


def _median_of(candidates: Sequence[Candidate], value: Callable[[Rates], float]) -> float | None:
    return statistics.median([value(candidate.rates) for candidate in candidates]) if candidates else None
