"""An elastic job whose workers are threads of this process: real memberships, a real server, real data planes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, add_first
from hvdgloo._job.context import Context
from hvdgloo._job.elastic import Membership
from hvdgloo._job.participant import Participant
from hvdgloo.config import Config
from hvdgloo.errors import HorovodInternalError
from hvdgloo.numpy._adapter import Array, NumpyAdapter
from hvdgloo.rendezvous import RendezvousServer
from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.types import ReduceOp
from tests.support.rendezvous import SECRET
from tests.support.threads import Task

T = TypeVar("T")
WAIT = 30.0


class Worker:
    """One worker: its membership, and the collectives of numpy in whatever Context that has."""

    def __init__(self, endpoint: str, sets: Sequence[Sequence[int]] = (), **settings: Any) -> None:
        config = Config(rendezvous=endpoint, secret=SECRET, elastic=True, **{"connect_timeout": 10.0, **settings})
        self.sets = [ProcessSet(ranks) for ranks in sets]
        self.job = Membership(Participant(config))
        self.job.adopt(sets, lambda context: add_first(context, self.sets))
        self.hvd: Frontend[Array] = Frontend(NumpyAdapter(), lambda: self.context)

    @property
    def context(self) -> Context:
        context = self.job.context
        assert context is not None
        return context

    def begin(self) -> Context:
        """As ``init()`` and the beginning of ``elastic.run`` in one."""
        context = self.job.begin()
        if self.job.placement is not None:
            self.job.enter()
            self.job.synced()
        return context

    def again(self, serial: int, error: BaseException | None = None) -> Context:
        """The next epoch, with its state."""
        self.job.again(serial, "", error)
        self.job.synced()
        return self.context

    def total(self, value: float = 1.0) -> float:
        """The sum of what all ranks have given."""
        return float(self.hvd.allreduce(np.array([value]), op=ReduceOp.SUM)[0])

    def fails(self) -> HorovodInternalError:
        """Collectives until one fails, as training would."""
        try:
            while True:
                self.total()
        except HorovodInternalError as error:
            return error

    def survive(self, serial: int = 1) -> Context:
        """Train until the epoch ends with an error, and go on in the next one."""
        return self.again(serial, self.fails())

    def die(self) -> None:
        """Die as a killed process does from the others' point of view: its connections end, and it sends nothing
        more."""
        self.job._closed.set()
        self.context.engine._control.close()
        self.job._participant.client.close()
        self.job._close_context("")  # a process would have nothing left

    def abandon(self) -> None:
        """The rest of a worker that has died while it was connected."""
        if not self.context.closed:
            self.context.engine._control.close()
        self.job._close_context("")

    def settle(self, size: int = 2) -> Context:
        """Train until the job has this size, which it may have already."""
        context = self.context
        while context.size != size:
            context = self.survive()
        return context

    def close(self) -> None:
        self.job._is_in = True  # as one that ends in the middle: it does not say that training is over
        self.job.close()


class ElasticJob:
    """A server and its workers, which are closed in the end.

    Args:
        rules: fields of ``Rules``; by default one worker is enough.
        settings: of each worker.
    """

    def __init__(self, size: int, *, rules: dict[str, Any] | None = None, **settings: Any) -> None:
        self.epochs = ElasticEpochs(Rules(**{"size": size, "smallest": 1, "launched": False, **(rules or {})}))
        self.server = RendezvousServer(secret=SECRET, elastic=self.epochs)
        self.settings = settings
        self.workers: list[Worker] = []

    def worker(self, **settings: Any) -> Worker:
        """One more, which has not asked for anything yet."""
        self.workers.append(Worker(self.server.endpoint, **{**self.settings, **settings}))
        return self.workers[-1]

    def start(self, size: int, **settings: Any) -> list[Worker]:
        """So many workers, all in training; by rank."""
        started = [self.worker(**settings) for _ in range(size)]
        everywhere(started, Worker.begin)
        return sorted(started, key=lambda worker: worker.context.rank)

    def __enter__(self) -> ElasticJob:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        everywhere(self.workers, Worker.close)
        self.server.stop()


def everywhere(workers: Sequence[Worker], action: Callable[[Worker], T]) -> list[T]:
    """Call a function on all, each on a thread of its own; return all results in time."""
    tasks = [Task(partial(action, worker)) for worker in workers]
    deadline = time.monotonic() + WAIT
    return [task.result(max(0.0, deadline - time.monotonic())) for task in tasks]
