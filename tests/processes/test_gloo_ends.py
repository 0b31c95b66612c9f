"""The end of a group of torch's Gloo: whatever goes wrong in it ends the process."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support import warm

DESTROYED = """
import os, time
from concurrent.futures import ThreadPoolExecutor
from hvdgloo._backends.gloo import GlooBackend
from hvdgloo._backends.sockets import _watched, ends
from hvdgloo.rendezvous import MemoryStore

def connect():
    store = MemoryStore()
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: GlooBackend(store, "test/", rank, 3, "127.0.0.1", 10), range(3)))

for milliseconds in (2, 4, 6, 8):  # Gloo takes 10 for the end of a group, and the connections end within these
    first, *others = connect()
    duplicates = [os.dup(each) for each in _watched(first._connections._epoll) if None not in ends(each)]
    assert len(duplicates) == 2
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(first.close)
        time.sleep(milliseconds / 1000)
        for other in others:
            other.abort()
        closing.result(10)
    for other in others:
        other.close()
    for duplicate in duplicates:
        os.close(duplicate)
"""


def test_a_group_is_destroyed_while_somebody_else_has_its_connections() -> None:
    """A forked child has duplicates, and so has, for a moment, whoever looks at descriptors. If an event comes for a
    connection that Gloo has closed, it ends the process."""
    pytest.importorskip("torch")
    command = [warm.python(), "-c", DESTROYED]
    ended = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
