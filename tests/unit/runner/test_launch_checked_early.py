"""Every value that a user gives is looked at before the first agent is started, wherever it was written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import hvdgloo.run
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli.main import main
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.transport.base import AgentStream
from hvdgloo.runner.transport.failures import Diagnosis, Ending


class NoAgents:
    """A way to hosts that must not be used."""

    def start(self, host: HostEntry) -> AgentStream:
        raise AssertionError(f"an agent was started on {host.name}")

    def is_local(self, host: HostEntry) -> bool:
        return False

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        raise AssertionError("nothing has ended")


@pytest.fixture(autouse=True)
def no_agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def choose(hosts: object, reach: Reach, *, fork: bool = False) -> NoAgents:
        return NoAgents()

    monkeypatch.setattr("hvdgloo.runner.launch.choose_spawner", choose)
    monkeypatch.setattr("hvdgloo.runner.transport.select.AnyHostSpawner.start", NoAgents.start)
    monkeypatch.setattr("hvdgloo.runner.doctor.doctor.choose_spawner", choose)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")


def test_what_is_right_would_start_one() -> None:
    """Or else nothing here would prove anything."""
    with pytest.raises(AssertionError, match="an agent was started on h1"):
        main(["-H", "h1:1,h2:1", "--nics", "h1=eth0", "true"])
    with pytest.raises(AssertionError, match="an agent was started on h1"):
        hvdgloo.run.run(int, hosts="h1:1,h2:1", network_interfaces="h1=eth0")


HOSTS = [["-H", "h1:2,h2:2"], ["-H", "h1,h2"], ["-H", "h1:2,h2:2", "-np", "3"]]


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (["-H", "h1:4,h2:4"], 2),
        (["-H", "h2:8,h1:1", "--min-np", "1"], 9),
        (["-H", "h2:8,h1:1", "--min-np", "1", "--max-np", "3"], 4),
        (["--host-discovery-script", "./discover", "--min-np", "1"], 6),
    ],
    ids=["fixed", "elastic", "a limit", "discovered"],
)
def test_a_range_with_too_few_ports(
    flags: list[str], needed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "discover").write_text("#!/bin/sh\necho h1:5\n")
    (tmp_path / "discover").chmod(0o755)
    assert main([*flags, "--port-range", f"29000-{29000 + needed - 2}", "true"]) == 2
    assert re.search(rf"is too small: host h[12] needs {needed} ports, for MASTER_PORT and ", capsys.readouterr().err)
    with pytest.raises(AssertionError, match="an agent was started"):
        main([*flags, "--port-range", f"29000-{29000 + needed - 1}", "true"])


@pytest.mark.parametrize("hosts", HOSTS, ids=" ".join)
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--nics", "h9=eth0"], "--nics h9=eth0: h9 is not one of the hosts (h1, h2)"),
        (["--nics", "10.0.0.0/40"], "--nics 10.0.0.0/40: expected the name of a network interface"),
        (["--network-interface", "eth0 eth1"], "--nics eth0 eth1: expected the name of a network interface"),
        (["--port-range", "9-1"], "--port-range 9-1"),
        (["--start-timeout", "soon"], "--start-timeout soon"),
        (["--grace-period", "-1"], "'-1' is not a number of seconds"),
        (["--heartbeat-timeout", "0"], "'0' is not a number of seconds greater than 0"),
        (["--ssh-port", "99999"], "'99999' is not a port"),
        (["--ssh-args", "'unbalanced"], "--ssh-args 'unbalanced: No closing quotation"),
        (["--ssh-identity-file", "nowhere"], "--ssh-identity-file nowhere: there is no such file"),
        (["--agent-command", "exec {pod}"], "there is no {pod}"),
        (["--env-file", "nowhere"], "--env-file nowhere: No such file"),
        (["-x", "=1"], "expected NAME or NAME=VALUE"),
        (["--config-file", "nowhere"], "--config-file nowhere: No such file"),
        (["--stdin", "one"], "'one' is not a rank"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_flags(hosts: list[str], flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*hosts, *flags, "true"]) == 2
    assert text in capsys.readouterr().err
    assert main(["doctor", *hosts, *flags]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-H", "h1:1,h2:1", "--stdin", "2"], "--stdin 2: there are only ranks 0 to 1"),
        (["-H", "h1:1,h2:1", "-np", "1", "--stdin", "1"], "--stdin 1: there is only rank 0"),
        (["-H", "h1:1,h2:1", "-np", "3"], "3 processes were requested, but the hosts have only 2 slots"),
        (["-H", "h1:1,h2:99999"], "100000 slots are given; a job has at most 65536 processes"),
        (["-H", "h1:1,h2", "-np", "99999"], "a job has at most 65536 processes"),
    ],
    ids=["stdin", "stdin -np", "too few", "too many slots", "too many"],
)
def test_numbers(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "true"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("directory", ["taken", "taken/below"])
def test_a_folder_for_output_that_cannot_be_had(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-H", "h1:1,h2:1", "--output-filename", directory, "true"]) == 2
    assert f"--output-filename {os.path.abspath(directory)}: " in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_for_output_that_may_not_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert main(["-H", "h1:1,h2:1", "--output-filename", "locked", "true"]) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("network: {nics: h9=eth0}", "--nics h9=eth0: h9 is not one of the hosts (h1, h2)"),
        ("ssh: {port: 0}", "settings.yaml: ssh.port: '0' is not a port from 1 to 65535"),
        ("ssh: {identity_file: nowhere}", "--ssh-identity-file"),
        ("timeouts: {heartbeat_seconds: 0}", "timeouts.heartbeat_seconds: '0' is not a number of seconds greater"),
        ("agent_command: 'exec {pod}'", "there is no {pod}"),
    ],
)
def test_a_file(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    assert main(["-H", "h1,h2", "--config-file", "settings.yaml", "true"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"network_interfaces": ["h9=eth0"]}, r"--nics h9=eth0: h9 is not one of the hosts \(h1, h2\)"),
        ({"ssh_port": 99999}, r"run\(ssh_port=99999\): it is not a port from 1 to 65535"),
        ({"ssh_identity_file": "nowhere"}, "--ssh-identity-file"),
        ({"ssh_args": "-J gate"}, r"run\(ssh_args='-J gate'\): give a list of words, for example \['-J', 'gate'\]"),
        ({"agent_command": "exec {pod}"}, "there is no {pod}"),
        ({"start_timeout": -1}, r"run\(start_timeout=-1\): it is not a number of seconds"),
        ({"grace_period": float("nan")}, r"run\(grace_period=nan\): it is not a number of seconds"),
        ({"np": 0}, r"run\(np=0\): a job has at least one process"),
        ({"np": "2"}, r"run\(np='2'\): it is not a whole number"),
        ({"ssh_port": "22"}, r"run\(ssh_port='22'\): it is not a port from 1 to 65535"),
        ({"start_timeout": "5"}, r"run\(start_timeout='5'\): it is not a number of seconds"),
        ({"np": 99999}, "at most 65536 processes"),
        ({"hosts": "h1:many"}, "'h1:many' is not a host with a number of slots"),
        ({"env": {"HVDGLOO_PORT_RANGE": "9-1"}}, "HVDGLOO_PORT_RANGE"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_arguments_of_run(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hvdgloo.run.run(int, **{"hosts": "h1,h2", **arguments})


@pytest.mark.parametrize("called", ["already", "with arguments"])
def test_what_run_calls(called: str) -> None:
    function: Any = None if called == "already" else (print, ("x",))
    with pytest.raises(ConfigError, match=r"the first argument is a function, not .*; its arguments follow it"):
        hvdgloo.run.run(function, hosts="h1,h2")


def test_a_folder_for_output_of_run() -> None:
    with pytest.raises(ConfigError, match=r"--output-filename .*taken"):
        hvdgloo.run.run(int, hosts="h1:1,h2:1", output_filename="taken")
