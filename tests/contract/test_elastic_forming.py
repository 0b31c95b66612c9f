"""A second worker dies while the survivors of a first one form the next epoch: they form another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from hvdgloo._backends.select import Planes
from hvdgloo._job.control_plane import ControlPlane
from hvdgloo._job.elastic import Membership
from hvdgloo.rendezvous import ElasticClient
from tests.support.elastic_job import WAIT, ElasticJob, Worker, everywhere
from tests.support.threads import Task

POINTS: dict[str, tuple[type, str, bool]] = {
    "before it has asked": (ElasticClient, "next_epoch", False),
    "when it knows its place": (ElasticClient, "next_epoch", True),
    "before its links": (ControlPlane, "connect", False),
    "with its links": (ControlPlane, "connect", True),
    "with its data plane": (Planes, "open", True),
    "before it has said that it is connected": (ElasticClient, "up", False),
    "after it has said so": (ElasticClient, "up", True),
}


class Killed(BaseException):
    """Nothing of the worker goes on."""


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_a_second_death_while_the_next_epoch_is_formed(
    plane: str, point: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, late = POINTS[point]
    if plane == "gloo" and name != "open":
        pytest.skip("the data plane makes no difference yet")
    with ElasticJob(4, cpu_operations=plane, operation_timeout=5.0) as job:
        workers = job.start(4)
        workers.pop(3).die()
        errors = [worker.fails() for worker in workers]
        doomed = workers[victim].job
        called: Callable[..., Any] = getattr(owner, name)

        def kill(self: Any, *arguments: Any, **named: Any) -> Any:
            result = called(self, *arguments, **named) if late or not is_doomed(self, doomed) else None
            if is_doomed(self, doomed):
                doomed._closed.set()
                doomed._participant.client.close()
                let_go(result)
                raise Killed
            return result

        monkeypatch.setattr(owner, name, kill)
        tasks = [Task(lambda pair=pair: pair[0].again(1, pair[1])) for pair in zip(workers, errors, strict=True)]
        assert isinstance(tasks.pop(victim).failure(WAIT), Killed)
        dead = workers.pop(victim)
        dead.abandon()
        started = time.monotonic()
        for task in tasks:
            task.result(WAIT)
        # A worker that had said that it is connected trains, and notices.
        contexts = everywhere(workers, Worker.settle)
        assert time.monotonic() - started < 5
        assert [(context.rank, context.size) for context in contexts] == [(0, 2), (1, 2)]
        assert everywhere(workers, Worker.total) == [2.0, 2.0]


def let_go(result: Any) -> None:
    """Release the resources of a killed process, as the system does."""
    if isinstance(result, tuple):
        for link in result[0].values():
            link.sock.close()
    elif hasattr(result, "abort"):
        result.abort()
        result.close()


def is_doomed(part: Any, membership: Membership) -> bool:
    """Tell whether an object belongs to this worker."""
    participant = membership._participant
    match part:
        case ElasticClient():
            return part is membership._client
        case ControlPlane():
            return part.client is participant.client
        case Planes():
            return part._store._client is participant.client  # type: ignore[attr-defined]
    raise AssertionError(part)
