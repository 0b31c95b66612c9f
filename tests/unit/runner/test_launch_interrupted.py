"""Signals that come before any worker is there."""

from __future__ import annotations

import io
import signal
import threading
from typing import Any

import pytest

from hvdgloo.errors import JobFailedError
from hvdgloo.runner import launch
from hvdgloo.runner.elastic.discovery import FixedHosts
from hvdgloo.runner.elastic.host_polling import HostPolling
from hvdgloo.runner.elastic_launch import _asked
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.signals import COMMAND_LINE_SIGNALS
from hvdgloo.runner.surroundings import Surroundings


class Hanging:
    """A discovery that a signal interrupts."""

    def __init__(self, signum: signal.Signals) -> None:
        self._signum = signum

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        signal.raise_signal(self._signum)
        threading.Event().wait(10)
        return {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_first_discovery_that_hangs(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    if signum == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            _asked(Hanging(signum), COMMAND_LINE_SIGNALS)
    else:
        with pytest.raises(JobFailedError, match="interrupted before hosts were known") as raised:
            _asked(Hanging(signum), COMMAND_LINE_SIGNALS)
        assert raised.value.exit_code == 143
    assert signal.getsignal(signum) is before


def test_the_hosts_are_not_discovered_a_second_time_before_the_start() -> None:
    hosts = FixedHosts({"h1": 1})
    manager = _asked(hosts, ())
    hosts.set({"h2": 1})
    listed: list[object] = []
    with HostPolling(manager, listed.append, listed.append, interval=60.0):
        assert listed == [(("h1", 1),)]


def test_a_signal_during_a_further_start_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(*arguments: Any) -> LaunchResult:
        if arguments[5]:
            raise JobFailedError("before the workers were started", exit_code=130)
        return LaunchResult(JobOutcome(Failure(0, "h1", 3, "exited with status 3")), ())

    monkeypatch.setattr(launch, "_attempt", attempt)
    spec = LaunchSpec(("true",), (HostEntry("h1", 1),), 1, "/", {}, b"s" * 32, max_restarts=2)
    with pytest.raises(JobFailedError, match=r"^before the workers were started$") as raised:
        launch.launch(spec, Surroundings(io.StringIO(), io.StringIO(), signals=()))
    assert raised.value.exit_code == 130
