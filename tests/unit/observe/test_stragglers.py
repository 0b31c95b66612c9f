"""The rank that others wait for, and the cause: reported only if it is more than chance, and worth attention."""

from __future__ import annotations

import pytest

from hvdgloo._observe.rates import Rates
from hvdgloo._observe.samples import Gpu, HostSample, Late, Lateness
from hvdgloo._observe.stragglers import Candidate, find
from tests.support.observed import CAUSES, SimulatedJob


def candidates(size: int = 4, *, steps: bool = True, gpu: int = -1, **rates: float) -> dict[int, Candidate]:
    """Ranks on two hosts that all do the same."""
    usual = (
        {"steps_per_second": 10.0, "step_seconds": 0.1, "before_first": 0.005, "cpu": 1.0} if steps else {"cpu": 1.0}
    )
    return {
        rank: Candidate(rank, f"h{1 + rank * 2 // size}", gpu, Rates(**{**usual, **rates}), steps)
        for rank in range(size)
    }


def hosts(**of_h2: float) -> dict[str, HostSample]:
    """Two hosts, of which one may be different."""
    usual: dict[str, float] = {"cpu": 0.4, "cores": 16, "memory": 10, "memory_total": 100}
    return {
        "h1": HostSample(at=0.0, **usual),  # type: ignore[arg-type]
        "h2": HostSample(at=0.0, **{**usual, **of_h2}),  # type: ignore[arg-type]
    }


def lateness(counts: dict[int, int], seconds: float = 0.014, recent: int = 1000) -> Lateness:
    late = tuple(Late(rank, count, count * seconds, count, count * seconds) for rank, count in counts.items())
    return Lateness(recent, recent, (), late)


def test_a_rank_that_is_nearly_always_the_last_is_named_with_what_it_costs() -> None:
    (straggler,) = find(lateness({3: 920, 0: 40, 1: 40}), candidates(), hosts())

    assert (straggler.rank, straggler.host, straggler.unit, straggler.of) == (3, "h2", "steps", 1000)
    assert straggler.share == 0.92
    assert straggler.seconds == 0.014
    assert straggler.causes == []
    assert straggler.text == (
        "Rank 3 (h2) was last in 92 % of the last 1,000 steps and cost the others 14 ms each time."
    )


def test_where_no_steps_are_counted_operations_are() -> None:
    (straggler,) = find(lateness({3: 920}), candidates(steps=False), hosts())

    assert straggler.unit == "operations"


@pytest.mark.parametrize(
    "seen",
    [
        None,
        lateness({}),
        lateness({0: 250, 1: 260, 2: 240, 3: 250}),
        lateness({3: 1000}, seconds=0.0005),
        lateness({3: 9}, recent=9),
        lateness({3: 6, 0: 4}, recent=10),
        lateness({77: 1000}),
    ],
    ids=["unknown", "no rank", "by chance", "not worth mentioning", "too early", "may be chance", "no such rank"],
)
def test_no_rank_is_blamed_without_reason(seen: Lateness | None) -> None:
    assert find(seen, candidates(), hosts()) == []


def test_of_two_ranks_one_is_always_the_last_which_says_nothing() -> None:
    assert find(lateness({0: 520, 1: 480}), candidates(2), hosts()) == []
    assert [found.rank for found in find(lateness({0: 50, 1: 950}), candidates(2), hosts())] == [1]


def test_a_job_of_one_rank_has_no_stragglers() -> None:
    assert find(lateness({0: 1000}), candidates(1), hosts()) == []


def test_chance_finds_none_among_a_thousand_ranks() -> None:
    counts = {rank: 1 + rank % 2 for rank in range(1024)}

    assert find(lateness(counts, seconds=1.0), candidates(1024), hosts()) == []
    assert [found.rank for found in find(lateness({**counts, 512: 60}, 1.0), candidates(1024), hosts())] == [512]


def test_the_costliest_comes_first() -> None:
    seen = lateness({1: 500})
    seen = Lateness(1000, 1000, (), (*seen.ranks, Late(2, 400, 40.0, 400, 40.0)))

    assert [found.rank for found in find(seen, candidates(), hosts())] == [2, 1]


def causes_of(of_rank_3: Rates | None = None, **of_h2: float) -> list[str]:
    ranks = candidates()
    if of_rank_3 is not None:
        ranks[3] = Candidate(3, "h2", -1, of_rank_3, True)
    (straggler,) = find(lateness({3: 920}), ranks, hosts(**of_h2))
    if straggler.causes:
        assert straggler.text.endswith(f"each time: {'; '.join(straggler.causes)}.")
    return straggler.causes


@pytest.mark.parametrize(
    ("of_h2", "text"),
    [
        (
            {"stolen": 0.12},
            "the hypervisor gives 12 % of h2's processor time to other machines (0 % on the other hosts)",
        ),
        (
            {"throttled": 0.4},
            "a limit on processor time holds the job on h2 back 40 % of the time (0 % on the other hosts)",
        ),
        ({"memory_pressure": 0.07}, "processes on h2 wait for memory 7 % of the time (0 % on the other hosts)"),
        ({"memory": 97}, "97 % of h2's memory is in use (10 % on the other hosts)"),
        ({"cpu": 0.99}, "the processors of h2 are 99 % busy (40 % on the other hosts)"),
        ({"cores": 1}, "h2 runs 2 ranks on 1 core, other hosts fewer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_unusual_about_its_host_is_said(of_h2: dict[str, float], text: str) -> None:
    assert causes_of(**of_h2) == [text]


def test_what_all_hosts_have_in_common_is_no_cause() -> None:
    common = HostSample(at=0.0, cores=16, cpu=0.99, stolen=0.2, throttled=0.3, memory_pressure=0.2)
    (straggler,) = find(lateness({3: 920}), candidates(), {"h1": common, "h2": common})

    assert straggler.causes == []


def test_on_a_single_host_shares_of_its_time_are_said_without_comparison() -> None:
    here = {rank: Candidate(rank, "h1", -1, Rates(step_seconds=0.1), True) for rank in range(4)}
    (straggler,) = find(lateness({3: 920}), here, {"h1": HostSample(at=0.0, cores=4, cpu=0.99, stolen=0.2)})

    assert straggler.causes == ["the hypervisor gives 20 % of h1's processor time to other machines"]


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (
            Rates(step_seconds=0.1, before_first=0.08, cpu=1.0),
            "a step's first tensor is submitted 80 ms after its beginning, on other ranks after 5 ms: "
            "the input pipeline or the forward pass is slower",
        ),
        (
            Rates(step_seconds=0.1, before_first=0.005, cpu=7.9),
            "its process keeps 7.9 cores busy, other ranks' processes 1 core",
        ),
        (
            Rates(step_seconds=0.1, before_first=0.005, cpu=0.1),
            "its process keeps only 10 % of a core busy, other ranks' processes 1 core: "
            "it waits for something, such as a disk or the network",
        ),
    ],
    ids=["input", "more processor time", "less processor time"],
)
def test_what_is_unusual_about_its_process_is_said(rates: Rates, text: str) -> None:
    assert causes_of(rates) == [text]


@pytest.mark.parametrize(
    ("clock", "use", "name", "said"),
    [(900, 0.9, "H100", True), (1950, 0.9, "H100", False), (900, 0.01, "H100", False), (900, 0.9, "A100", False)],
    ids=["slower", "as fast", "unused", "another model"],
)
def test_a_slower_gpu_is_said_if_it_is_the_same_model_at_work(clock: int, use: float, name: str, said: bool) -> None:
    measured = {
        "h1": HostSample(at=0.0, cores=8, cpu=0.4, gpus=(Gpu(0, "H100", 0.9, 0, 0, 1980, 1980),)),
        "h2": HostSample(at=0.0, cores=8, cpu=0.4, gpus=(Gpu(0, name, use, 0, 0, clock, 1980),)),
    }
    (straggler,) = find(lateness({1: 950}), candidates(2, gpu=0), measured)

    assert straggler.causes == (["its GPU runs at 900 MHz, other ranks' GPUs at 1,980 MHz"] if said else [])


def test_nothing_is_said_about_a_host_that_says_nothing() -> None:
    (straggler,) = find(lateness({3: 920}), candidates(), {})

    assert straggler.causes == []


@pytest.mark.parametrize("cause", CAUSES)
def test_a_simulated_job_shows_its_slow_rank_and_why(cause: str) -> None:
    words = {
        "": None,
        "stolen": "hypervisor",
        "throttled": "limit on processor time",
        "memory": "wait for memory",
        "gpu": "MHz",
        "input": "input pipeline",
        "busy": "99 % busy",
    }[cause]
    job = SimulatedJob(8, 4, slow=5, cause=cause, gpus=True)
    job.advance(60)

    (straggler,) = job.observatory.snapshot().stragglers
    assert (straggler.rank, straggler.host) == (5, "h3")
    assert straggler.share > 0.85
    assert 0.011 < straggler.seconds < 0.016
    assert [words is not None and words in text for text in straggler.causes] == ([True] if words else [])
