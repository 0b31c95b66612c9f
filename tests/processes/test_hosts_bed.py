"""The bed itself: what a test of several hosts stands on."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import Bed, HostSpec, Nic
from tests.support.launching import is_running, wait_for

QUICK = ["ssh", "-o", "ConnectTimeout=1"]
BACKGROUND = "import time, os; os.fork() or os.setsid(); time.sleep(600)"


def test_hosts_are_apart_and_reach_each_other_by_ssh(bed: Bed) -> None:
    facts = "hostname; cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/net; echo $HOME"
    answers = [bed["h1"].run(["ssh", name, facts], check=True).stdout.split() for name in bed.names]
    assert [answer[0] for answer in answers] == ["h1", "h2", "h3"]
    for one in range(1, 4):
        assert len({answer[one] for answer in answers}) == 3, "each has its own"
    assert bed["h2"].run(["ip", "-br", "address", "show", "docker0"]).stdout.split()[2] == "172.17.0.1/16"


def test_processes_listeners_and_shared_memory_of_one_host_are_seen(bed: Bed) -> None:
    listen = (
        "import socket, time; s = socket.create_server(('10.77.1.11', 4001)); open('/dev/shm/x', 'w'); time.sleep(99)"
    )
    process = bed["h2"].popen([sys.executable, "-c", listen])
    try:
        wait_for(lambda: bed["h2"].listening(), what="the listener")
        assert bed["h2"].listening() == {("10.77.1.11", 4001)}
        assert [p.cmdline()[0] for p in bed["h2"].processes()] == [sys.executable]
        assert bed["h2"].shared_memory() == {"x"}
        assert bed["h1"].processes() == []
        assert bed["h1"].listening() == bed["h1"].shared_memory() == set()
    finally:
        process.kill()
    assert process.wait(5) == -signal.SIGKILL
    assert not bed["h2"].processes()
    bed["h2"].path("/dev/shm/x").unlink()


def test_a_host_is_cut_off_mended_and_powered_off(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(["h1", "h2"])
    bed["h2"].popen([sys.executable, "-c", BACKGROUND])
    wait_for(lambda: len(bed["h2"].processes()) == 2)
    bed["h2"].cut()
    assert "timed out" in bed["h1"].run([*QUICK, "h2", "true"]).stderr
    assert len(bed["h2"].processes()) == 2, "they live on without a network"
    bed["h2"].reconnect()
    assert bed["h1"].run(["ssh", "h2", "true"]).returncode == 0
    processes = bed["h2"].processes()
    bed["h2"].power_off()
    assert not any(is_running(process.pid) for process in processes)
    assert "timed out" in bed["h1"].run([*QUICK, "h2", "true"]).stderr


def test_special_hosts(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(
        [
            HostSpec("four", nics=(Nic("ens5"), Nic("fast", "b")), private_first=True, users=("trainer",)),
            HostSpec("six", ipv4=False, ipv6=True),
            HostSpec("both", nics=(Nic("enp3s0"),), ipv6=True, loopback_name=True, docker0=False, private_tmp=True),
            HostSpec("far", nics=(Nic("eth0", "b"),)),
        ],
        routed=True,
    )
    names = bed["four"].run(["ip", "-br", "link"], check=True).stdout.split()
    assert names.index("docker0") < names.index("ens5@if4")
    assert bed["both"].run(["ssh", "trainer@four", "echo $LOGNAME"], check=True).stdout == "trainer\n"
    assert bed["both"].run(["ssh", "six", "hostname"], check=True).stdout == "six\n"
    assert bed["both"].run(["ssh", "far", "hostname"], check=True).stdout == "far\n", "the router joins the networks"
    assert bed["four"].run(["ssh", "far", "echo $SSH_CONNECTION"], check=True).stdout.startswith("10.77.2.10 ")
    assert bed["both"].run(["getent", "hosts", "both"], check=True).stdout.startswith("127.0.1.1 ")
    with tempfile.NamedTemporaryFile(dir="/tmp") as file:
        assert bed["four"].run(["ls", file.name], check=True)
        assert bed["both"].run(["ls", file.name]).returncode != 0, "its /tmp is its own"


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_nothing_of_a_bed_is_left(make_bed: Callable[..., Bed], tmp_path: Path, how: str) -> None:
    """The process that made it may be killed: its hosts end with it."""
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.support.hosts import Bed
        with Bed(["h1", "h2"]) as bed:
            for host in bed:
                host.popen([sys.executable, "-c", {BACKGROUND!r}])
                while len(host.processes()) < 2: pass
            print(*(p.pid for host in bed for p in host.processes()), *(host.init for host in bed), flush=True)
            sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 6
    assert all(is_running(pid) for pid in pids)
    if how == "killed":
        process.kill()
    process.stdin.close()
    process.wait(10)
    process.stdout.close()
    wait_for(lambda: not any(is_running(pid) for pid in pids), 5, "the end of the bed")


CONNECT = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], 22), float(sys.argv[2])).close()
except TimeoutError:
    print("silence")
except OSError as error:
    print(errno.errorcode[error.errno])
else:
    print("connected")
"""


def test_firewalls_of_one_direction(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed([HostSpec(name, ipv6=True) for name in ("h1", "h2", "h3")])
    bed.block("h1", "h2")
    bed.block("h1", "h3", reject=True)

    def connect(source: str, target: str, timeout: float = 5) -> list[str]:
        return [
            bed[source].run([sys.executable, "-c", CONNECT, address, str(timeout)], check=True).stdout.strip()
            for address in bed[target].addresses
        ]

    assert connect("h1", "h2", 0.3) == ["silence", "silence"]
    assert connect("h1", "h3") == ["EHOSTUNREACH", "EACCES"]
    for source, target in (("h2", "h1"), ("h3", "h1"), ("h2", "h3"), ("h3", "h2")):
        assert connect(source, target) == ["connected", "connected"]
