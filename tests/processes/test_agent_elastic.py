"""An agent's work in elastic jobs only: single workers end, and the host is given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import (
    PREAMBLE,
    Beat,
    Cleared,
    Dying,
    Exited,
    Finish,
    Frame,
    Leaving,
    Output,
    Spawn,
    Spawned,
    Start,
    StopWorker,
)
from tests.support.launching import is_running, wait_for

DEADLINE = 15.0
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


class Agent:
    """A real agent, with the launcher's end of its stream in our hands."""

    def __init__(self, *, elastic: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvdgloo.runner.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.channel = FrameChannel(self._process.stdout.fileno(), self._process.stdin.fileno(), preamble=PREAMBLE)
        self.said: list[Frame] = []
        start = Start(f"test.{os.getpid()}", dict(os.environ), "/", 60.0, 60.0, 1.0, elastic=elastic)
        self.channel.send(start)

    def find(self, kind: type[Frame], number: int | None = None) -> Frame | None:
        """The first frame of this kind that it has sent, about this worker if one is given."""
        self.said += [item for item in self.channel.receive() if isinstance(item, Frame) and type(item) is not Beat]
        return next(
            (f for f in self.said if type(f) is kind and (number is None or getattr(f, "number", None) == number)), None
        )

    def wait(self, kind: type[Frame], number: int | None = None) -> Frame:
        return wait_for(lambda: self.find(kind, number), DEADLINE, f"{kind.__name__} {number}")

    def spawn(self, number: int, argv: list[str]) -> int:
        """Start a worker, and wait for its first output; returns its process number."""
        self.channel.send(Spawn(number, argv, {}))
        spawned = self.wait(Spawned, number)
        self.wait(Output, number)
        assert isinstance(spawned, Spawned)
        return spawned.pid

    def signal(self, signum: int) -> None:
        """Send a signal to the whole process group, as batch systems do."""
        os.killpg(self._process.pid, signum)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent(elastic=True)
    yield made
    made.close()


def test_one_worker_is_stopped_and_the_others_go_on(agent: Agent) -> None:
    first, second = agent.spawn(7, SLEEP), agent.spawn(8, SLEEP)
    agent.channel.send(StopWorker(7, signal.SIGTERM, 10.0))
    assert agent.wait(Exited, 7) == Exited(7, -signal.SIGTERM)
    assert not is_running(first)
    assert is_running(second)
    assert agent.find(Exited, 8) is None


def test_a_worker_that_does_not_end_is_killed_after_its_own_grace(agent: Agent) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    agent.spawn(0, [sys.executable, "-c", stubborn])
    agent.spawn(1, SLEEP)
    began = time.monotonic()
    agent.channel.send(StopWorker(0, signal.SIGTERM, 0.3))
    assert agent.wait(Exited, 0) == Exited(0, -signal.SIGKILL, overdue=True)
    assert 0.2 < time.monotonic() - began < 5.0
    assert agent.find(Exited, 1) is None


def test_what_a_worker_leaves_behind_ends_with_it_and_its_place_can_be_taken(agent: Agent) -> None:
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.exit(3)"
    agent.spawn(0, [sys.executable, "-c", child])
    output = agent.wait(Output, 0)
    assert isinstance(output, Output)
    assert agent.wait(Exited, 0) == Exited(0, 3)
    left = int(output.data)
    wait_for(lambda: not psutil.pid_exists(left), 5.0, "the end of the worker's child")
    agent.spawn(1, SLEEP)
    agent.channel.send(StopWorker(0, signal.SIGTERM, 0.0))  # it has ended long ago
    agent.channel.send(Finish())
    agent.channel.send(StopWorker(1, signal.SIGKILL, 0.0))
    agent.wait(Cleared)
    assert [f for f in agent.said if isinstance(f, Exited)] == [Exited(0, 3), Exited(1, -signal.SIGKILL)]


def test_sigterm_gives_the_host_back_and_ends_nothing(agent: Agent) -> None:
    """Preemption: the workers leave at their next commit, when the launcher has told them."""
    worker = agent.spawn(0, SLEEP)
    agent.signal(signal.SIGTERM)
    agent.wait(Leaving)
    assert psutil.Process(worker).is_running()
    assert agent.find(Dying) is None
    agent.channel.send(StopWorker(0, signal.SIGTERM, 1.0))
    agent.wait(Exited, 0)
    agent.channel.send(Finish())
    agent.wait(Cleared)
    assert [type(frame) for frame in agent.said].count(Leaving) == 1


def test_in_a_job_of_fixed_size_sigterm_ends_the_workers() -> None:
    agent = Agent(elastic=False)
    try:
        agent.spawn(0, SLEEP)
        agent.signal(signal.SIGTERM)
        assert agent.wait(Dying) == Dying("it received SIGTERM")
        agent.wait(Cleared)
        assert agent.find(Leaving) is None
    finally:
        agent.close()
