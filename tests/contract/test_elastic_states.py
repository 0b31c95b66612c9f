"""Elastic training between ranks that are threads, with real memberships: who gets whose state, and what is lost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdgloo.elastic.loop import Loop
from hvdgloo.elastic.state import ObjectState, State
from hvdgloo.errors import BackendError, HorovodInternalError, MismatchError, PeerLostError
from tests.support.elastic_job import WAIT, ElasticJob, Worker
from tests.support.rendezvous import until
from tests.support.threads import Task


class Died(BaseException):
    """The error that ends a trainee whose worker is dead."""


class Trainee:
    """A worker that trains on a thread: each step adds one to a total, if all add one and it is divided by all.

    Attributes:
        before, after: called in each step, before its collective and before its commit.
        sent: how often its state was sent or received.
        log: the epoch, the step and the size, of each step.
    """

    def __init__(
        self,
        worker: Worker,
        state: ObjectState | None = None,
        *,
        steps: int = 12,
        before: Any = None,
        after: Any = None,
    ) -> None:
        self.worker, self.steps, self.sent = worker, steps, 0
        self.state = ObjectState(self._send, worker.hvd.rank, step=0, total=0.0) if state is None else state
        self.state._context = lambda: worker.context
        self.before: Callable[[Trainee], None] = before or (lambda _: None)
        self.after: Callable[[Trainee], None] = after or (lambda _: None)
        self.log: list[tuple[int, int, int]] = []

    def start(self) -> Trainee:
        self.task = Task(self.run)
        return self

    def run(self) -> ObjectState:
        self.worker.job.begin()
        Loop(self.worker.job, self.state).run(self._train)
        return self.state

    def result(self) -> tuple[int, float]:
        """The step and the total in the end."""
        state = self.task.result(WAIT)
        return state.step, state.total

    @property
    def rank(self) -> int:
        return self.worker.context.rank

    def _send(self, value: Any, root_rank: int = 0) -> Any:
        self.sent += 1
        return self.worker.hvd.broadcast_object(value, root_rank)

    def _train(self) -> None:
        state, worker = self.state, self.worker
        while state.step < self.steps:
            self.before(self)
            state.total += worker.total() / worker.context.size
            state.step += 1
            self.log.append((worker.context.topology.epoch, state.step, worker.context.size))
            self.after(self)
            state.commit()


def dies_at(step: int, rank: int) -> Callable[[Trainee], None]:
    """In the first epoch, one rank is dead when it comes to a step."""

    def fate(trainee: Trainee) -> None:
        if trainee.state.step == step and trainee.rank == rank and trainee.worker.context.topology.epoch == 0:
            trainee.worker.die()
            raise Died

    return fate


def ended(trainees: list[Trainee]) -> list[Trainee]:
    """Those that have trained to the end; all others must have died."""
    survivors = []
    for trainee in trainees:
        trainee.task.thread.join(WAIT)
        assert not trainee.task.thread.is_alive()
        if not isinstance(trainee.task.error, Died):
            trainee.task.result()
            survivors.append(trainee)
    return survivors


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on_from_their_commit(victim: int) -> None:
    with ElasticJob(3) as job:
        trainees = [Trainee(job.worker(), before=dies_at(5, victim)).start() for _ in range(3)]
        survivors = ended(trainees)
        assert [trainee.result() for trainee in survivors] == [(12, 12.0)] * 2
        sizes = [(step, 3 if step <= 5 else 2) for step in range(1, 13)]
        assert [[(step, size) for _, step, size in trainee.log] for trainee in survivors] == [sizes] * 2
        assert [trainee.sent for trainee in survivors] == [1] * 2, "all had the same, so nothing was sent"


def test_what_a_failed_epoch_had_is_freed_without_the_garbage_collector() -> None:
    """Its data plane, and what was worked on, although the error that ended it knows where it was raised."""
    kept: list[weakref.ref[Any]] = []
    freed: list[bool] = []

    def before(trainee: Trainee) -> None:
        context, step = trainee.worker.context, trainee.state.step
        if context.topology.epoch == 0 and step == 5 and context.rank:
            gradient = np.ones(1000)
            kept.extend([weakref.ref(gradient), weakref.ref(context.engine._groups[0].host.backend)])
            while True:
                trainee.worker.total()
        elif context.topology.epoch and step == 8:
            freed.append(all(each() is None for each in kept))
        dies_at(5, 0)(trainee)

    gc.collect()
    gc.disable()
    try:
        with ElasticJob(3) as job:
            ended([Trainee(job.worker(), before=before).start() for _ in range(3)])
    finally:
        gc.enable()
    assert len(kept) == 4
    assert freed == [True, True]


def test_issue_3399_and_3143_a_graceful_change_loses_no_step() -> None:
    """A worker joins while the others check without committing; what they have done is not done again."""
    with ElasticJob(2) as job:
        checks = threading.Event()

        def checking(trainee: Trainee) -> None:
            checks.set()
            if trainee.state.step == 50 and trainee.worker.context.size == 2:
                until(lambda: trainee.worker.job.update()[1], "the third", timeout=WAIT)
            trainee.state.check_host_updates()  # long after the last commit, in Horovod's sense

        class Uncommitted(ObjectState):
            def commit(self) -> None:
                self.check_host_updates()

        def uncommitted(worker: Worker) -> Trainee:
            state = Uncommitted(worker.hvd.broadcast_object, worker.hvd.rank, step=0, total=0.0)
            return Trainee(worker, state, steps=400, after=checking)

        first = [uncommitted(job.worker()).start() for _ in range(2)]
        assert checks.wait(WAIT)
        joined = uncommitted(job.worker()).start()
        assert [trainee.result() for trainee in (*first, joined)] == [(400, 400.0)] * 3
        assert joined.log[0][1] > 1
        for trainee in first:
            assert [step for _, step, _ in trainee.log] == list(range(1, 401))
        assert [size for _, _, size in first[0].log if size != 2], "the third has never come"


def test_every_worker_gets_the_newest_commit() -> None:
    """One rank has committed a step that another has not; rank 0 is not the one."""
    with ElasticJob(3) as job:

        def fate(trainee: Trainee) -> None:
            if trainee.worker.context.topology.epoch == 0 and trainee.state.step == 5:
                if trainee.rank == 1:
                    trainee.state.step, trainee.state.total = 6, 6.0
                    trainee.state.save()
                dies_at(5, 2)(trainee)

        trainees = [Trainee(job.worker(), before=fate).start() for _ in range(3)]
        survivors = ended(trainees)
        assert [trainee.result() for trainee in survivors] == [(12, 12.0)] * 2
        assert all(next(step for epoch, step, _ in trainee.log if epoch) == 7 for trainee in survivors)
        assert [trainee.sent for trainee in survivors] == [2] * 2


def test_what_a_callback_changes_everywhere_is_kept_and_what_differs_is_the_roots() -> None:
    with ElasticJob(3) as job:
        trainees = []
        for _ in range(3):
            worker = job.worker()
            state = ObjectState(worker.hvd.broadcast_object, worker.hvd.rank, step=0, total=0.0, rate=3.0, mine=-1)
            trainee = Trainee(worker, state, before=dies_at(5, 2))

            def callback(state: Any = state, worker: Worker = worker) -> None:
                state.rate = float(worker.context.size)
                state.mine = worker.context.rank

            state.register_reset_callbacks([callback])
            trainees.append(trainee.start())
        survivors = ended(trainees)
        states: list[Any] = [trainee.state for trainee in survivors]
        assert [(state.rate, state.mine) for state in states] == [(2.0, 0)] * 2


@pytest.mark.parametrize("where", ["callback", "sync", "restore", "save", "commit"])
def test_a_second_failure_on_the_way_leads_to_one_more_epoch(where: str) -> None:
    with ElasticJob(3) as job:
        fails = threading.Event()

        class Failing(ObjectState):
            owner: Any

            def fail(self, place: str) -> None:
                epoch = 0 if place in ("save", "commit") else 1
                its_turn = self.owner.rank == 1 and self.owner.worker.context.topology.epoch == epoch
                if place == where and its_turn and self.step >= 5 and not fails.is_set():
                    fails.set()
                    raise BackendError(f"in {place}")

            def sync(self) -> None:
                self.fail("sync")
                super().sync()

            def restore(self) -> None:
                self.fail("restore")
                super().restore()

            def save(self) -> None:
                if hasattr(self, "owner"):
                    self.fail("save")
                super().save()

            def check_host_updates(self) -> None:
                self.fail("commit")
                super().check_host_updates()

        trainees = []
        for _ in range(3):
            worker = job.worker()
            state = Failing(worker.hvd.broadcast_object, worker.hvd.rank, step=0, total=0.0)
            state.owner = Trainee(worker, state, before=dies_at(7, 2))
            state.register_reset_callbacks([lambda state=state: state.fail("callback")])
            trainees.append(state.owner.start())
        survivors = ended(trainees)
        assert fails.is_set()
        assert [trainee.result() for trainee in survivors] == [(12, 12.0)] * len(survivors)
        assert len(survivors) >= 2


def test_an_error_of_the_program_ends_all_ranks() -> None:
    """Horovod repeats a mismatch for ever."""
    with ElasticJob(2) as job:

        def mismatch(trainee: Trainee) -> None:
            if trainee.state.step == 3:
                trainee.worker.hvd.allreduce(np.ones(2 + trainee.rank), name="odd")

        trainees = [Trainee(job.worker(), before=mismatch).start() for _ in range(2)]
        assert {type(trainee.task.failure(WAIT)) for trainee in trainees} == {MismatchError}
        assert {epoch for trainee in trainees for epoch, _, _ in trainee.log} == {0}


def test_a_failure_that_repeats_itself_ends_all_ranks_at_once() -> None:
    with ElasticJob(2) as job:

        def fails(trainee: Trainee) -> None:
            if trainee.state.step == 3:
                raise BackendError("the plane of step 3")

        trainees = [Trainee(job.worker(), before=fails).start() for _ in range(2)]
        errors = [trainee.task.failure(WAIT) for trainee in trainees]
        assert all(isinstance(error, HorovodInternalError) for error in errors), errors
        epochs = {trainee.worker.context.topology.epoch for trainee in trainees}
        assert epochs == {3}


def test_programs_may_write_states_of_their_own() -> None:
    class Own(State):
        """Only what is documented: three methods, and rank 0's state for all."""

        def __init__(self, worker: Worker) -> None:
            super().__init__(worker.hvd.broadcast_object, worker.hvd.rank)
            self._context = lambda: worker.context
            self.worker = worker
            self.step, self.total = 0, 0.0
            self.save()

        def save(self) -> None:
            self.kept = self.step, self.total

        def restore(self) -> None:
            self.step, self.total = self.kept

        def sync(self) -> None:
            self.step, self.total = self.worker.hvd.broadcast_object((self.step, self.total))
            self.save()

    with ElasticJob(3) as job:
        trainees: list[Trainee] = []
        for _ in range(3):
            worker = job.worker()
            own: Any = Own(worker)
            trainees.append(Trainee(worker, own, before=dies_at(5, 2)).start())
        survivors = ended(trainees)
        assert [trainee.result() for trainee in survivors] == [(12, 12.0)] * 2
        assert survivors[0].state._progress.serial == survivors[1].state._progress.serial


def test_checking_for_updates_is_one_collective_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with ElasticJob(2) as job:
        workers = job.start(2)
        states = [ObjectState(worker.hvd.broadcast_object, worker.hvd.rank) for worker in workers]
        asked: list[tuple[Any, ...]] = []
        for state, worker in zip(states, workers, strict=True):
            state._context = lambda worker=worker: worker.context
            launch = worker.context.engine.launch

            def launching(persistent: Any, *args: Any, launch: Any = launch, **kwargs: Any) -> None:
                asked.append(tuple(spec.nbytes for spec in persistent.request.tensors))
                launch(persistent, *args, **kwargs)

            monkeypatch.setattr(worker.context.engine, "launch", launching)
        for task in [Task(state.check_host_updates) for state in states]:
            task.result()
        assert asked == [(16,)] * 2


def test_a_worker_that_dies_while_others_get_the_state() -> None:
    """No other worker is left with its own half of the state."""
    with ElasticJob(3) as job:
        deaths = threading.Event()

        class Dying(ObjectState):
            owner: Any

            def sync(self) -> None:
                context = self.owner.worker.context
                if context.topology.epoch == 1 and context.rank == 1 and not deaths.is_set():
                    deaths.set()
                    self.owner.worker.die()
                    raise Died
                super().sync()

        def fate(trainee: Trainee) -> None:
            if trainee.worker.context.topology.epoch == 0 and trainee.state.step == 5:
                if trainee.rank == 1:
                    trainee.state.save()  # so that something travels, from the one that dies
                raise PeerLostError("as if", rank=2)

        trainees = []
        for _ in range(3):
            worker = job.worker()
            state = Dying(worker.hvd.broadcast_object, worker.hvd.rank, step=0, total=0.0)
            state.owner = Trainee(worker, state, before=fate)
            trainees.append(state.owner.start())
        survivors = ended(trainees)
        assert deaths.is_set()
        assert [trainee.result() for trainee in survivors] == [(12, 12.0)] * 2
