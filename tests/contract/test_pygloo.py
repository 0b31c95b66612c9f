"""Properties of pygloo alone: it works in a process of its own, which ends when it must and not before.

Backends in threads, each with its helper process; where a worker must die, real workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from hvdgloo._backends import pygloo_helper
from hvdgloo._backends.base import Work
from hvdgloo._backends.pygloo import PIECE, PyglooBackend
from hvdgloo.errors import BackendError, ConnectError, RendezvousTimeoutError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, ReduceOp
from tests.support.backends import finish
from tests.support.job import MARKING, Job
from tests.support.launching import is_running, wait_for

pygloo = pytest.importorskip("pygloo", reason="pygloo is not installed; it has wheels for Python 3.8 to 3.10 only")

Connect = Callable[..., list[PyglooBackend]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """``connect(size, address)``: connected backends, closed after the test."""
    with ExitStack() as ending:

        def make(size: int, address: str = "127.0.0.1", store: MemoryStore | None = None) -> list[PyglooBackend]:
            store = store or MemoryStore()
            with ThreadPoolExecutor(size) as pool:
                made = list(pool.map(lambda rank: PyglooBackend(store, "p/", rank, size, address, 10), range(size)))
            for backend in made:
                ending.callback(backend.close)
            return made

        yield make


def begin(backend: PyglooBackend, count: int = 100) -> tuple[np.ndarray, Work]:
    array = np.ones(count)
    return array, backend.allreduce(Buffer.of_array(array), ReduceOp.SUM)


def helpers() -> list[psutil.Process]:
    """The helper processes of this one."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and pygloo_helper.__file__ in child.cmdline()
    ]


def test_the_workers_threads_go_on_while_a_collective_waits_for_a_late_peer(connect: Connect) -> None:
    early, late = connect(2)
    array, work = begin(early)
    waiting = threading.Thread(target=finish, args=(work,), daemon=True)
    waiting.start()
    steps = 0
    while steps < 200_000:  # with pygloo in this process there would not be one
        steps += 1
    assert waiting.is_alive()
    finish(begin(late)[1])
    waiting.join(10)
    assert array.tolist() == [2.0] * 100


def test_a_folder_that_is_no_text_is_left_out_of_the_helper_s_path(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])  # Python leaves it out, too
    one, other = connect(2)
    works = [begin(one)[1], begin(other)[1]]
    for work in works:
        finish(work)


def test_a_helper_that_dies_is_an_error_on_both_sides_at_once(connect: Connect) -> None:
    """As far as its peer can tell, the worker died with it."""
    ours, theirs = connect(2)
    works = [begin(ours)[1]]
    os.kill(theirs.helper_pid, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"Gloo allreduce of 800 bytes: .*(Connection closed|reset)"):
        finish(works[0], 2)
    with pytest.raises(BackendError, match="helper process that runs pygloo has ended with status -9"):
        finish(begin(theirs)[1], 2)
    with pytest.raises(BackendError, match=r"Connection closed|reset"):
        begin(ours)


def test_an_abort_ends_what_waits_in_the_midst_of_a_tensor(connect: Connect) -> None:
    ours, theirs = connect(2)
    array, work = begin(ours, PIECE)  # eight times as many bytes, of which the peer takes part in one piece
    finish(begin(theirs, PIECE // 8)[1])
    assert not work.completes_within(0.05)
    ours.abort()
    ours.abort()
    with pytest.raises(BackendError, match="status -9"):
        finish(work, 2)
    before = array.copy()
    ours.abandon()
    assert not is_running(ours.helper_pid)
    np.testing.assert_array_equal(array, before)


def test_signals_to_the_workers_process_group_are_the_workers_affair(connect: Connect) -> None:
    backends = connect(2)
    for backend in backends:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(backend.helper_pid, number)
    works = [begin(backend) for backend in backends]
    for array, work in works:
        finish(work)
        assert array.tolist() == [2.0] * 100


def test_closing_ends_the_helper(connect: Connect) -> None:
    backends = connect(2)
    descriptors = len(os.listdir("/proc/self/fd"))
    for backend in backends:
        assert is_running(backend.helper_pid)
        backend.close()
        backend.close()
        assert not is_running(backend.helper_pid)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3 * 2


def test_the_end_of_its_standard_input_ends_a_helper_in_the_midst_of_a_collective(connect: Connect) -> None:
    """As a worker's death does, whose peers may live on: no code of Python's runs in the helper then."""
    ours, _ = connect(2)
    begin(ours)
    began = time.monotonic()
    ours.close()
    assert time.monotonic() - began < 3
    with pytest.raises(BackendError, match="has been closed"):
        begin(ours)


def test_gloo_is_on_the_chosen_address(connect: Connect) -> None:
    backends = connect(3, "127.0.0.2")
    for backend in backends:
        connections = psutil.Process(backend.helper_pid).net_connections("tcp")
        assert len(connections) >= 2
        # One end of each is the address of a listener; the system chooses the other one's.
        assert all("127.0.0.2" in (found.laddr.ip, found.raddr.ip) for found in connections), connections


def test_requests_per_rank_do_not_grow_with_the_group(connect: Connect) -> None:
    class Counting(MemoryStore):
        requests = 0

        def set(self, key: str, value: bytes) -> None:
            self.requests += 1
            super().set(key, value)

        def get_many(self, keys: object, *, timeout: float) -> list[bytes]:
            self.requests += 1
            return super().get_many(keys, timeout=timeout)  # type: ignore[arg-type]

    for size in (2, 4):
        store = Counting()
        connect(size, store=store)
        assert store.requests == 2 * size


def test_a_rank_whose_wait_fails_leaves_no_helper() -> None:
    with pytest.raises(RendezvousTimeoutError):
        PyglooBackend(MemoryStore(), "p/", 0, 2, "127.0.0.1", 0.3)
    asked = []
    with pytest.raises(ConnectError, match="the job ended while"):
        PyglooBackend(MemoryStore(), "p/", 0, 2, "127.0.0.1", 10, lambda: not asked.append(1))
    assert asked
    assert helpers() == []


def test_an_address_of_another_host_is_an_error(connect: Connect) -> None:
    with pytest.raises(ConnectError, match=r"rank 0 could not connect its Gloo group from 192\.0\.2\.1"):
        connect(2, "192.0.2.1")
    assert helpers() == []


def test_gloo_waits_longer_than_its_own_half_minute() -> None:
    """The first call finds pygloo's own timeout, the second one finds another in its place."""
    context = pygloo.rendezvous.Context(0, 1)
    pygloo_helper._lift_timeout(pygloo, context)
    with pytest.raises(RuntimeError, match=r"use 0\.2\.1"):
        pygloo_helper._lift_timeout(pygloo, context)


WORKER = (
    MARKING
    + """
from hvdgloo._job.process import current

hvd.init()
rank = hvd.rank()
hvd.allreduce(np.ones(1000), op=hvd.Sum)
child = 0
if rank == 1:
    child = os.fork()  # as any DataLoader's worker
    if child == 0:
        signal.pause()
mark(f"ready.{rank}", json.dumps([current().engine._groups[0].host.backend.helper_pid, child]))
try:
    while True:
        hvd.allreduce(np.ones(200_000), op=hvd.Sum, name="x")
except hvd.HorovodInternalError as error:
    mark(f"failed.{rank}", json.dumps([time.time(), type(error).__name__, error.rank]))
"""
)


def test_a_killed_worker_takes_its_helper_along_and_is_noticed_at_once(tmp_path: Path) -> None:
    environ = {"HVDGLOO_CPU_OPERATIONS": "gloo", "HVDGLOO_GLOO_PROVIDER": "pygloo"}
    with Job(3, WORKER, tmp_path, **environ) as job:
        pids = [json.loads(job.wait_for_file(f"ready.{rank}")) for rank in range(3)]
        helper, child = pids[1]
        killed = time.time()
        job.workers[1].kill()
        try:
            wait_for(lambda: not is_running(helper), 5, "the helper's end")
            for rank in (0, 2):
                when, what, culprit = json.loads(job.wait_for_file(f"failed.{rank}", 10))
                assert (what, culprit) == ("PeerLostError", 1)
                assert when - killed < 3
        finally:
            os.kill(child, signal.SIGKILL)
        ended = job.wait()
        assert [ended[rank].returncode for rank in (0, 2)] == [0, 0], [worker.stderr for worker in ended]
        wait_for(lambda: not is_running(pids[0][0]) and not is_running(pids[2][0]), 5, "the other helpers' end")
