"""Workers on several hosts that no launcher of ours has started: pains 9, 17, 20, 22, and the recipes as documented."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.support import warm
from tests.support.frameworks import need_installed
from tests.support.hosts import Bed, Host, HostProcess
from tests.support.launching import wait_for
from tests.support.orchestra import Orchestra, blocks, compose, kubernetes, services

PORT = 29400
PAGE = ROOT / "docs/kubernetes.md"

TRAIN = """
import json, os, time
import torch
import hvdgloo.torch as hvd
from hvdgloo._job.process import current

hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="total").item()
hosts = [[host.name, *host.addresses] for host in current().topology.hosts]
line = json.dumps([hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), total, hosts])
os.write(1, line.encode() + b"\\n")  # at once: workers of one pod write to one pipe
"""
TRAIN_ON = (
    TRAIN
    + """
# All have to leave in the same step, and do not look at the same moment.
while not hvd.allreduce(torch.tensor([float(os.path.exists("enough"))]), op=hvd.Max, name="step"):
    time.sleep(0.05)
"""
)
# Registers like hvd.init(), without importing torch.
REGISTER = """
import sys
from hvdgloo._job.participant import Participant
from hvdgloo._job.logging import configure_logging
from hvdgloo.config import Config
config = Config.from_env()
configure_logging(config, None)
participant = Participant(config)
print(participant.client.register(0, participant.info(None, 1), timeout=config.start_timeout).rank)
"""


class Server:
    """``hvdgloo-rendezvous`` on a host."""

    def __init__(self, host: Host, folder: Path, *arguments: str) -> None:
        self.host, self.folder, self.arguments = host, folder, arguments
        self.secret_file = str(folder / "job.secret")
        self.endpoint = f"{host.address}:{PORT}"
        self.log = folder / "server.log"
        self.start()

    def start(self) -> None:
        """Once more, at the same address and with the same secret."""
        argv = [sys.executable, "-m", "hvdgloo.rendezvous", "--bind", self.endpoint, "--secret-file", self.secret_file]
        with self.log.open("w") as log:
            self.process = self.host.popen([*argv, *self.arguments], stdout=log, stderr=log)
        self.wait_for("--status-token")  # stands in its last line, whether there is a page or not

    def wait_for(self, text: str) -> None:
        # Longer than usual: what is waited for is a Python that starts, maybe on a busy machine.
        wait_for(
            lambda: text in self.log.read_text() or self.process.poll() is not None, 40.0, f"{text!r} of the server"
        )
        assert text in self.log.read_text(), self.log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, so that its port is free for the next test's."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(20)

    @property
    def variables(self) -> dict[str, str]:
        return {"HVDGLOO_RENDEZVOUS": self.endpoint, "HVDGLOO_SECRET_FILE": self.secret_file}


def worker(host: Host, program: str, variables: Mapping[str, str], prefix: tuple[str, ...] = ()) -> HostProcess:
    return host.popen([*prefix, warm.python(), "-c", program], env=variables)


def answer(process: HostProcess, timeout: float = 50.0) -> str:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture
def server(bed: Bed, tmp_path: Path) -> Server:
    return Server(bed["h1"], tmp_path, "-np", "4", "--once")


def test_ranks_by_index_over_three_hosts_with_several_slots(bed: Bed, server: Server) -> None:
    """Pain 9: each host is reached at the address from which it reached the server, whatever its name resolves to.

    h3's name is known to no host, not even to itself.
    """
    need_installed("torch")
    nameless = ("unshare", "--uts", "sh", "-c", 'hostname pod-x7f; exec "$@"', "sh")
    places = [("h2", "2", ()), ("h1", "0", ()), ("h3", "3", nameless), ("h1", "1", ())]
    workers = [
        worker(bed[host], TRAIN, {**server.variables, "HVDGLOO_INDEX": index}, prefix) for host, index, prefix in places
    ]
    found = sorted(json.loads(answer(process)) for process in workers)
    hosts = [["h1", bed["h1"].address], ["h2", bed["h2"].address], ["pod-x7f", bed["h3"].address]]
    assert found == [
        [0, 0, 2, 0, 10.0, hosts],
        [1, 1, 2, 0, 10.0, hosts],
        [2, 0, 1, 1, 10.0, hosts],
        [3, 0, 1, 2, 10.0, hosts],
    ]
    assert server.process.wait(20) == 0
    assert "all 4 workers are in (h1: ranks 0-1, h2: rank 2, pod-x7f: rank 3)" in server.log.read_text()


def test_pain_20_all_who_wait_hear_who_is_in(bed: Bed, tmp_path: Path) -> None:
    server = Server(bed["h1"], tmp_path, "-np", "4", "--start-timeout", "2", "--once")
    workers = [worker(bed[name], REGISTER, server.variables) for name in ("h1", "h2", "h2")]
    for process in workers:
        _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        last = err.splitlines()[-1]
        assert "RendezvousTimeoutError" in last
        assert "came for 2 s, and 3 of 4 workers are in (hosts: " in last
        assert re.search(r"h1 1\b", last)
        assert re.search(r"h2 2\b", last)
    assert server.process.wait(20) == 1


def test_pain_17_workers_come_before_the_server_and_before_its_name(bed: Bed, tmp_path: Path) -> None:
    """They wait until the start timeout, not merely the connect timeout, and for the name server too."""
    secret = tmp_path / "job.secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    variables = {
        "HVDGLOO_RENDEZVOUS": f"not-yet-there:{PORT}",
        "HVDGLOO_SECRET_FILE": str(secret),
        "HVDGLOO_CONNECT_TIMEOUT": "0.05",
        "HVDGLOO_START_TIMEOUT": "30",
    }
    early = worker(bed["h2"], REGISTER, variables)
    assert early.stderr is not None
    said = early.stderr.readline()
    assert f"rendezvous server not-yet-there:{PORT} cannot be reached" in said
    assert "trying for another 27 s (HVDGLOO_START_TIMEOUT)" in said
    hosts = bed["h2"].path("/etc/hosts")
    before = hosts.read_text()
    try:
        with hosts.open("a") as file:
            file.write(f"{bed['h1'].address} not-yet-there\n")
        server = Server(bed["h1"], tmp_path, "-np", "1", "--once")
        assert answer(early) == "0"
        server.stop()
    finally:
        hosts.write_text(before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_started_again(bed: Bed, tmp_path: Path, number: int) -> None:
    """One that dies is waited for by those who wait; one that is stopped says so to them."""
    server = Server(bed["h1"], tmp_path, "-np", "2")
    variables = {**server.variables, "HVDGLOO_CONNECT_TIMEOUT": "0.3"}
    first = worker(bed["h2"], REGISTER, variables)
    server.wait_for("1 of 2 workers are in (hosts: h2 1)")
    server.stop(number)
    if number == signal.SIGTERM:
        _, err = first.communicate(timeout=20)
        assert "the rendezvous server is being stopped" in err
        return
    server.start()
    server.wait_for("1 of 2 workers are in (hosts: h2 1)")
    second = worker(bed["h3"], REGISTER, variables)
    assert sorted(map(answer, (first, second))) == ["0", "1"]
    server.stop()


def test_a_wrong_secret_names_what_holds_it(bed: Bed, tmp_path: Path) -> None:
    server = Server(bed["h1"], tmp_path, "-np", "1")
    wrong = tmp_path / "wrong"
    wrong.write_text("cd" * 32)
    cases = {
        f"(HVDGLOO_SECRET_FILE={wrong} must hold the server's own secret)": {"HVDGLOO_SECRET_FILE": str(wrong)},
        "(HVDGLOO_SECRET must hold the server's own secret)": {"HVDGLOO_SECRET": "ef" * 32},
    }
    for text, variables in cases.items():
        process = worker(bed["h2"], REGISTER, {**server.variables, **variables})
        _, err = process.communicate(timeout=20)
        assert err.splitlines()[-1].endswith(text)
        assert "ef" * 32 not in err
    # "a request from" or, if the second one came before the line was written, "2 requests, the last from".
    server.wait_for(f"from {bed['h2'].address}: the signature is wrong")
    assert answer(worker(bed["h2"], REGISTER, server.variables)) == "0"
    server.wait_for("the only worker is in")
    assert server.log.read_text().count("refused") == 1, "not a line for each"
    server.stop()


# The recipes.


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder as containers have it, with a program."""
    need_installed("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


SECRETS = {"train/secret": "ab" * 32}


def results(orchestra: Orchestra, names: list[str]) -> list[list[object]]:
    return sorted(json.loads(orchestra.log(name).splitlines()[-1])[:5] for name in names)


def finish(orchestra: Orchestra, timeout: float = 50.0) -> None:
    for name in orchestra.pods:
        orchestra.start(name)

    def over() -> bool:
        orchestra.look()
        return not orchestra.running

    wait_for(over, timeout, "the end of all pods")
    logs = {name: orchestra.log(name) for name in orchestra.pods}
    assert orchestra.statuses == {name: [0] for name in orchestra.pods}, logs


@pytest.mark.extended
def test_the_recipe_for_a_kubernetes_job(make_bed: Callable[..., Bed], image: Path) -> None:
    (text,) = blocks(PAGE, "A Kubernetes Job", "yaml")
    pods = kubernetes(text, SECRETS)
    assert [pod.name for pod in pods] == ["train-rendezvous-0", "train-0", "train-1", "train-2"]
    orchestra = Orchestra(make_bed(["h1", "h2", "h3", "h4"]), pods, services(text), image)
    finish(orchestra)
    # Ranks are the pods' completion indices.
    assert [json.loads(orchestra.log(f"train-{n}").splitlines()[-1])[0] for n in range(3)] == [0, 1, 2]
    assert results(orchestra, ["train-0", "train-1", "train-2"]) == [[rank, 0, 1, rank, 6.0] for rank in range(3)]


@pytest.mark.extended
def test_the_recipe_for_pods_with_several_gpus(bed: Bed, image: Path) -> None:
    (text,) = blocks(PAGE, "A Kubernetes Job", "sh")
    server = Server(bed["h1"], image, "-np", "4", "--once")
    path = f"{os.path.dirname(warm.python())}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    pods = [
        bed[host].popen(
            ["sh", "-c", text], env={**server.variables, "JOB_COMPLETION_INDEX": index, "PATH": path}, cwd=image
        )
        for host, index in (("h3", "1"), ("h2", "0"))
    ]
    second, first = ([json.loads(line)[:5] for line in answer(pod).splitlines()] for pod in pods)
    assert sorted(first) == [[0, 0, 2, 0, 10.0], [1, 1, 2, 0, 10.0]]
    assert sorted(second) == [[2, 0, 2, 1, 10.0], [3, 1, 2, 1, 10.0]]
    assert server.process.wait(20) == 0


@pytest.mark.extended
def test_the_recipe_for_docker_compose(make_bed: Callable[..., Bed], image: Path) -> None:
    (text,) = blocks(PAGE, "Docker Compose", "yaml")
    pods = compose(text, {"HVDGLOO_SECRET": "ab" * 32})
    orchestra = Orchestra(make_bed(["h1", "h2", "h3", "h4"]), pods, {"rendezvous": "rendezvous-0"}, image)
    finish(orchestra)
    assert results(orchestra, ["worker-0", "worker-1", "worker-2"]) == [[rank, 0, 1, rank, 6.0] for rank in range(3)]


@pytest.mark.extended
def test_the_recipe_for_a_stateful_set(make_bed: Callable[..., Bed], image: Path) -> None:
    """Pain 22: a pod is killed; all end, and all come back, to a rendezvous that is back, too."""
    (image / "train.py").write_text(TRAIN_ON)
    (text,) = blocks(PAGE, "A Kubernetes StatefulSet", "yaml")
    pods = kubernetes(text, SECRETS)
    names = ["resume-0", "resume-1", "resume-2"]
    assert [pod.name for pod in pods] == ["resume-rendezvous-0", *names]
    assert all(pod.again for pod in pods)
    orchestra = Orchestra(make_bed(["h1", "h2", "h3", "h4"]), pods, services(text), image)
    for name in orchestra.pods:
        orchestra.start(name)

    def gathered(times: int) -> bool:
        orchestra.look()
        return all(_answers(orchestra, name) == times for name in names)

    wait_for(lambda: gathered(1), 50, "the first attempt")
    orchestra.running["resume-1"].kill()
    wait_for(lambda: gathered(2), 50, "the second attempt")
    assert orchestra.statuses["resume-rendezvous-0"] == [0]
    assert orchestra.statuses["resume-1"][0] == -signal.SIGKILL
    for name, rank in (("resume-0", 0), ("resume-2", 2)):
        assert orchestra.statuses[name][0] == 1
        assert "PeerLostError" in orchestra.log(name)
        assert "rank 1 (host h3" in orchestra.log(name)
        assert json.loads([line for line in orchestra.log(name).splitlines() if line.startswith("[")][-1])[0] == rank
    (image / "enough").touch()


def _answers(orchestra: Orchestra, name: str) -> int:
    return len(re.findall(r"^\[\d+, ", orchestra.log(name), re.M))


def test_the_recipe_for_a_shell(bed: Bed, image: Path) -> None:
    """As it stands there, but for the address and the path of Python; with real ssh."""
    (text,) = blocks(PAGE, "A shell loop", "sh")
    text = text.replace("10.0.0.5", bed["h1"].address).replace("python train.py", f"{warm.python()} train.py")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = bed["h1"].run(["sh", "-ec", text], env={"PATH": path}, cwd=image, timeout=50)
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line)[:5] for line in done.stdout.splitlines() if re.match(r"\[\d+, ", line))
    assert [row[0] for row in found] == [0, 1, 2]
    assert {row[4] for row in found} == {6.0}
    wait_for(lambda: not any("hvdgloo-rendezvous" in " ".join(p.cmdline()) for p in bed["h1"].processes()))
