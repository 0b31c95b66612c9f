"""A real agent that workers report to, and what is left of that when it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from hvdgloo._platform.runtime import agent_folder
from hvdgloo.runner.protocol.frames import Cleared, Exited, Finish, Observe, Observed, Spawn
from tests.processes.test_agent_elastic import DEADLINE, Agent
from tests.support.launching import wait_for

REPORT = """
import os, socket
path = os.environ["HVDGLOO_OBSERVER"]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"from a worker", path)
"""


@pytest.fixture
def folder() -> Path:
    return Path(agent_folder(f"test.{os.getpid()}", os.environ))


def test_workers_report_to_the_launcher_by_way_of_their_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDGLOO_OBSERVER", "/where/a/launcher/around/this/one/listens")
    agent = Agent(elastic=False)
    agent.channel.send(Observe(host=False))
    agent.channel.send(Spawn(0, [sys.executable, "-c", REPORT], {}))
    assert agent.wait(Exited) == Exited(0, 0)
    assert agent.wait(Observed) == Observed([b"from a worker"])
    assert folder.is_dir()
    agent.channel.send(Finish())
    agent.wait(Cleared)
    assert not folder.exists()
    agent.close()


def test_the_folder_of_an_agent_that_was_killed_is_removed(folder: Path) -> None:
    agent = Agent(elastic=False)
    agent.channel.send(Observe(host=False))
    wait_for(folder.is_dir, DEADLINE, "the folder")
    (proper,) = psutil.Process(agent._process.pid).children()
    proper.kill()
    wait_for(lambda: not folder.exists(), DEADLINE, "its watchdog removes it")
    agent.close()
