"""A job without a launcher, as ``hvdgloo-rendezvous --page`` shows it: ranks report to the server."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from hvdgloo._observe.samples import CODEC, LIMIT, HostSample, Observation, Sample, Steps
from hvdgloo._observe.view import STATES, Snapshot
from hvdgloo.errors import RendezvousError
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._job_observer import JobObserver
from tests.support.rendezvous import SECRET


def sample(rank: int, count: int = 1) -> Sample:
    steps = Steps(count=count, seconds=0.1 * count)
    return Sample(rank, 2, 0, 100 + rank, time.time(), steps=steps, doing="computing")


def test_what_ranks_report_reaches_who_looks() -> None:
    seen: list[Observation] = []
    with (
        RendezvousServer(secret=SECRET, size=1, observed=seen.append) as server,
        RendezvousClient(server.endpoint, SECRET) as client,
    ):
        assert client.observe(CODEC.encode(sample(0)))
        assert [type(observation) for observation in seen] == [Sample]
        with pytest.raises(RendezvousError, match="not an observation"):
            client.observe(b"nonsense")
        with pytest.raises(RendezvousError, match=f"at most {LIMIT} bytes"):
            client.observe(bytes(LIMIT + 1))
        assert len(seen) == 1


def test_a_server_that_is_not_observed_says_so() -> None:
    with RendezvousServer(secret=SECRET, size=1) as server, RendezvousClient(server.endpoint, SECRET) as client:
        assert not client.observe(CODEC.encode(sample(0)))


@pytest.fixture
def observer() -> Iterator[JobObserver]:
    rules = Rules(size=2, smallest=1, largest=4, launched=False)
    with JobObserver("the job", secret=SECRET, address="127.0.0.1", port=0, rules=rules) as observer:
        yield observer


def snapshot(observer: JobObserver) -> Snapshot:
    observer._observatory.tick()
    return observer._observatory.snapshot()


def fixed(*workers: tuple[int, str, bool], state: str = "complete") -> dict[str, Any]:
    """The status of a server with these workers: rank, host, connected."""
    observer = [{"rank": rank, "host": host, "pid": 100 + rank, "connected": there} for rank, host, there in workers]
    summary = f"{len(workers)} of 3 workers are in"
    return {"epochs": [{"epoch": 0, "state": state, "workers": observer, "summary": summary}]}


def test_workers_appear_with_their_hosts_once_all_are_there(observer: JobObserver) -> None:
    observer.look(fixed((1, "h1", True), state="gathering"))
    observer.observed(sample(1))
    seen = snapshot(observer)
    assert seen.ranks.rank == []
    assert (seen.job.state, seen.job.message) == ("starting", "1 of 3 workers are in")
    observer.look(fixed((2, "h2", True), (0, "h1", True), (1, "h1", True)))
    seen = snapshot(observer)
    assert [host.name for host in seen.hosts] == ["h1", "h2"]
    assert seen.ranks.local_rank == [0, 1, 0]
    assert seen.ranks.pid == [100, 101, 102]
    observer.observed(sample(1, count=7))
    observer.observed(HostSample(time.time(), 4, 0.5))
    seen = snapshot(observer)
    assert (seen.job.state, seen.job.message) == ("running", "")
    assert seen.ranks.steps == [0, 7, 0]
    assert [host.cores for host in seen.hosts] == [0, 0], "only agents measure hosts"


def test_who_is_not_connected_any_more_has_ended(observer: JobObserver) -> None:
    observer.look(fixed((0, "h1", True), (1, "h1", True)))
    observer.look(fixed((0, "h1", True), (1, "h1", False)))
    assert [STATES[state] for state in snapshot(observer).ranks.state] == ["starting", "ended"]


def test_an_elastic_jobs_epochs_are_followed(observer: JobObserver) -> None:
    def look(epoch: int, *workers: tuple[int, str, int]) -> None:
        there = [{"rank": r, "host": host, "local_rank": local, "connected": True} for r, host, local in workers]
        observer.look({"elastic": {"epoch": epoch, "workers": there, "phase": "training"}, "epochs": []})

    observer.look(
        {"elastic": {"epoch": 0, "workers": [], "phase": "waiting", "waiting_for": "2 workers"}, "epochs": []}
    )
    assert snapshot(observer).job.message == "waiting for 2 workers"
    look(0, (0, "h1", 0), (1, "h2", 0))
    look(1, (0, "h2", 0), (1, "h2", 1), (2, "h3", 0))
    observer.tell("rank 0 on host h1 was lost")
    seen = snapshot(observer)
    assert (seen.job.epoch, seen.job.least, seen.job.most) == (1, 1, 4)
    assert [seen.hosts[index].name for index in seen.ranks.host] == ["h2", "h2", "h3"]
    assert "rank 0 on host h1 was lost" in [event.text for event in seen.events if event.kind == "elastic"]


def test_the_end_is_shown_to_who_opens_the_link(observer: JobObserver) -> None:
    observer.look(fixed((0, "h1", True)))
    observer.ended(1, "epoch 0 has failed")
    with urllib.request.urlopen(observer.link(), timeout=30) as answer:
        assert answer.status == 200
    job = snapshot(observer).job
    assert (job.state, job.message, job.command) == ("failed", "epoch 0 has failed", "the job")
