"""What runs in Spark's tasks: each brings an agent to the driver, and waits for its end.

A task is Spark's Python worker, which Spark may use again for the next job. So no code of the user's runs in it, and
nothing of it is left in it: the agent is a process of its own, and so are its workers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvdgloo.runner.inbound.task import Invitation
from hvdgloo.version import __version__

Task = Callable[[int, Iterable[Any]], Iterator[Any]]


def lists() -> Any:
    """How Spark adds lists up, for an accumulator. A class of its own, so that it needs no hvdgloo where it is read."""

    class Lists:
        def zero(self, value: list[Any]) -> list[Any]:
            return []

        def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:
            return value1 + value2

    return Lists()


def make_task(invitation: Invitation, python_path: str, executable: str | None, lacking: Any, *, again: bool) -> Task:
    """The function of ``mapPartitionsWithIndex``.

    It needs nothing from outside, so that an executor without hvdgloo can run it, and say so.

    Args:
        invitation: where the driver waits.
        python_path: folders that the caller wants workers to import from first, as in PYTHONPATH.
        executable: the workers' Python; by default the one that runs the task.
        lacking: an accumulator for what executors lack: ``[(index, host, sentence)]``.
        again: whether a task that Spark tries again brings another agent.
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
