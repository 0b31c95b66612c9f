"""--port-range holds for every listener of ours, on the launcher and on all hosts: pain 12."""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.hosts import Bed
from tests.support.launching import Launcher, launcher_in, wait_for

WORKER = """\
import json, os, socket, time, psutil
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo._job import process

hvd.init()
hvd.allreduce(np.ones(3), op=hvd.Sum)
folder, deadline = os.environ.get("ALL_JOBS_RUN"), time.monotonic() + 30
if folder and hvd.rank() == 0:
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
gloo = [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
if hvd.rank() == 0:
    # As the user's own torch.distributed would.
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
print("FOUND " + json.dumps({
    "gloo": gloo,
    "ours": [process.current().topology.workers[0].port, int(os.environ["MASTER_PORT"]),
             int(os.environ["HVDGLOO_RENDEZVOUS"].rpartition(":")[2])],
}))
"""
FIRST, LAST = 29400, 29402  # as few as the first host of a job needs
RANGE = f"{FIRST}-{LAST}"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as made:
        made.script(WORKER)
        yield made


@pytest.fixture
def free_range() -> Iterator[str]:
    """Three ports of this machine that nothing uses, and that no other process of pytest gets meanwhile.

    Launchers without a range hold any port from 20000 on for MASTER_PORT, and may do so at any time.
    """
    firsts = range(10000, 20000, 10)
    for first in random.sample(firsts, len(firsts)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reserved:
            try:
                reserved.bind(f"\0hvdgloo-test-ports-{first}")
                for port in range(first, first + 10):
                    socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            yield f"{first}-{first + 2}"
            return
    pytest.fail("no three free ports")


def found(out: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("FOUND ")[2]) for line in out.splitlines() if "FOUND " in line]


def within(port: int, ports: str) -> bool:
    first, last = map(int, ports.split("-"))
    return first <= port <= last


@pytest.mark.parametrize("by_flag", [True, False], ids=["flag", "variable"])
def test_pain_12_on_one_host(launcher: Launcher, free_range: str, by_flag: bool) -> None:
    flags = ["--port-range", free_range] if by_flag else []
    done = launcher.run(
        *flags, "-np", "2", warm.python(), "worker.py", env={} if by_flag else {"HVDGLOO_PORT_RANGE": free_range}
    )
    assert done.returncode == 0, done.stderr
    ranks = found(done.stdout)
    assert len(ranks) == 2
    for one in ranks:
        assert all(within(port, free_range) for port in one["ours"])
        assert len(set(one["ours"])) == 3
        assert one["gloo"] == [], "ranks of one host share memory, and listen nowhere"


def watch(bed: Bed, job: Any, names: list[str], pause: float = 0.002) -> set[tuple[str, int]]:
    """All ports on which something listened on these hosts for longer than a pause while the job ran."""
    seen: set[tuple[str, int]] = set()
    while job.poll() is None:
        time.sleep(pause)  # or who looks has a core to itself
        for name in names:
            seen |= {(name, port) for _, port in bed[name].listening()}
    return seen


def test_pain_12_on_several_hosts(bed: Bed, launcher: Launcher) -> None:
    arguments = ["--port-range", RANGE, "-H", "h1:1,h2:1", warm.python(), str(launcher.folder / "worker.py")]
    job = bed["h1"].popen([*warm.launcher(), *arguments])
    seen = watch(bed, job, ["h1", "h2"])
    out, err = job.communicate(timeout=30)
    assert job.returncode == 0, err
    ranks = found(out)
    assert all(within(port, RANGE) for one in ranks for port in one["ours"])
    assert ("h1", FIRST) in seen, "the server, at least, was seen"
    gloo = {port for one in ranks for port in one["gloo"]}
    assert len(gloo) == 2
    assert {port for _, port in seen if not within(port, RANGE)} <= gloo


def test_pain_12_probes(make_bed: Callable[..., Bed]) -> None:
    """A firewall that swallows packets lets them last long enough to be looked at."""
    bed = make_bed(["h1", "h2"])
    bed.block("h2", "h1")
    job = bed["h1"].popen([*warm.launcher(), "--port-range", RANGE, "-H", "h1:1,h2:1", "true"])
    wait_for(lambda: bed["h2"].listening(), 10, "the agent's listener")
    seen = watch(bed, job, ["h1", "h2"], pause=0.05)
    _, err = job.communicate(timeout=30)
    assert "h2 -> h1: 10.77.1.10 (eth0) timed out after 3 s" in err
    assert {name for name, _ in seen} == {"h1", "h2"}
    assert all(within(port, RANGE) for _, port in seen), seen


def test_pain_12_with_the_server_beside_the_agent(bed: Bed, launcher: Launcher) -> None:
    arguments = ["--port-range", RANGE, "-H", "h2:2", warm.python(), str(launcher.folder / "worker.py")]
    done = bed["h1"].run([*warm.launcher(), *arguments])
    assert done.returncode == 0, done.stderr
    assert all(within(port, RANGE) for one in found(done.stdout) for port in one["ours"])


def test_gloo_s_own_listener_follows_the_system_s_range(make_bed: Callable[..., Bed], launcher: Launcher) -> None:
    """As docs/hosts.md says: its port cannot be chosen through torch, but through the system."""
    bed = make_bed(["h1", "h2"])
    for host in bed:
        host.run(["sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40199"], check=True)
    arguments = ["--port-range", RANGE, "-H", "h1:1,h2:1", warm.python(), str(launcher.folder / "worker.py")]
    done = bed["h1"].run([*warm.launcher(), *arguments])
    assert done.returncode == 0, done.stderr
    assert all(40000 <= port <= 40199 for one in found(done.stdout) for port in one["gloo"])


def occupy(bed: Bed, name: str, ports: str) -> Any:
    first, last = map(int, ports.split("-"))
    code = (
        f"import socket, time\ns = [socket.create_server(('', p)) for p in range({first}, {last + 1})]\n"
        "print('there', flush=True)\ntime.sleep(60)\n"
    )
    process = bed[name].popen([sys.executable, "-c", code])
    assert process.stdout.readline() == "there\n"  # type: ignore[union-attr]
    return process


@pytest.mark.parametrize(
    ("busy", "hosts", "text"),
    [
        ("h2", "h1:1,h2:1", "host h2: cannot listen on any of the ports 29400-29402 of 10.77.1.11: Address already"),
        ("h1", "h1:1,h2:1", "host h1: cannot keep any of the ports 29400-29402 free for MASTER_PORT; give a wider"),
        ("h2", "h2:2", "host h2: cannot keep any of the ports 29400-29402 free for MASTER_PORT; give a wider"),
        ("h1", "h1:2", "host h1: cannot keep any of the ports 29400-29402 free for MASTER_PORT; give a wider"),
    ],
)
def test_pain_12_a_range_without_a_free_port(bed: Bed, busy: str, hosts: str, text: str) -> None:
    process = occupy(bed, busy, RANGE)
    try:
        done = bed["h1"].run([*warm.launcher(), "--port-range", RANGE, "-H", hosts, "true"])
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 2, done.stderr
    assert text in done.stderr


def test_pain_12_a_range_that_is_too_small_says_so(launcher: Launcher, free_range: str) -> None:
    first = free_range.partition("-")[0]
    done = launcher.run("--port-range", f"{first}-{first}", "-np", "2", warm.python(), "worker.py")
    assert done.returncode == 2
    assert (
        f"--port-range {first}-{first} (HVDGLOO_PORT_RANGE) is too small: host localhost needs 3 ports" in done.stderr
    )


def test_as_many_ports_as_an_elastic_job_needs_are_enough(launcher: Launcher, free_range: str) -> None:
    first = int(free_range.partition("-")[0])
    flags = ["-np", "2", "--min-np", "1", warm.python(), "worker.py"]
    done = launcher.run("--port-range", f"{first}-{first + 3}", *flags)
    assert done.returncode == 0, done.stderr
    done = launcher.run("--port-range", f"{first}-{first + 2}", *flags)
    assert done.returncode == 2
    assert "needs 4 ports, for the rendezvous server, MASTER_PORT and each of 2 workers" in done.stderr


def test_two_jobs_share_a_range(
    launcher: Launcher, free_range: str, make_launcher: Callable[[], Launcher], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They take different ports, also for what is bound much later."""
    first = int(free_range.partition("-")[0])
    ports = f"{first}-{first + 9}"
    other = make_launcher()
    env = {"ALL_JOBS_RUN": str(tmp_path_factory.mktemp("jobs"))}
    jobs = [
        made.start("--port-range", ports, "-np", "2", warm.python(), "worker.py", env=env) for made in (launcher, other)
    ]
    taken = []
    for job in jobs:
        out, err = job.communicate(timeout=40)
        assert job.returncode == 0, err
        taken.append(set(found(out.decode())[0]["ours"]))
    assert all(within(port, ports) for port in taken[0] | taken[1])
    # The rendezvous server's and MASTER_PORT's are open, or held, for as long as a job lasts.
    assert len(taken[0] | taken[1]) >= 4


@pytest.fixture
def make_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Launcher]]:
    folder = tmp_path_factory.mktemp("other")
    with launcher_in(folder) as made:
        made.script(WORKER)
        yield lambda: made
