"""Elastic jobs that no launcher has started: workers come, go and are told to end; the rendezvous is restarted."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.architecture.source import ROOT
from tests.support import warm
from tests.support.elastic_training import TRAIN, are_together, check_end, told
from tests.support.hosts import Bed, Host, HostProcess
from tests.support.job import Job
from tests.support.launching import wait_for
from tests.support.orchestra import Orchestra, blocks, compose, kubernetes, services
from tests.support.rendezvous import until

pytestmark = pytest.mark.extended


def rules(**changes: Any) -> Rules:
    return Rules(**{"size": 3, "smallest": 1, "launched": False, **changes})


def said(job: Job, worker: int) -> list[dict[str, Any]]:
    return told(job.output(worker).stdout)


def together(job: Job, *workers: int) -> None:
    """Wait until these train together."""

    def are() -> bool:
        ended = [job.output(worker) for worker in workers if job.workers[worker].poll() is not None]
        assert not ended, ended
        return are_together([(said(job, worker) or [{}])[-1] for worker in workers], len(workers))

    until(are, f"workers {workers} to train together", timeout=30)


def test_sigterm_costs_no_step(tmp_path: Path) -> None:
    with Job(3, TRAIN, tmp_path, elastic=ElasticEpochs(rules())) as job:
        together(job, 0, 1, 2)
        os.kill(job.workers[1].pid, signal.SIGTERM)
        assert job.workers[1].wait(20) == 0
        together(job, 0, 2)
        (tmp_path / "enough").touch()
        left, *_ = job.wait()[1:]
        assert "this worker was asked to end (SIGTERM)" in left.stderr
        assert "was asked to end; this worker leaves the job" in left.stderr
        for worker in (0, 2):
            assert job.output(worker).returncode == 0
            assert "Error" not in job.output(worker).stderr
            sizes = check_end(said(job, worker)[-1])
            assert sizes == sorted(sizes, reverse=True)
            assert set(sizes) == {2, 3}


# On hosts of their own.

PAGE = ROOT / "docs/kubernetes.md"
SLURM = ROOT / "docs/slurm.md"
PORT = 29400
BUSY = 40.0
"""Seconds that anything may take where a Python starts on a busy machine."""


def last(text: str) -> dict[str, Any]:
    return (told(text) or [{}])[-1]


class Pods:
    """A recipe at work.

    Args:
        text: with as many workers as there will ever be.
    """

    def __init__(self, orchestra: Orchestra, rendezvous: str) -> None:
        self.orchestra = orchestra
        self.rendezvous = rendezvous
        self._said: dict[str, int] = {}
        orchestra.start(rendezvous)

    def together(self, *names: str) -> None:
        """Wait until these pods train together, which they have not done before in the same epoch."""

        def are() -> bool:
            self.orchestra.look()
            lines = {name: told(self.orchestra.log(name)) for name in names}
            if any(len(lines[name]) <= self._said.get(name, 0) for name in names):
                return False
            if not are_together([lines[name][-1] for name in names], len(names)):
                return False
            self._said |= {name: len(lines[name]) for name in names}
            return True

        try:
            wait_for(are, BUSY, f"{names} to train together")
        except AssertionError:
            raise AssertionError({name: self.orchestra.log(name) for name in self.orchestra.pods}) from None

    def said(self, text: str) -> None:
        """Wait for a line of the rendezvous's."""
        wait_for(lambda: (self.orchestra.look(), text in self.orchestra.log(self.rendezvous))[1], BUSY, text)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder as containers have it, with a program."""
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.timeout(180)  # mostly a tenth of it
def test_the_recipe_for_kubernetes(make_bed: Callable[..., Bed], image: Path) -> None:
    """Scaled up and down; a pod is killed, and so is the rendezvous, in the middle of training."""
    (text,) = blocks(PAGE, "An elastic job on Kubernetes", "yaml")
    assert [pod.name for pod in kubernetes(text, SECRETS)] == ["elastic-rendezvous-0", *WORKERS[:3]]
    grown = kubernetes(text.replace("replicas: 3", "replicas: 4"), SECRETS)
    orchestra = Orchestra(make_bed(["h1", "h2", "h3", "h4", "h5"]), grown, services(text), image)
    pods = Pods(orchestra, "elastic-rendezvous-0")
    for name in WORKERS[:3]:
        orchestra.start(name)
    pods.together(*WORKERS[:3])
    orchestra.start("elastic-3")  # kubectl scale
    pods.together(*WORKERS)
    assert orchestra.delete("elastic-3") == 0
    pods.together(*WORKERS[:3])
    orchestra.running[pods.rendezvous].kill()
    pods.said("in training since before this server's start")
    orchestra.running["elastic-0"].kill()
    pods.together(*WORKERS[:3])
    ended = {pods.rendezvous: [-9], "elastic-0": [-9], "elastic-1": [], "elastic-2": [], "elastic-3": [0]}
    assert orchestra.statuses == ended, orchestra.log(pods.rendezvous)
    (image / "enough").touch()
    wait_for(lambda: (orchestra.look(), orchestra.statuses[pods.rendezvous])[1] == [-9, 0], BUSY, "the end")
    for name in ("elastic-1", "elastic-2"):
        assert orchestra.statuses[name][0] == 0
        ends = [line for line in told(orchestra.log(name)) if "end" in line]
        assert set(check_end(ends[0])) >= {3, 4}


SECRETS = {"train/secret": "ab" * 32}
WORKERS = ("elastic-0", "elastic-1", "elastic-2", "elastic-3")


@pytest.mark.timeout(180)  # mostly a tenth of it
def test_the_recipe_for_docker_compose(make_bed: Callable[..., Bed], image: Path) -> None:
    (text,) = blocks(PAGE, "An elastic job with Docker Compose", "yaml")
    pods = compose(text.replace("replicas: 2", "replicas: 3"), {"HVDGLOO_SECRET": "ab" * 32})  # --scale worker=3
    orchestra = Orchestra(make_bed(["h1", "h2", "h3", "h4"]), pods, {"rendezvous": "rendezvous-0"}, image)
    job = Pods(orchestra, "rendezvous-0")
    for name in ("worker-0", "worker-1"):
        orchestra.start(name)
    job.together("worker-0", "worker-1")
    orchestra.start("worker-2")
    job.together("worker-0", "worker-1", "worker-2")
    for name in ("worker-0", "worker-1"):  # --scale worker=1, whichever it keeps
        assert orchestra.delete(name) == 0
    job.together("worker-2")
    (image / "enough").touch()
    wait_for(lambda: (orchestra.look(), not orchestra.running)[1], BUSY, "the end")
    assert orchestra.statuses["rendezvous-0"] == [0]
    assert orchestra.statuses["worker-2"] == [0]


@pytest.mark.timeout(180)  # mostly a tenth of it
def test_the_recipe_for_slurm(bed: Bed, image: Path) -> None:
    """A job of two nodes, of which one fails, and a second job whose worker joins; srun is false, and ssh real."""
    (text,) = blocks(SLURM, "Elastic jobs", "sh")
    text = text.replace("10.0.0.5", bed["h1"].address)
    srun = image / "srun"
    srun.write_text(
        f"""#!/bin/sh
        while [ "${{1#-}}" != "$1" ]; do echo "$1" >> flags; shift; done
        for node in $NODES; do
            ssh "$node" "cd {image} && HVDGLOO_RENDEZVOUS=$HVDGLOO_RENDEZVOUS HVDGLOO_SECRET_FILE=$HVDGLOO_SECRET_FILE \
                exec {warm.python()} train.py" > "$node.log" 2>&1 &
        done
        wait
        """
    )
    srun.chmod(0o755)
    (image / "worker.sh").write_text(text)
    rendezvous = serve(bed["h1"], image, "-np", "2", "--min-np", "1", "--once")

    def together(*nodes: str) -> None:
        logs = [image / f"{node}.log" for node in nodes]
        wait_for(
            lambda: are_together([last(log.read_text() if log.exists() else "") for log in logs], len(nodes)),
            BUSY,
            f"{nodes} to train together: {[log.read_text() for log in logs if log.exists()]}",
        )

    first = hosted(bed["h1"], image, "sh", "worker.sh", NODES="h1 h2")
    together("h1", "h2")
    second = hosted(bed["h3"], image, "sh", "worker.sh", NODES="h3")
    together("h1", "h2", "h3")
    for process in bed["h2"].processes():
        with suppress(psutil.NoSuchProcess):
            if "train.py" in " ".join(process.cmdline()):
                bed["h2"].kill(process)
    together("h1", "h3")
    (image / "enough").touch()
    assert [process.wait(BUSY) for process in (first, second, rendezvous)] == [0, 0, 0]
    assert set((image / "flags").read_text().split()) == {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"}


def serve(host: Host, folder: Path, *arguments: str) -> HostProcess:
    """The rendezvous on a host, with a secret that is there before any worker reads it."""
    secret = folder / "job.secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    return hosted(host, folder, "hvdgloo-rendezvous", *arguments, "--bind", f"{host.address}:{PORT}")


def hosted(host: Host, folder: Path, *argv: str, **env: str) -> HostProcess:
    """A command on a host, with its output in a file of the folder."""
    path = f"{folder}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    with (folder / f"{argv[0]}.{host.name}.log").open("a") as log:
        variables = {"PATH": path, "HOME": str(folder), "HVDGLOO_SECRET_FILE": str(folder / "job.secret"), **env}
        return host.popen(argv, env=variables, cwd=folder, stdout=log, stderr=log)


@pytest.mark.timeout(180)  # mostly a tenth of it
def test_workers_that_are_cut_off_go_on_with_the_others_only(make_bed: Callable[..., Bed], image: Path) -> None:
    """Two at once, of whom the others may notice only one. None goes on alone, though one worker would be enough;
    mended, they are members again.
    """
    bed = make_bed(["h1", "h2", "h3", "h4", "h5"])
    serve(bed["h1"], image, "-np", "4", "--min-np", "1")
    variables = {"HVDGLOO_RENDEZVOUS": f"{bed['h1'].address}:{PORT}"}
    names = ("h2", "h3", "h4", "h5")
    workers = [hosted(bed[name], image, warm.python(), "train.py", **variables) for name in names]

    def log(name: str) -> str:
        return (image / f"{warm.python()}.{name}.log").read_text()

    def together(*names: str) -> None:
        wait_for(lambda: are_together([last(log(name)) for name in names], len(names)), BUSY, f"{names} to train")

    together(*names)
    for name in ("h4", "h5"):
        bed[name].cut()
    together("h2", "h3")
    assert [last(log(name))["size"] for name in ("h4", "h5")] == [4, 4], "neither has gone on alone"
    for name in ("h4", "h5"):
        bed[name].reconnect()
    together(*names)
    assert all(worker.poll() is None for worker in workers), "in the same processes"
    (image / "enough").touch()
    assert [worker.wait(BUSY) for worker in workers] == [0, 0, 0, 0]
