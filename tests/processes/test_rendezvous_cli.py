"""``hvdgloo-rendezvous`` as a user has it: workers of any origin, its output, its end."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from hvdgloo.config import read_secret_file
from hvdgloo.errors import AuthenticationError, DismissedError
from hvdgloo.rendezvous import RendezvousClient
from hvdgloo.rendezvous._auth import status_token
from hvdgloo.rendezvous._console import _Strangers
from hvdgloo.rendezvous._server.service import Refused
from tests.support.elastic_clients import Workers, placed
from tests.support.launching import run_command, wait_for
from tests.support.rendezvous import info, until
from tests.support.threads import Task

COMMAND = [sys.executable, "-m", "hvdgloo.rendezvous"]
WORKER = """
import os, sys
from hvdgloo.config import Config
from hvdgloo.rendezvous import RendezvousClient, WorkerInfo, host_identity
config = Config.from_env()
client = RendezvousClient(config.rendezvous, config.secret)
worker = WorkerInfo(config.rank, config.index, "here", host_identity(), client.local_address(), 1, os.getpid())
registration = client.register(0, worker, timeout=20)
print(registration.rank, registration.topology.local_size(registration.rank), flush=True)
sys.stdin.read()
"""


class Command:
    """The command, running, with what it has printed so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = folder / "output"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HVDGLOO_")}
        environment["TMPDIR"] = str(folder)
        with self.output.open("w") as file:
            self.process = subprocess.Popen([*COMMAND, *arguments], stdout=file, stderr=file, env=environment)
        self.wait_for("(password: ")
        self.endpoint = self.find(r"HVDGLOO_RENDEZVOUS=(\S+)")
        self.secret_file = self.find(r"HVDGLOO_SECRET_FILE=(\S+)")

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.text or self.process.poll() is not None, text)
        assert text in self.text, self.text

    def find(self, pattern: str) -> str:
        match = re.search(pattern, self.text)
        assert match, self.text
        return match[1]

    def client(self) -> RendezvousClient:
        return RendezvousClient(self.endpoint, read_secret_file(self.secret_file))

    def end(self, number: int = signal.SIGTERM) -> int:
        started = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(10)
        assert time.monotonic() - started < 3
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def run(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield run
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()


def start_worker(command: Command, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HVDGLOO_")}
    environment |= {"HVDGLOO_RENDEZVOUS": command.endpoint, "HVDGLOO_SECRET_FILE": command.secret_file, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def test_workers_started_by_anything_get_ranks(start: Callable[..., Command]) -> None:
    """With Kubernetes' completion index, which says who is first."""
    command = start("--np", "3", "--once")
    workers = [start_worker(command, JOB_COMPLETION_INDEX=str(index)) for index in (2, 0, 1)]
    try:
        answers = [worker.stdout.readline().split() for worker in workers if worker.stdout]
        assert answers == [["2", "3"], ["0", "3"], ["1", "3"]]
        command.wait_for("all 3 workers are in (here: ranks 0-2)")
        assert command.process.poll() is None
    finally:
        for worker in workers:
            worker.kill()  # however workers end, the command does
            worker.communicate()
    assert command.process.wait(5) == 0
    assert "no worker is connected any more" in command.text


def test_it_tells_who_comes_and_goes(start: Callable[..., Command]) -> None:
    """Pain 20: a live list."""
    command = start("--np", "3")
    command.wait_for("0 of 3 workers are in")
    with ExitStack() as stack:
        client = stack.enter_context(command.client())
        task = Task(lambda: client.register(0, info(host_name="node7"), timeout=20))
        command.wait_for("1 of 3 workers are in (hosts: node7 1)")
        with command.client() as other:
            Task(lambda: other.register(0, info(host_name="node8", host_identity="b"), timeout=0.2)).failure()
            command.wait_for("2 of 3 workers are in (hosts: node7 1, node8 1)")
        until(lambda: command.text.count("1 of 3 workers are in (hosts: node7 1)") == 2, "the other one's leaving")
        assert command.end() == 0
        assert "is being stopped" in str(task.failure())


def test_refused_requests_are_told_but_not_each() -> None:
    """Pain 30: a wrong secret, or a stranger, shows; a flood of them does not fill the log."""
    strangers = _Strangers()
    assert strangers.line(Refused(), 0.0) == ""
    assert strangers.due_in(0.0) == math.inf
    assert strangers.line(Refused(1, "10.0.0.7", "why"), 5.0) == "refused a request from 10.0.0.7: why"
    said = [strangers.line(Refused(count, "10.0.0.8", "why"), 5.0 + count) for count in range(2, 30)]
    assert said == [""] * 28
    assert strangers.due_in(34.0) == 1.0
    assert strangers.line(Refused(29, "10.0.0.8", "why"), 35.0) == "refused 28 requests, the last from 10.0.0.8: why"
    assert strangers.due_in(35.0) == math.inf


def test_a_stranger_is_told_of_while_it_happens(start: Callable[..., Command]) -> None:
    command = start("--np", "1")
    with RendezvousClient(command.endpoint, b"x" * 32) as stranger, pytest.raises(AuthenticationError):
        stranger.status()
    command.wait_for("refused a request from 127.0.0.1: the signature is wrong")
    requests.get(f"http://{command.endpoint}/", timeout=5)  # a browser's first try, which asks for a password
    with command.client() as client:
        client.status()
    assert command.text.count("refused") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it(start: Callable[..., Command], number: int) -> None:
    command = start("--np", "2")
    with command.client() as client:
        waiting = Task(lambda: client.register(0, info(), timeout=30))
        command.wait_for("1 of 2")
        assert command.end(number) == 0
        assert "is being stopped" in str(waiting.failure())
    assert "Traceback" not in command.text
    assert not os.path.exists(os.path.dirname(command.secret_file))


def test_the_secret_is_the_owners_alone_and_never_printed(start: Callable[..., Command], tmp_path: Path) -> None:
    """Pain 30."""
    path = tmp_path / "mine"
    command = start("--np", "1", "--secret-file", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_text().strip()
    assert len(secret) == 64
    assert secret not in command.text
    arguments = Path(f"/proc/{command.process.pid}/cmdline").read_text()
    assert secret not in arguments
    token = run_command([*COMMAND, "--status-token", "--secret-file", str(path)], check=True, timeout=30).stdout.strip()
    assert token not in command.text
    answer = requests.get(
        f"http://{command.endpoint}/v1/status", headers={"Authorization": f"Bearer {token}"}, timeout=5
    )
    assert answer.json()["epochs"][0]["expected"] == 1
    command.end()
    assert path.read_text().strip() == secret  # a file that the user named stays, and serves again
    assert start("--np", "1", "--secret-file", str(path)).secret_file == str(path)
    assert path.read_text().strip() == secret


def test_others_may_read_the_secret(start: Callable[..., Command], tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.write_text("ab" * 32)
    path.chmod(0o644)
    assert "warning: others may read" in start("--np", "1", "--secret-file", str(path)).text


FIXED = ("--start-timeout", "0.3")
ELASTIC = ("--min-np", "2", "--elastic-timeout", "0.3")


def fails_alone(command: Command, host: str) -> None:
    """A worker registers, and is told that the other one is missing, as is the reader of the output."""
    with ExitStack() as stack:
        if "goes on with" in command.text:
            error = Workers(command.endpoint, stack, read_secret_file(command.secret_file)).ask(host).failure()
            assert isinstance(error, DismissedError)
            assert error.fate == "failed"
            text = f"1 of 2 workers are ready (pod-{host} 1) after 0.3 s"
        else:
            client = stack.enter_context(command.client())
            error = Task(lambda: client.register(0, info(host_name=host), timeout=30)).failure()
            text = f"came for 0.3 s, and 1 of 2 workers are in (hosts: {host} 1)"
        assert text in str(error)
        command.wait_for(text)


@pytest.mark.parametrize("kind", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_with_once_a_start_that_fails_ends_it(start: Callable[..., Command], kind: tuple[str, ...]) -> None:
    command = start("-np", "2", *kind, "--once")
    fails_alone(command, "a")
    assert command.process.wait(10) == 1


@pytest.mark.parametrize("kind", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_without_once_another_start_may_follow(start: Callable[..., Command], kind: tuple[str, ...]) -> None:
    """The time starts with its first worker."""
    command = start("-np", "2", *kind)
    for host in ("a", "b"):
        fails_alone(command, host)
    assert command.end() == 0


def test_an_elastic_job_says_who_comes_and_who_is_lost(start: Callable[..., Command]) -> None:
    command = start("-np", "2", "--min-np", "1", "--max-np", "3", "--once")
    assert "waits for 2 workers, then goes on with 1 to 3 on" in command.text
    command.wait_for("waiting for workers: 0 of 2 workers are ready")
    with ExitStack() as stack:
        workers = Workers(command.endpoint, stack, read_secret_file(command.secret_file))
        first = workers.ask("a")
        command.wait_for("waiting for workers: 1 of 2 workers are ready (pod-a 1)")
        placed(workers.ask("b"))
        placed(first)
        workers.train("a", "b", epoch=0)
        command.wait_for("epoch 0: 2 workers are in training (pod-")
        waiting = workers.ask("c")
        command.wait_for("a new worker on host pod-c (process 2) has arrived")
        back = [workers.ask(id, 0, serial=1) for id in ("a", "b")]
        for task in (*back, waiting):
            placed(task)
        workers.train("a", "b", "c", epoch=1)
        command.wait_for("epoch 1: 3 workers are in training (pod-")
        assert re.search(r"host pod-c was added; 2 workers went on, with 1 new one, after [0-9.]+ s\n", command.text)
        rank = placed(back[0]).rank
        workers.die("a")
        command.wait_for(f"rank {rank} on host pod-a (process 2) has lost its connection")
        for task in [workers.ask(id, 1, serial=2) for id in ("b", "c")]:
            placed(task)
        workers.train("b", "c", epoch=2)
        command.wait_for("epoch 2: 2 workers are in training (pod-")
        assert re.search(r"\] 2 of 3 workers went on after [0-9.]+ s\n", command.text)
        assert command.text.count("has lost its connection") == 1, "why they went on has just been said"
        for id in ("b", "c"):
            workers[id].finished()
        command.wait_for("all workers have finished; rank ")
        assert command.process.poll() is None
    assert command.process.wait(10) == 0
    assert command.text.endswith("no worker is connected any more\n")


def test_all_addresses(start: Callable[..., Command]) -> None:
    command = start("--np", "1", "--bind", "0.0.0.0:0")
    assert "0.0.0.0" not in command.endpoint  # no client can connect to that
    assert "127.0.0.1:" in command.text
    with command.client() as client:
        assert client.status()["epochs"][0]["expected"] == 1


def test_its_output_may_go_nowhere() -> None:
    with subprocess.Popen([*COMMAND, "--np", "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        variables = dict(line.strip().split("=", 1) for line in lines if "=" in line)
        process.stdout.close()
        secret = read_secret_file(variables["HVDGLOO_SECRET_FILE"])
        with RendezvousClient(variables["HVDGLOO_RENDEZVOUS"], secret) as client:
            client.register(0, info(), timeout=10)  # a line is printed, and there is no reader
            assert client.status()["epochs"][0]["state"] == "complete"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the number of workers is missing: give -np N"),
        (["--np", "0"], "'0' is not a number of workers"),
        (["--np", "-3"], "'-3' is not a number"),
        (["--np", "two"], "'two' is not a number"),
        (["--nnp", "2"], "unknown argument --nnp; did you mean --np?"),
        (["--np", "2", "--start-timout=3"], "did you mean --start-timeout?"),
        (["--np", "2", "extra"], "unknown argument extra"),
        (["--np", "2", "--start-timeout", "0"], "expected a number greater than 0"),
        (["--np", "2", "--start-timeout", "nan"], "expected a number greater than 0"),
        (["--np", "2", "--bind", "here:http"], "--bind here:http: expected ADDR"),
        (["--np", "2", "--bind", "127.0.0.1:70000"], "a port up to 65535"),
        (["--np", "2", "--bind", "127.0.0.1:1", "--bind", "127.0.0.2:2"], "all addresses have one port, not 1 and 2"),
        (["--np", "2", "--bind", "192.0.2.1:0"], "192.0.2.1: this host has no such address"),
        (["--np", "2", "--bind", "127.0.0.1:9", "--port-range", "5-6"], "give only one of them"),
        (["--np", "2", "--port-range", "9-1"], "expected FIRST-LAST"),
        (["--np", "2", "--secret-file", "/nowhere/secret"], "/nowhere/secret: No such file or directory"),
        (["--np", "2", "--secret-file", "/dev/null"], "32 hexadecimal digits"),
        (["--np", "2", "--tls", "perhaps"], "expected one of auto, off, required"),
        (["--np", "2", "--tls-key", "key"], "HVDGLOO_TLS_KEY is set without HVDGLOO_TLS_CERT"),
        (["--np", "2", "--tls-cert", "/nowhere/cert"], "/nowhere/cert cannot be used: No such file"),
        (["-np", "2", "--min-np", "3"], "--min-np 3 exceeds -np 2"),
        (["-np", "4", "--max-np", "3"], "--max-np 3 is below -np 4"),
        (["-np", "2", "--min-np", "none"], "'none' is not a number of workers"),
        (["-np", "2", "--elastic-timeout", "5"], "--elastic-timeout is for elastic jobs: give --min-np, too"),
        (["-np", "2", "--join", "now"], "--join is for elastic jobs"),
        (["-np", "2", "--min-np", "1", "--join", "later"], "invalid choice: 'later'"),
        (["-np", "2", "--min-np", "1", "--elastic-timeout", "0"], "expected a number greater than 0"),
        (["-np", "2", "--min-np", "1", "--reset-limit", "-1"], "at least 0, not '-1'"),
        (["-np", "2", "--min-np", "1", "--start-timeout", "9"], "--start-timeout is for a fixed number of workers"),
        (["-np", "2", "--min-nps", "1"], "did you mean --min-np?"),
        (["--status-token"], "--status-token needs the job's secret"),
    ],
)
def test_options_that_cannot_be_used(
    arguments: list[str], text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdgloo.rendezvous._cli import main

    monkeypatch.delenv("HVDGLOO_SECRET", raising=False)
    monkeypatch.delenv("HVDGLOO_SECRET_FILE", raising=False)
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert text in capfd.readouterr().err


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    from hvdgloo.rendezvous._cli import main

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--np", "1", "--bind", f"127.0.0.1:{port}"]) == 2
        taken = f"cannot listen on port {port} of 127.0.0.1: Address already in use"
        assert f"error: {taken}" in capfd.readouterr().err
        assert main(["--np", "1", "--page", f"127.0.0.1:{port}"]) == 2
        assert f"error: the job's page: {taken}" in capfd.readouterr().err


STEPS = """
import os, sys, time
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
until, over = time.monotonic() + 50, False
while not over:
    hvd.allreduce(np.ones(4, np.float32), name="x")
    over = hvd.broadcast_object(os.path.exists(sys.argv[1]) or time.monotonic() > until)
"""


def test_page_shows_what_workers_do_that_were_started_elsewhere(tmp_path: Path) -> None:
    command = Command(tmp_path, "-np", "2", "--page", "--once")
    end = tmp_path / "end"
    link = command.find(r"Page: (\S+)")
    token = status_token(read_secret_file(command.secret_file))
    # The server's own address leads there, too; a link works once.
    way = urllib.request.Request(f"http://{command.endpoint}/", headers={"Authorization": f"Bearer {token}"})
    for _ in range(2):
        with urllib.request.urlopen(way, timeout=30) as answer:
            assert answer.url.startswith(link.partition("?")[0])
            assert b"<title>hvdgloo</title>" in answer.read()

    def shown() -> Any:
        address = f"{link.partition('?')[0]}v1/job?curves=0"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HVDGLOO_")},
        "HVDGLOO_RENDEZVOUS": command.endpoint,
        "HVDGLOO_SECRET_FILE": command.secret_file,
        "HVDGLOO_ADDRESS": "127.0.0.1",
    }
    workers = [subprocess.Popen([sys.executable, "-c", STEPS, str(end)], env=variables) for _ in range(2)]
    try:
        wait_for(lambda: min(shown()["ranks"]["operations"], default=0) > 0, 40, "both have reported")
        found = shown()
        assert found["ranks"]["rank"] == [0, 1]
        assert set(found["ranks"]["pid"]) == {worker.pid for worker in workers}
        end.touch()
        assert [worker.wait(30) for worker in workers] == [0, 0]
        assert command.process.wait(30) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        command.process.kill()
        command.process.wait()
