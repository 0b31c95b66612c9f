"""Workers of an elastic job as threads: from one epoch into the next, with real engines and data planes."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdgloo._collectives import process_sets
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._engine.threads import python_stacks
from hvdgloo._job import elastic
from hvdgloo._job.control_plane import World
from hvdgloo._job.elastic import _Why
from hvdgloo._job.participant import Participant
from hvdgloo.errors import ConfigError, ConnectError, DismissedError, PeerLostError, RendezvousError
from hvdgloo.rendezvous import RendezvousServer
from hvdgloo.rendezvous._client import elastic as client_of_elastic
from hvdgloo.rendezvous._elastic.events import Changed
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.topology import Topology
from hvdgloo.types import ReduceOp
from tests.support.elastic_job import ElasticJob, Worker, everywhere
from tests.support.rendezvous import SECRET, until
from tests.support.threads import Task


def resident() -> int:
    """Bytes of this process's memory that are in use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_survivors_of_a_lost_worker_go_on_in_the_same_process(victim: int, plane: str) -> None:
    with ElasticJob(3, cpu_operations=plane) as job:
        workers = job.start(3)
        assert everywhere(workers, Worker.total) == [3.0] * 3
        workers.pop(victim).die()
        contexts = everywhere(workers, Worker.survive)
        assert [(context.rank, context.size, context.topology.epoch) for context in contexts] == [(0, 2, 1), (1, 2, 1)]
        assert everywhere(workers, Worker.total) == [2.0] * 2


def test_survivors_tell_for_how_long_they_had_waited_for_the_lost_one() -> None:
    """Training stands from the moment when a worker stops answering, not from when that is noticed."""
    changes: list[Changed] = []
    with ElasticJob(2) as job:
        job.epochs._act = lambda action: changes.append(action) if isinstance(action, Changed) else None
        survivor, victim = job.start(2)
        began = time.monotonic()
        went_on = Task(survivor.survive)
        until(lambda: "in total" in python_stacks(), "the survivor to be in an allreduce")
        waits = time.monotonic()
        until(lambda: time.monotonic() - waits > 2.0, "time to pass")
        victim.die()
        went_on.result(30)
        # That the victim is gone is noticed half a second after its death.
        assert 1.0 < changes[-1].stood <= time.monotonic() - began


def test_newcomers_work_alone_until_they_are_let_in() -> None:
    with ElasticJob(2) as job:
        workers = job.start(2)
        newcomer = job.worker()
        context = newcomer.begin()
        assert (context.rank, context.size, context.local_rank, context.cross_size) == (2, 3, 2, 1)
        assert newcomer.job.placement is None
        assert newcomer.total(7.0) == 7.0
        assert newcomer.hvd.broadcast(np.array([5.0]), 0).tolist() == [5.0]
        assert newcomer.hvd.broadcast_object({"own": 1}, 0) == {"own": 1}
        assert newcomer.hvd.allgather_object("x") == ["x"]
        assert newcomer.hvd.allgather(np.arange(2)).tolist() == [0, 1]
        received, counts = newcomer.hvd.alltoall(np.arange(6), splits=[1, 2, 3])
        assert (received.tolist(), counts.tolist()) == ([0, 1, 2, 3, 4, 5], [6])
        assert newcomer.hvd.reducescatter(np.arange(3.0), op=ReduceOp.SUM).tolist() == [0, 1, 2]

        entering = Task(newcomer.job.enter)
        until(lambda: all(worker.job.update()[1] == 2 for worker in workers), "the news")
        serials = {worker.job.update()[0] for worker in workers}
        everywhere(workers, lambda worker: worker.again(3))
        placement = entering.result()
        newcomer.job.synced()
        everyone = [*workers, newcomer]
        assert [worker.context.rank for worker in everyone] == [0, 1, 2]
        assert (placement.root, placement.everyone, placement.fresh) == (0, False, False)
        assert everywhere(everyone, Worker.total) == [3.0] * 3
        # What led to this epoch is no news in it.
        assert all(worker.job.update()[1] == 0 for worker in everyone)
        assert len(serials) == 1
        assert context.closed


def test_what_a_newcomer_does_alone_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with ElasticJob(1) as job:
        job.start(1)
        newcomer = job.worker()
        newcomer.begin()
        assert not caplog.records
        newcomer.total()
        newcomer.total()
    (said,) = [record for record in caplog.records if "act on it alone" in record.getMessage()]
    assert said.getMessage().startswith("allreduce.noname.1: this worker joined while others are in training")


def test_a_second_run_in_an_epoch_takes_its_state_from_rank_0() -> None:
    with ElasticJob(2) as job:
        workers = job.start(2)
        everywhere(workers, lambda worker: worker.again(4))
        first = [worker.job.placement for worker in workers]
        assert all(placement is not None and placement.everyone and not placement.fresh for placement in first)
        second = everywhere(workers, lambda worker: worker.job.enter())
        assert all((each.root, each.everyone, each.fresh) == (0, False, True) for each in second)


def test_who_cannot_connect_ends_the_waits_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch is void, and connecting stops at once: no worker waits for the one that has given up."""
    with ElasticJob(3, connect_timeout=60.0) as job:
        workers = job.start(3)
        epoch = workers[0].context.topology.epoch
        opened = Participant.open
        refused: list[float] = []

        def refuse(self: Participant, world: World, *arguments: Any, **named: Any) -> Any:
            if world.topology.epoch == epoch + 1 and world.rank == 2:
                refused.append(time.monotonic())
                raise ConnectError("refused here", rank=0)
            return opened(self, world, *arguments, **named)

        monkeypatch.setattr(Participant, "open", refuse)
        contexts = everywhere(workers, lambda worker: worker.again(1))
        assert time.monotonic() - refused[0] < 5.0
        assert [(context.rank, context.topology.epoch) for context in contexts] == [(0, 2), (1, 2), (2, 2)]
        assert everywhere(workers, Worker.total) == [3.0] * 3


def test_an_epoch_that_the_server_ends_is_over_for_members_who_cannot_notice() -> None:
    with ElasticJob(2) as job:
        workers = job.start(2)
        context = workers[0].context
        news = workers[0].job._news
        workers[0].job._end_if_void(msgspec.structs.replace(news, voided=context.topology.epoch, reason="h2 was lost"))
        until(lambda: context.engine.error, "the engine's end")
        with pytest.raises(PeerLostError, match="the epoch is over: h2 was lost"):
            workers[0].total()
        everywhere(workers, Worker.survive)
        assert everywhere(workers, Worker.total) == [2.0] * 2


@pytest.mark.parametrize("first", [0, 2])
def test_no_worker_is_blamed_for_the_end_of_an_epoch_that_the_server_ends(first: int) -> None:
    """Members hear of it one after the other; one that hears of it through a connection that ends accuses no other."""
    with ElasticJob(3) as job:
        workers = job.start(3)
        context, news = workers[first].context, workers[first].job._news
        told = msgspec.structs.replace(news, voided=context.topology.epoch, reason="h2 was lost")
        workers[first].job._end_if_void(told)
        errors = everywhere(workers, Worker.fails)
        assert [str(error) for error in errors] == ["the epoch is over: h2 was lost"] * 3
        assert [_Why.of(error).accused for error in errors] == [()] * 3


def test_progress_is_reported_once_the_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without the server; a worker that wants to say where it is waits for the next one."""
    monkeypatch.setattr(client_of_elastic, "_REPORT_SECONDS", 0.1)
    with ElasticJob(1) as job:
        (worker,) = job.start(1)
        port = int(job.server.endpoint.rpartition(":")[2])
        job.server.stop()
        reports = [Task(worker.job.synced), Task(lambda: worker.job._client.up(0))]
        for _ in range(3):
            with pytest.raises(RendezvousError):
                worker.job.leaving()  # which is not worth so long a wait
        job.epochs = ElasticEpochs(job.epochs.rules, hold=30.0)
        job.server = RendezvousServer(secret=SECRET, port=port, elastic=job.epochs)
        job.server.start()
        for report in reports:
            report.result(10)


def test_a_listener_that_fails_or_blocks_keeps_nothing_from_going_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elastic, "_LISTENER_SECONDS", 0.1)
    heard, forever = threading.Event(), threading.Event()

    def listener(flags: int) -> None:
        if not caplog.records:
            raise KeyError("in the program")
        heard.set()
        forever.wait(20)

    with ElasticJob(1) as job:
        (worker,) = job.start(1)
        worker.job.listen(listener)
        entering = Task(job.worker().job.enter)
        until(lambda: caplog.records, "what the listener has raised")
        assert "KeyError: 'in the program'" in caplog.text
        worker.again(1)
        entering.result(10)
        Task(job.worker().job.enter)
        assert heard.wait(10)
        begun = time.monotonic()
        worker.close()
        assert time.monotonic() - begun < 10.0
        forever.set()


def test_who_cannot_listen_any_more_tries_again_and_then_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error that elastic.run takes for none of the job's: it would come back with the next epoch."""
    monkeypatch.setattr(elastic, "_PAUSE", 0.02)
    attempts: list[int] = []

    def refuse(self: Participant) -> socket.socket:
        attempts.append(1)
        if len(attempts) == 3:
            return listen(self)
        raise ConnectError("every port is taken")

    with ElasticJob(1, elastic_timeout=0.3) as job:
        (worker,) = job.start(1)
        listen = Participant.listen
        monkeypatch.setattr(Participant, "listen", refuse)
        worker.again(1)
        assert len(attempts) == 3
        with pytest.raises(ConfigError, match="every port is taken"):
            worker.again(2)
        assert 5 < len(attempts) < 25


def test_a_newcomer_whose_address_cannot_be_used_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members that train do not, nor does another newcomer that arrived with it."""

    def check(topology: Topology, reached_from: str) -> None:
        if any(worker.address == "127.0.0.2" for worker in topology.workers):
            raise ConfigError("127.0.0.2 is of no use to others")

    monkeypatch.setattr(elastic, "check_addresses", check)
    with ElasticJob(2) as job:
        workers = job.start(2)
        misled, good = job.worker(address="127.0.0.2"), job.worker()
        everywhere([misled, good], lambda worker: worker.job.begin())

        def enter() -> None:
            with pytest.raises(ConfigError, match="of no use"):
                misled.job.enter()
            misled.close()  # as its process ends

        entering = [Task(enter), Task(good.job.enter)]
        until(lambda: len(job.epochs._job._pool.joinable()) == 2, "both to be ready")
        until(lambda: all(worker.job.update()[1] == 2 for worker in workers), "the news")
        contexts = everywhere(workers, lambda worker: worker.again(1))
        for each in entering:
            each.result(10)
        assert [context.size for context in contexts] == [3, 3]
        assert everywhere([*workers, good], Worker.total) == [3.0] * 3


@pytest.mark.parametrize("started_by_launcher", [False, True])
def test_a_worker_is_a_launcher_s_if_it_has_a_job_id(started_by_launcher: bool) -> None:
    """An id of its own may be given to any worker."""
    with ElasticJob(1) as job:
        worker = job.worker(worker="one", job_id="job" if started_by_launcher else "")
        assert worker.job.launched == started_by_launcher


def test_the_last_members_of_a_job_that_is_over_are_told_so() -> None:
    with ElasticJob(2) as job:
        workers = job.start(2)
        workers[0].job.finished()
        workers[0].context.close()
        with pytest.raises(DismissedError) as told:
            workers[1].survive()
        assert told.value.fate == "over"


def test_who_comes_too_late_is_not_needed() -> None:
    with ElasticJob(1) as job:
        (worker,) = job.start(1)
        early = job.worker()
        early.begin()
        worker.job.finished()
        for late in (early.job.enter, job.worker().job.begin):
            with pytest.raises(DismissedError, match="has finished") as told:
                late()
            assert told.value.fate == "removed"


def test_process_sets_of_init_exist_in_every_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """Horovod #4021. Their numbers stay, since what was traced or compiled has them inside."""
    with ElasticJob(3, sets=[(1, 2), (0, 1)]) as job:
        workers = job.start(3)
        added = everywhere(workers, lambda worker: process_sets.add(worker.context, ProcessSet([0, 2])))
        assert [each.process_set_id for each in workers[0].sets] == [1, 2]
        assert added[0].process_set_id == 3
        workers[2].die()
        survivors = workers[:2]
        everywhere(survivors, Worker.survive)
        for worker, own in zip(survivors, added, strict=False):
            late, early = worker.sets
            assert (late.process_set_id, early.process_set_id, own.process_set_id) == (None, 2, None)
            for gone in (late, own):
                with pytest.raises(ValueError, match="is not registered"):
                    worker.hvd.allreduce(np.ones(1), process_set=gone)
        sums = everywhere(
            survivors, lambda worker: worker.hvd.allreduce(np.ones(1), op=ReduceOp.SUM, process_set=worker.sets[1])
        )
        assert [each.tolist() for each in sums] == [[2.0]] * 2
        said = "there are 2 ranks now, so these process sets of init() cannot be used: [1, 2]"
        assert [record.getMessage() for record in caplog.records if "process sets" in record.getMessage()] == [said]

        newcomer = job.worker()
        alone = newcomer.begin()
        assert [each.process_set_id for each in newcomer.sets] == [0, 0]
        assert process_sets.add(alone, [0, 2]).included()
        entering = Task(newcomer.job.enter)
        until(lambda: all(worker.job.update()[1] for worker in survivors), "the news")
        everywhere(survivors, lambda worker: worker.again(2))
        entering.result()
        assert [each.process_set_id for worker in (*survivors, newcomer) for each in worker.sets] == [1, 2] * 3
        assert newcomer.sets[0].included()


def test_a_timeline_goes_on_in_a_file_of_each_epoch(tmp_path: Path) -> None:
    with ElasticJob(2) as job:
        workers = job.start(2)
        path = str(tmp_path / "trace-{rank}.json")
        for worker in workers:
            worker.context.start_timeline(path)
        everywhere(workers, Worker.total)
        workers[0].die()
        workers[1].survive()
        workers[1].total()
        newcomer = job.worker()
        newcomer.begin().start_timeline(path)
        newcomer.total()
        entering = Task(newcomer.job.enter)
        until(lambda: workers[1].job.update()[1], "the news")
        workers[1].again(2)
        entering.result()
        everywhere([workers[1], newcomer], Worker.total)
        workers[1].context.stop_timeline()
        everywhere([workers[1], newcomer], lambda worker: worker.again(3))
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(written) == {f"trace-{name}.json" for name in ("0", "0.e1", "0.e2", "1", "1.e2", "1.e3")}
    assert all(any(event.get("ph") == "X" for event in written[f"trace-{name}.json"]) for name in ("0.e1", "1.e2"))


@pytest.mark.extended
def test_200_epochs_leave_nothing_behind() -> None:
    """Memory, descriptors and threads of workers and server stay as they are."""
    with ElasticJob(2) as job:
        workers = job.start(2)

        def reform(times: int) -> int:
            for _ in range(times):
                everywhere(workers, lambda worker: worker.again(1))
                assert everywhere(workers, Worker.total) == [2.0] * 2
            gc.collect()
            return resident()

        def counts() -> tuple[int, int, int]:
            keys = job.server.status()["store"]["keys"]
            return len(os.listdir("/proc/self/fd")), threading.active_count(), keys

        before, held = reform(20), counts()
        after = reform(180)
        # One that stays of each epoch would be 180. Tests before this one may still be closing theirs.
        until(
            lambda: all(now - then < 20 for now, then in zip(counts(), held, strict=True)),
            f"hardly more to be open than 180 epochs before: {held}",
        )
        assert after - before < 16 << 20, f"{(after - before) >> 10} KiB more than 180 epochs before"
