"""Elastic training between ranks that are threads, with real memberships: who gets whose state, and what nobody loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdgloo.elastic.loop import Loop
from hvdgloo.elastic.state import ObjectState, State
from hvdgloo.errors import BackendError, HorovodInternalError, InvalidArgumentError, MismatchError, PeerLostError
from tests.support.elastic_job import WAIT, ElasticJob, Worker, everywhere
from tests.support.rendezvous import Task


def state_of(worker: Worker, **values: Any) -> ObjectState:
    """A state that works in this worker's Contexts."""
    state = ObjectState(worker.hvd.broadcast_object, worker.hvd.rank, **values)
    state._context = lambda: worker.context
    return state


class Trainee:
    """A worker that trains: each step adds up one from everybody."""

    def __init__(self, worker: Worker, state: ObjectState | None = None) -> None:
        self.worker = worker
        self.state = state_of(worker, step=0, total=0.0) if state is None else state
        self.log: list[tuple[int, int, int]] = []  # epoch, step, size
        self.before: Callable[[Trainee], None] = lambda _: None
        self.after: Callable[[Trainee], None] = lambda _: None
        self.steps = 0
        self.task: Task[Any] | None = None

    def train(self, steps: int) -> ObjectState:
        self.steps = steps
        self.worker.job.begin()
        Loop(self.worker.job, self.state).run(self._train)
        return self.state

    def start(self, steps: int) -> Trainee:
        self.task = Task(lambda: self.train(steps))
        return self

    def result(self) -> ObjectState:
        assert self.task is not None
        state: ObjectState = self.task.result(WAIT)
        return state

    def _train(self) -> None:
        state, worker = self.state, self.worker
        while state.step < self.steps:
            self.before(self)
            state.total += worker.total() / worker.context.size
            state.step += 1
            self.log.append((worker.context.topology.epoch, state.step, worker.context.size))
            self.after(self)
            state.commit()


class Died(BaseException):
    """What ends a trainee whose worker is dead."""


def dies(trainee: Trainee) -> None:
    trainee.worker.die()
    raise Died


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on_from_their_commit(victim: int) -> None:
    with ElasticJob(3) as job:
        trainees = [Trainee(job.worker()) for _ in range(3)]

        def fate(trainee: Trainee) -> None:
            if trainee.state.step == 5 and trainee.worker.context.rank == victim and trainee.worker.context.size == 3:
                dies(trainee)

        for trainee in trainees:
            trainee.before = fate
            trainee.start(12)
        ended = [trainee.task.failure(WAIT) if _dies(trainee) else trainee.result() for trainee in trainees]
        survivors = [state for state in ended if isinstance(state, ObjectState)]
        assert [(state.step, state.total) for state in survivors] == [(12, 12.0)] * 2
        steps = [[(step, size) for _, step, size in t.log] for t in trainees if t.state in survivors]
        assert steps == [[(step, 3 if step <= 5 else 2) for step in range(1, 13)]] * 2


def _dies(trainee: Trainee) -> bool:
    assert trainee.task is not None
    trainee.task.wait(WAIT)
    return isinstance(trainee.task.outcome, Died)
