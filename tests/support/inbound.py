"""Tasks of another system, as threads of this process or as processes, that bring agents to a ``TaskListener``."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdgloo.runner.inbound.hello import Reply, TaskHello, introduce
from hvdgloo.runner.inbound.listener import TaskListener
from hvdgloo.runner.inbound.task import Invitation, bring_agent
from hvdgloo.runner.worker.function_task import python_version
from hvdgloo.version import __version__
from tests.support.launching import wait_for

PATIENCE = 120.0
"""Seconds after which a test that waits has failed."""

_TASK = (
    "import base64, pickle, sys; from hvdgloo.runner.inbound.task import bring_agent; "
    "invitation, index, options = pickle.loads(base64.b64decode(sys.stdin.readline())); "
    "sys.exit(bring_agent(invitation, index, **options))"
)


class Tasks:
    """One thread for each task.

    Attributes:
        ended: by index, what ``bring_agent`` has returned or raised.
    """

    def __init__(self, invitation: Invitation, options: Sequence[dict[str, Any]]) -> None:
        self.ended: dict[int, int | Exception] = {}
        self._threads = [
            threading.Thread(target=self._bring, args=(invitation, index, each), daemon=True)
            for index, each in enumerate(options)
        ]
        for thread in self._threads:
            thread.start()

    def _bring(self, invitation: Invitation, index: int, options: dict[str, Any]) -> None:
        try:
            self.ended[index] = bring_agent(invitation, index, **options)
        except Exception as error:
            self.ended[index] = error

    def join(self) -> dict[int, int | Exception]:
        """Return their outcomes, once all have ended."""
        for thread in self._threads:
            thread.join(PATIENCE)
        assert len(self.ended) == len(self._threads), f"only these tasks ended: {self.ended}"
        return self.ended


@contextmanager
def gathered(*options: dict[str, Any], **settings: Any) -> Iterator[tuple[TaskListener, Tasks]]:
    """As many tasks, all of which are connected."""
    with TaskListener(len(options), addresses=["127.0.0.1"], **settings) as listener:
        tasks = Tasks(listener.invitation, options)
        listener.gather()
        yield listener, tasks
    tasks.join()


def process(invitation: Invitation, index: int, **options: Any) -> subprocess.Popen[bytes]:
    """A task that is a process of its own, which can be killed."""
    task = subprocess.Popen([sys.executable, "-c", _TASK], stdin=subprocess.PIPE, start_new_session=True)
    assert task.stdin is not None
    task.stdin.write(base64.b64encode(pickle.dumps((invitation, index, options))) + b"\n")
    task.stdin.flush()
    return task


def arrival(index: int, **fields: Any) -> TaskHello:
    """A task as it introduces itself."""
    usual = {"host": "h1", "machine": "m1", "cwd": os.getcwd(), "version": __version__, "python": python_version()}
    return TaskHello(index, **{**usual, **fields})


def visit(listener: TaskListener, who: TaskHello, secret: bytes | None = None) -> tuple[socket.socket, Reply]:
    """A task that comes, without an agent."""
    sock = socket.create_connection(listener.invitation.endpoints[0], timeout=PATIENCE)
    try:
        known = listener.secret if secret is None else secret
        return sock, introduce(known, sock, who, time.monotonic() + PATIENCE)[1]
    except BaseException:
        sock.close()
        raise


def eventually(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    wait_for(true, PATIENCE)
