"""The end of a group of torch's Gloo: whatever goes wrong in it ends the process."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support import warm
from tests.support.launching import run_command

CONNECT = """
import os, time
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

"""

DESTROYED = (
    CONNECT
    + """
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
"""
)


ENDED = (
    """
import atexit, os, threading, time

@atexit.register  # the first one, and so the last to be called
def look() -> None:
    if any(thread.name == "hvdgloo-gloo-end" for thread in threading.enumerate()):
        os._exit(3)
"""
    + CONNECT
    + """
from hvdgloo._backends import gloo
destroy = gloo._destroy

def slowly(*args):
    time.sleep(0.3)  # as a destructor that waits for what is under way
    destroy(*args)

gloo._destroy = slowly
for backend in connect():
    backend.abort()
    backend.close()
deadline = time.monotonic() + 10
while not any(thread.name == "hvdgloo-gloo-end" for thread in threading.enumerate()):
    assert time.monotonic() < deadline
"""
)


def run(python: str, program: str) -> None:
    command = [python, "-c", program]
    ended = run_command(command, env=dict(os.environ), timeout=30)
    assert ended.returncode == 0, ended.stderr


def test_a_group_is_destroyed_while_another_process_has_its_connections() -> None:
    """A forked child has duplicates, and so has, for a moment, a process that looks at descriptors. If an event comes
    for a connection that Gloo has closed, it ends the process."""
    pytest.importorskip("torch")
    run(warm.python(), DESTROYED)


def test_a_program_ends_while_its_groups_are_destroyed() -> None:
    """As a rank does that has lost another one: a thread that comes back from a destructor then aborts the process."""
    pytest.importorskip("torch")
    run(sys.executable, ENDED)
