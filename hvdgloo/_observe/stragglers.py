"""Which ranks the others wait for, and what is unusual there: pure, values in and values out."""

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
"""How many standard deviations more often than by chance it must be: among a thousand ranks, some are at three."""
_LEAST_COST = 0.01
"""Of a step's time, on average over all steps; less is not worth anybody's attention."""
_LEAST_SECONDS = 0.001
"""The same where no steps are counted, in each operation."""


@dataclass(frozen=True)
class Place:
    """What is known of a rank: where it is, and what it does at the moment.

    Attributes:
        rank, host: who and where.
        gpu: index of its GPU on that host; -1 for none.
        rates: at the moment.
        steps: whether it has counted any.
    """

    rank: int
    host: str
    gpu: int
    rates: Rates
    steps: bool


def find(lateness: Lateness | None, places: Mapping[int, Place], hosts: Mapping[str, HostSample]) -> list[Straggler]:
    """The ranks that others wait for, the costliest first; those that are the last by chance now and then are not
    among them.

    Args:
        lateness: as rank 0 has counted it.
        places: of all ranks.
        hosts: how each host was in the last seconds; those of which nothing is known are missing.
    """
    if lateness is None or lateness.recent < _LEAST_ROUNDS or len(places) < 2:
        return []
    counted = [place.rates.step_seconds for place in places.values() if place.steps and place.rates.step_seconds > 0]
    steps = 0 in places and places[0].steps  # rank 0 counts rounds by its own steps
    step = statistics.median(counted) if counted else 0.0
    # Among two ranks one is always the last: "often" has to mean more often than chance makes it.
    expected = lateness.recent / len(places)
    often = max(1.5 * expected, expected + _SIGMAS * math.sqrt(expected))
    least = _LEAST_COST * step if step else _LEAST_SECONDS
    found = [
        late
        for late in lateness.ranks
        if late.rank in places
        and late.recent_count
        and late.recent_count >= often
        and late.recent_seconds >= least * lateness.recent
    ]
    found.sort(key=lambda late: late.recent_seconds, reverse=True)
    return [
        _straggler(
            places[late.rank],
            min(1.0, late.recent_count / lateness.recent),
            lateness.recent,
            "steps" if steps else "operations",
            late.recent_seconds / late.recent_count,
            causes(places[late.rank], places, hosts),
        )
        for late in found[:_MOST]
    ]


def _straggler(place: Place, share: float, of: int, unit: str, seconds: float, why: list[str]) -> Straggler:
    text = (
        f"Rank {place.rank} ({place.host}) was last in {words.share(share)} of the last {of:,} {unit} "
        f"and cost the others {words.duration(seconds)} each time"
    )
    text += f": {'; '.join(why)}." if why else "."
    return Straggler(place.rank, place.host, brief(share), of, unit, brief(seconds), why, text)


def causes(place: Place, places: Mapping[int, Place], hosts: Mapping[str, HostSample]) -> list[str]:
    """What is unusual about a rank and its host, compared with all others: sentences without a full stop."""
    others = [other for other in places.values() if other.rank != place.rank]
    found = []
    host = hosts.get(place.host)
    if host is not None:
        elsewhere = [other for name, other in hosts.items() if name != place.host]
        found += [text for rule in _OF_HOSTS if (text := rule(place.host, host, elsewhere))]
        if text := _crowded(place.host, places, hosts):
            found.append(text)
        if text := _slow_gpu(place, host, others, hosts):
            found.append(text)
    if text := _input(place, others):
        found.append(text)
    if text := _processor(place, others):
        found.append(text)
    return found


def _share_rule(
    value: Callable[[HostSample], float], least: float, more: float, sentence: str, *, alone: bool = True
) -> Callable[[str, HostSample, Sequence[HostSample]], str]:
    """A rule about a share of a host's time: unusual from ``least`` on, if it is ``more`` above the other hosts'; and
    if there are none, where it is unusual ``alone``.
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


def _crowded(name: str, places: Mapping[int, Place], hosts: Mapping[str, HostSample]) -> str:
    """More ranks for each core than elsewhere, and more than one."""
    ranks: dict[str, int] = {}
    for place in places.values():
        ranks[place.host] = ranks.get(place.host, 0) + 1
    density = {host: ranks[host] / hosts[host].cores for host in ranks if host in hosts and hosts[host].cores}
    elsewhere = [value for host, value in density.items() if host != name]
    if not elsewhere or name not in density:
        return ""
    if density[name] <= 1 or density[name] < 1.5 * statistics.median(elsewhere):
        return ""
    cores = hosts[name].cores
    return f"{name} runs {ranks[name]} ranks on {cores} {'core' if cores == 1 else 'cores'}, other hosts fewer"


def _slow_gpu(place: Place, host: HostSample, others: Sequence[Place], hosts: Mapping[str, HostSample]) -> str:
    """A lower clock than the same model has elsewhere, while it works."""
    own = next((gpu for gpu in host.gpus if gpu.index == place.gpu), None)
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
    return f"its GPU runs at {own.clock:,} MHz, those of other ranks at {round(statistics.median(clocks)):,} MHz"


def _input(place: Place, others: Sequence[Place]) -> str:
    """Steps begin late: waiting for input, as a rule."""
    usual = _median_of(others, lambda rates: rates.before_first)
    here = place.rates.before_first
    if usual is None or not place.steps or here < usual + max(0.002, 0.1 * place.rates.step_seconds):
        return ""
    return (
        f"a step's first tensor comes {words.duration(here)} after its begin, "
        f"on other ranks after {words.duration(usual)}: the input pipeline or the forward pass is slower"
    )


def _processor(place: Place, others: Sequence[Place]) -> str:
    """Many more cores in use than elsewhere, or hardly any."""
    usual = _median_of(others, lambda rates: rates.cpu)
    here = place.rates.cpu
    if usual is None or not here:
        return ""
    if here > 2 * usual + 0.5:
        return f"its process keeps {here:.1f} cores busy, those of other ranks {usual:.1f}"
    if usual >= 0.5 and here < usual / 3:
        return (
            f"its process keeps only {here:.1f} cores busy, those of other ranks {usual:.1f}: "
            "it waits for something, such as a disk or the network"
        )
    return ""


def _median_of(places: Sequence[Place], value: Callable[[Rates], float]) -> float | None:
    return statistics.median([value(place.rates) for place in places]) if places else None
