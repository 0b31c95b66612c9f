"""The function that Spark's tasks run: each brings an agent to the driver, and waits for the agent's end.

A task runs in a Python worker of Spark's, which Spark may reuse for the next job. So it runs no user code, and nothing
of the job stays in it: the agent is a process of its own, and so are its workers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvdgloo.runner.inbound.task import Invitation
from hvdgloo.version import __version__

Task = Callable[[int, Iterable[Any]], Iterator[Any]]


def lists() -> Any:
    """Make the parameter of an accumulator of lists.

    Its class is local, so that it is pickled by value and executors need no hvdgloo to read it.
    """

    class Lists:
        def zero(self, value: list[Any]) -> list[Any]:
            return []

        def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:
            return value1 + value2

    return Lists()


def make_task(invitation: Invitation, python_path: str, executable: str | None, lacking: Any, *, again: bool) -> Task:
    """Make the function for ``mapPartitionsWithIndex``.

    The function is self-contained, so that an executor without hvdgloo can run it and report that.

    Args:
        invitation: the driver's address and credentials.
        python_path: directories from which workers import first, as in PYTHONPATH.
        executable: the workers' Python; by default the task's.
        lacking: an accumulator of the requirements that executors lack: ``[(index, host, sentence)]``.
        again: let a retried task bring another agent.
    """
    packed = pickle.dumps(invitation)
    expected = __version__

    def task(index: int, _: Iterable[Any]) -> Iterator[Any]:
        import socket
        import sys

        try:
            from hvdgloo.spark import _bringing
        except ImportError as error:
            missing = error.name or "hvdgloo"
            what = f"{sys.executable} has no {missing} (the driver has hvdgloo {expected})"
            lacking.add([(index, socket.gethostname(), what)])
        else:
            _bringing.bring(packed, index, python_path, executable, again=again)
        return iter(())

    return task
