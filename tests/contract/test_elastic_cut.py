"""An elastic job's workers whose connections are cut while they form an epoch, at each message in turn."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from hvdgloo.errors import HorovodInternalError
from tests.support.elastic_job import ElasticJob, Worker, everywhere

pytestmark = pytest.mark.extended

SIZE = 3
SENDING = ("send", "sendall", "sendmsg")


class Scissors:
    """Cuts the connection on which the process's n-th message is about to be sent, with all that was under way in it.

    Attributes:
        count: messages so far.
        at: which one is not sent; 0 for none.
        what: the beginning of that message.
    """

    def __init__(self) -> None:
        self.count = self.at = 0
        self.what = b""
        self._lock = threading.Lock()

    def begin(self, at: int) -> None:
        with self._lock:
            self.count, self.at, self.what = 0, at, b""

    def pass_by(self, sock: socket.socket, data: Any) -> None:
        """Before a message is sent."""
        with self._lock:
            self.count += 1
            if self.count != self.at:
                return
            first = data[0] if isinstance(data, (list, tuple)) else data
            self.what = bytes(first[:60])
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is not connected any more


@contextmanager
def cutting() -> Iterator[Scissors]:
    """Every socket that Python code uses is watched, on either side."""
    scissors = Scissors()
    original = {name: getattr(socket.socket, name) for name in SENDING}

    def watched(name: str) -> Callable[..., Any]:
        def send(self: socket.socket, data: Any, *more: Any) -> Any:
            scissors.pass_by(self, data)
            return original[name](self, data, *more)

        return send

    try:
        for name in SENDING:
            setattr(socket.socket, name, watched(name))
        yield scissors
    finally:
        for name in SENDING:
            delattr(socket.socket, name)


class Meeting:
    """A barrier at which workers that are threads see that all of them are equally far."""

    def __init__(self) -> None:
        self._epochs: dict[Worker, int] = {}
        self._changed = threading.Condition()

    def is_complete(self, worker: Worker) -> bool:
        """Wait until all have trained in the worker's epoch, or the epoch is over; return whether they have."""
        context = worker.context
        with self._changed:
            self._epochs[worker] = context.topology.epoch
            self._changed.notify_all()
            while list(self._epochs.values()).count(context.topology.epoch) < SIZE:
                if context.engine.error is not None:
                    return False
                self._changed.wait(0.01)
        return True


def form_again(worker: Worker, meeting: Meeting) -> int:
    """Do what ``elastic.run`` does: continue after errors, and join with new workers.

    Returns:
        the number of the epoch in which all are there.
    """
    error: HorovodInternalError | None = None
    while True:
        worker.again(1, error)
        error = None
        try:
            while worker.total() < SIZE and not worker.total(float(worker.job.update()[1] > 0)):
                pass
        except HorovodInternalError as failure:
            error = failure
            continue
        if worker.context.size == SIZE and meeting.is_complete(worker):
            return worker.context.topology.epoch


@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_a_link_is_cut_at_each_message_of_forming(plane: str) -> None:
    """Epoch after epoch is formed, and in each the next message is not sent. All workers always find together again."""
    at, missed, slowest = 0, 0, (0.0, b"")
    with ElasticJob(SIZE, cpu_operations=plane, connect_timeout=20.0) as job, cutting() as scissors:
        workers = job.start(SIZE)
        while missed < 2:  # the number of messages is not quite the same each time
            at += 1
            before = workers[0].context.topology.epoch
            start = time.monotonic()
            scissors.begin(at)
            epochs = everywhere(workers, partial(form_again, meeting=Meeting()))
            took = time.monotonic() - start
            slowest = max(slowest, (took, scissors.what))
            assert len(set(epochs)) == 1
            assert epochs[0] > before
            missed = 0 if scissors.what else missed + 1
        assert at > 20
        # Nothing waits for a time-out.
        assert slowest[0] < 15.0, slowest
