"""The polling of a discovery, and its end."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from hvdgloo.runner.elastic.discovery import DiscoveryError, HostDiscoveryScript
from hvdgloo.runner.elastic.host_polling import HostPolling
from tests.support.rendezvous import until


def test_nothing_is_listed_if_hosts_cannot_be_discovered() -> None:
    class Broken:
        def find_available_hosts_and_slots(self) -> Mapping[str, int]:
            raise KeyError("pods")

    listed: list[object] = []
    with (
        pytest.raises(DiscoveryError, match="KeyError: 'pods'"),
        HostPolling(Broken(), listed.append, listed.append),
    ):
        pass
    assert listed == []
    assert not any(thread.name == "hvdgloo-discovery" for thread in threading.enumerate())


def test_a_script_that_hangs_ends_with_the_job(tmp_path: Path) -> None:
    script, pid = tmp_path / "hosts.sh", tmp_path / "pid"
    again = f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 1000"
    script.write_text(f"#!/bin/sh\n[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; echo h1; exit; }}\n{again}\n")
    script.chmod(0o755)
    listed: list[object] = []
    told: list[str] = []
    with HostPolling(HostDiscoveryScript(str(script)), listed.append, told.append, interval=0.01):
        until(pid.exists, "the script to hang")
    until(lambda: not psutil.pid_exists(int(pid.read_text())), "the script to be ended", 2)
    assert listed == [(("h1", 1),)]
    assert told == [], "that it was ended is no trouble"
