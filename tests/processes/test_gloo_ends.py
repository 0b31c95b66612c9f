"""The end of a group of torch's Gloo: whatever goes wrong in it ends the process."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support import warm

DESTROYED = """
import os, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from hvdgloo._backends.gloo import GlooBackend
from hvdgloo._backends.sockets import _watched, ends
from hvdgloo.rendezvous import MemoryStore

def connect():
    store = MemoryStore()
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: GlooBackend(store, "test/", rank, 3, "127.0.0.1", 10), range(3)))

def threads_of_gloo():
    # Those that its groups have for operations.
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            count += path.read_text() == "pt_gloo_runloop\\n"
    return count

for _ in range(4):
    first, *others = connect()
    duplicates = [os.dup(each) for each in _watched(first._connections._epoll) if None not in ends(each)]
    assert len(duplicates) == 2
    before = threads_of_gloo()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(first.close)
        # Once threads of the group have ended, Gloo takes 10 ms for its end: the connections end within these.
        deadline = time.monotonic() + 10
        while threads_of_gloo() >= before:
            assert time.monotonic() < deadline
        for other in others:
            other.abort()
        closing.result(10)
    for other in others:
        other.close()
    for duplicate in duplicates:
        os.close(duplicate)
    for thread in threading.enumerate():  # what is left of the others: a group must not outlive the interpreter
        if thread.name == "hvdgloo-gloo-end":
            thread.join(10)
            assert not thread.is_alive()
"""


def test_a_group_is_destroyed_while_somebody_else_has_its_connections() -> None:
    """A forked child has duplicates, and so has, for a moment, whoever looks at descriptors. If an event comes for a
    connection that Gloo has closed, it ends the process."""
    pytest.importorskip("torch")
    command = [warm.python(), "-c", DESTROYED]
    ended = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
