"""SIGTERM to a worker without a launcher."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from hvdgloo.elastic import _leaving as leaving
from hvdgloo.elastic._leaving import leaving_on_sigterm
from hvdgloo.errors import RendezvousError
from tests.support.threads import Task


@dataclass
class Job:
    """A membership that is told ``unreachable`` times without success."""

    launched: bool = False
    unreachable: int = 0
    told: threading.Event = field(default_factory=threading.Event)

    def leaving(self) -> None:
        if self.unreachable:
            self.unreachable -= 1
            raise RendezvousError("no server")
        self.told.set()


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_one_makes_it_leave_and_the_second_would_end_it(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with leaving_on_sigterm(job):
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.told.wait(10)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [record.message for record in caplog.records] == [
        "this worker was asked to end (SIGTERM), and leaves the job at its next commit; another SIGTERM ends it at once"
    ]


def test_the_second_one_ends_the_first_process_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which the kernel ignores signals that it does not handle."""
    statuses: list[int] = []
    job, pid = Job(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "_exit", statuses.append)
    with leaving_on_sigterm(job):
        for _ in range(2):
            os.kill(pid, signal.SIGTERM)
        assert job.told.wait(10)
    assert statuses == [143]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_server_that_cannot_be_reached_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_PAUSE", 0.001)
    job = Job(unreachable=3)
    with leaving_on_sigterm(job):
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.told.wait(10)
    assert not job.unreachable


def test_afterwards_it_ends_the_process_as_before() -> None:
    with leaving_on_sigterm(Job()):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_s_own_handler_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    own = signal.getsignal(signal.SIGTERM)
    with leaving_on_sigterm(Job()):
        assert signal.getsignal(signal.SIGTERM) is own
        os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    with leaving_on_sigterm(Job()):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "one that it sets later, too"


def test_a_launcher_s_workers_end_as_it_wants() -> None:
    with leaving_on_sigterm(Job(launched=True)):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_get_no_signals() -> None:
    def enter() -> object:
        with leaving_on_sigterm(Job()):
            return signal.getsignal(signal.SIGTERM)

    assert Task(enter).result() is signal.SIG_DFL
