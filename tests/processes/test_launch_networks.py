"""The addresses that a job over several hosts uses, with real networks and real ssh: pains 7, 8, 9, 13 and 14.

Each network either just works, without a flag, or fails within ten seconds with the pair of hosts, the addresses that
were tried, and what each answered.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import warm
from tests.support.hosts import Bed, Host, HostSpec, Nic
from tests.support.launching import Launcher, wait_for

WORKER = """\
import json, os, psutil
import numpy as np
import hvdgloo.numpy as hvd

hvd.init()
total = hvd.allreduce(np.ones(3), op=hvd.Sum)
connections = psutil.Process().net_connections("tcp")
peers = {c.raddr.ip for c in connections if c.raddr}
listening = {c.laddr.ip for c in connections if c.status == "LISTEN"}
wanted = ("HVDGLOO_ADDRESS", "HVDGLOO_RENDEZVOUS", "MASTER_ADDR", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME",
          "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
print("FOUND " + json.dumps({"rank": hvd.rank(), "total": float(total[0]), "peers": sorted(peers),
                             "listening": sorted(listening), **{name: os.environ.get(name) for name in wanted}}))
"""

# The same without a framework, where it is enough to see which addresses workers are given.
QUICK_WORKER = """\
import json, os
print("FOUND " + json.dumps({"rank": int(os.environ["RANK"]), **os.environ}))
"""

LIMIT = 10.0


@pytest.fixture
def worker(tmp_path: Path) -> str:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return str(path)


@pytest.fixture
def quick(tmp_path: Path) -> str:
    path = tmp_path / "quick.py"
    path.write_text(QUICK_WORKER)
    return str(path)


def start(host: Host, *arguments: str, timeout: float = 40.0) -> subprocess.CompletedProcess[str]:
    return host.run([*warm.launcher(), *arguments], timeout=timeout)


def found(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the workers' findings by rank; the job has succeeded."""
    assert done.returncode == 0, done.stderr
    lines = [line.partition("FOUND ")[2] for line in done.stdout.splitlines() if "FOUND " in line]
    ranks = sorted((json.loads(line) for line in lines), key=lambda one: one["rank"])
    assert [one["rank"] for one in ranks] == list(range(len(ranks)))
    assert all(one.get("total", len(ranks)) == len(ranks) for one in ranks)
    return ranks


def check(ranks: Sequence[dict[str, Any]], addresses: Sequence[str], *servers: str) -> None:
    """Every rank is given these addresses; if it joins the job, it listens at and talks with them and no others.

    ``servers`` are the addresses at which each reaches the rendezvous server; or one, if it is the same for all.
    """
    for one, address, server in zip(ranks, addresses, servers * (len(ranks) // len(servers)), strict=True):
        assert one["HVDGLOO_ADDRESS"] == address
        # Ranks that share memory listen nowhere.
        assert set(one.get("listening", ())) <= {address}
        assert one.get("listening") != [] or len(set(addresses)) == 1
        assert set(one.get("peers", ())) <= {*addresses, server}
        assert one["MASTER_ADDR"] == addresses[0]
        assert one["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == server
        assert one["HVDGLOO_RENDEZVOUS"].rpartition(":")[0].strip("[]") == server


def refused(host: Host, *arguments: str) -> str:
    """Return the launcher's message about a network in which no job can run: soon, and before any worker was
    started."""
    begin = time.monotonic()
    done = start(host, *arguments)
    assert time.monotonic() - begin < LIMIT
    assert done.returncode == 1, done.stderr
    assert "FOUND" not in done.stdout
    return done.stderr


# Networks that just work.


def test_pain_7_the_same_docker0_everywhere_and_a_nic_that_leads_nowhere(bed: Bed, worker: str) -> None:
    ranks = found(start(bed["h1"], "-H", "h1:1,h2:2,h3:1", warm.python(), worker))
    one, two, three = (bed[name].address for name in ("h1", "h2", "h3"))
    check(ranks, [one, two, two, three], one)
    assert {one["HOROVOD_GLOO_IFACE"] for one in ranks} == {one["GLOO_SOCKET_IFNAME"] for one in ranks} == {"eth0"}
    assert {one["NCCL_SOCKET_IFNAME"] for one in ranks} == {None}


def test_a_launcher_that_is_no_host_of_the_job(bed: Bed, quick: str) -> None:
    ranks = found(start(bed["h1"], "-H", "h2:1,h3:1", quick))
    check(ranks, [bed["h2"].address, bed["h3"].address], bed["h1"].address)


def test_one_other_host_alone_needs_no_network(bed: Bed, worker: str) -> None:
    ranks = found(start(bed["h1"], "-H", "h2:2", warm.python(), worker))
    check(ranks, ["127.0.0.1", "127.0.0.1"], "127.0.0.1")
    wait_for(lambda: not bed["h2"].processes() and not bed["h2"].listening(), what="the end of everything")


def test_pain_7_names_of_nics_that_differ_and_pain_9_names_that_mean_loopback(
    make_bed: Callable[..., Bed], worker: str
) -> None:
    bed = make_bed(
        [
            HostSpec("h1", nics=(Nic("enp3s0"),), loopback_name=True, private_first=True),
            HostSpec("h2", nics=(Nic("ib0"),), loopback_name=True),
        ]
    )
    ranks = found(start(bed["h1"], "-H", "h1:1,h2:1", warm.python(), worker))
    check(ranks, [bed["h1"].address, bed["h2"].address], bed["h1"].address)
    assert [one["HOROVOD_GLOO_IFACE"] for one in ranks] == ["enp3s0", "ib0"]


def test_pain_9_the_user_s_own_torch_distributed_works_as_well(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    """By itself it would take what the host's name resolves to."""
    bed = make_bed([HostSpec(name, loopback_name=True) for name in ("h1", "h2")])
    script = tmp_path / "own.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ntotal = torch.ones(3)\ndist.all_reduce(total)\n"
        "print('TOTAL', total[0].item())\ndist.destroy_process_group()\n"
    )
    done = start(bed["h1"], "-H", "h1:1,h2:1", warm.python(), str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TOTAL 2.0") == 2


def test_a_first_nic_that_swallows_packets_costs_no_time(make_bed: Callable[..., Bed], quick: str) -> None:
    two = (Nic("eth0"), Nic("eth1", network="b"))
    bed = make_bed([HostSpec("h1", nics=two), HostSpec("h2", nics=two), "h3"])
    for host, other in (("h1", "h2"), ("h2", "h1")):
        # To a hardware address that no host has.
        bed[host].run(
            ["ip", "neigh", "replace", bed[other].addresses[1], "lladdr", "02:00:00:00:00:99", "dev", "eth1"],
            check=True,
        )
    begin = time.monotonic()
    ranks = found(start(bed["h3"], "-H", "h1:1,h2:1", quick))
    assert time.monotonic() - begin < 8.0
    check(ranks, [bed["h1"].address, bed["h2"].address], bed["h3"].address)
    # And if nothing else is allowed, it is told after one timeout of a probe.
    text = refused(bed["h3"], "-H", "h1:1,h2:1", "--nics", "eth1", quick)
    assert f"  h1 -> h2: {bed['h2'].addresses[1]} (eth1) timed out after 3 s\n" in text


def test_pain_13_ipv6_only(make_bed: Callable[..., Bed], worker: str) -> None:
    bed = make_bed([HostSpec(name, ipv4=False, ipv6=True) for name in ("h1", "h2")])
    ranks = found(start(bed["h1"], "-H", "h1:1,h2:1", warm.python(), worker))
    check(ranks, ["fd77:1::10", "fd77:1::11"], "fd77:1::10")
    assert {one["NCCL_SOCKET_FAMILY"] for one in ranks} == {"AF_INET6"}
    assert {one["GLOO_SOCKET_IFNAME"] for one in ranks} == {None}


def test_pain_13_dual_stack_and_a_host_without_ipv4(make_bed: Callable[..., Bed], quick: str) -> None:
    bed = make_bed(
        [HostSpec("h1", ipv6=True), HostSpec("h2", ipv6=True), HostSpec("h3", ipv4=False, ipv6=True), HostSpec("h4")]
    )
    check(found(start(bed["h1"], "-H", "h1:1,h2:1", quick)), ["10.77.1.10", "10.77.1.11"], "10.77.1.10")
    check(found(start(bed["h1"], "-H", "h1:1,h3:1", quick)), ["fd77:1::10", "fd77:1::12"], "fd77:1::10")
    text = refused(bed["h1"], "-H", "h3:1,h4:1", quick)
    assert "h3 -> h4: " in text or "h3 is reached by IPv6 alone: fd77:1::12 (eth0)" in text
    assert "h4 -> h3: " in text or "h4 is reached by IPv4 alone: 10.77.1.13 (eth0)" in text


def test_networks_that_a_router_joins(make_bed: Callable[..., Bed], quick: str) -> None:
    bed = make_bed([HostSpec("h1"), HostSpec("h2", nics=(Nic("eth0", network="b"),))], routed=True)
    check(found(start(bed["h1"], "-H", "h1:1,h2:1", quick)), ["10.77.1.10", "10.77.2.11"], "10.77.1.10")


def test_a_launcher_that_workers_do_not_reach(make_bed: Callable[..., Bed], worker: str, quick: str) -> None:
    """The agents of hosts that do not reach it relay what their workers say to the rendezvous server."""
    both = (Nic("eth0"), Nic("eth1", network="b"))
    bed = make_bed([HostSpec("laptop", nics=(Nic("eth0", network="b"),)), HostSpec("h1", nics=both), "h2"])
    ssh_config = bed["laptop"].path(f"{bed['laptop'].home}/.ssh/config")
    with ssh_config.open("a") as file:
        file.write("\nHost h2\n    ProxyJump h1\n")
    own = ["10.77.1.11", "10.77.1.12"]
    laptop = bed["laptop"].address
    check(found(start(bed["laptop"], "-H", "h1:1,h2:1", warm.python(), worker)), own, laptop, "127.0.0.1")
    bed.block("h1", "laptop")
    done = start(bed["laptop"], "--verbose", "-H", "h1:1,h2:1", quick)
    check(found(done), own, "127.0.0.1")
    assert "the workers on h1, h2 reach the rendezvous server through their agent\n" in done.stderr


# Networks in which no job can run.


def test_pain_14_one_way(make_bed: Callable[..., Bed], quick: str) -> None:
    bed = make_bed(["h1", "h2", "h3"])
    bed.block("h3", "h2")
    begin = time.monotonic()
    text = refused(bed["h1"], "-H", "h2:1,h3:1", quick)
    took = time.monotonic() - begin
    assert f"  h3 -> h2: {bed['h2'].address} (eth0) timed out after 3 s, " in text
    assert "10.200.1.1 (priv0) has no route (Network is unreachable)" in text
    assert "h2 -> h3" not in text
    # With --connect-timeout-seconds, probes take less time too.
    begin = time.monotonic()
    text = refused(bed["h1"], "-H", "h2:1,h3:1", "--connect-timeout-seconds", "5", quick)
    assert "(eth0) timed out after 0.5 s" in text
    assert time.monotonic() - begin < took


def test_pain_14_a_firewall_that_says_no(make_bed: Callable[..., Bed], quick: str) -> None:
    bed = make_bed(["h1", "h2", "h3"])
    bed.block("h3", "h2", reject=True)
    text = refused(bed["h1"], "-H", "h2:1,h3:1", quick)
    assert f"  h3 -> h2: {bed['h2'].address} (eth0) has no route (No route to host), " in text


def test_pain_14_an_address_on_two_interfaces_does_not_make_it_wait(make_bed: Callable[..., Bed], quick: str) -> None:
    bed = make_bed(["h1", "h2", "h3"])
    bed["h2"].run(["ip", "address", "add", f"{bed['h2'].address}/32", "dev", "priv0"], check=True)
    bed.block("h3", "h2", reject=True)
    text = refused(bed["h1"], "-H", "h2:1,h3:1", quick)
    assert f"  h3 -> h2: {bed['h2'].address} (eth0) has no route (No route to host), " in text


def test_pain_14_no_route_at_all(make_bed: Callable[..., Bed], quick: str) -> None:
    both = (Nic("eth0"), Nic("eth1", network="b"))
    bed = make_bed([HostSpec("h1", nics=both), "h2", HostSpec("h3", nics=(Nic("eth0", network="b"),))])
    text = refused(bed["h1"], "-H", "h2:1,h3:1", quick)
    assert "  h2 -> h3: 10.77.2.12 (eth0) has no route (Network is unreachable), " in text
    assert "  h3 -> h2: 10.77.1.11 (eth0) has no route (Network is unreachable), " in text


def test_pain_7_docker0_alone_is_every_host_s_own(bed: Bed, quick: str) -> None:
    arguments = ["-H", "h2:1,h3:1", "--nics", "docker0", "--port-range", "29400-29409"]
    text = refused(bed["h1"], *arguments, quick)
    assert "  h2 -> h3: 172.17.0.1 (docker0) answered as another host, h2 (h2 has the same address)\n" in text
    assert "  h3 -> h2: 172.17.0.1 (docker0) answered as another host, h3 (h3 has the same address)\n" in text


def test_pain_7_another_process_at_a_host_s_address(make_bed: Callable[..., Bed], quick: str) -> None:
    bed = make_bed(["h1", "h2", "h3"])
    # h2 has an address of its own that, in the others' network, is h3's.
    bed["h2"].run(["ip", "address", "add", "10.77.1.99/32", "dev", "priv0"], check=True)
    bed["h3"].run(["ip", "address", "add", "10.77.1.99/24", "dev", "eth0"], check=True)
    serve = (
        "import socket\n"
        "s = socket.create_server(('10.77.1.99', 29400))\n"
        "while True:\n"
        "    c, _ = s.accept(); c.recv(9); c.send(b'HTTP/1.1 400 Bad Request\\r\\n' * 5); c.close()\n"
    )
    bed["h3"].popen([sys.executable, "-c", serve])
    wait_for(lambda: ("10.77.1.99", 29400) in bed["h3"].listening(), what="the foreign server")
    arguments = ["-H", "h1:1,h2:1", "--port-range", "29400-29409"]
    ranks = found(start(bed["h1"], *arguments, quick))
    check(ranks, [bed["h1"].address, bed["h2"].address], bed["h1"].address)
    text = refused(bed["h1"], *arguments, "--nics", "h2=10.77.1.99", quick)
    assert "  h1 -> h2: 10.77.1.99 (priv0) was answered by something" in text


# --nics.


def test_pain_8_nics_by_name_network_and_exception_and_per_host(make_bed: Callable[..., Bed], quick: str) -> None:
    two = (Nic("eth0"), Nic("eth1", network="b"))
    bed = make_bed(
        [HostSpec("h1", nics=two), HostSpec("h2", nics=(Nic("eth0"), Nic("ib0", network="b")))],
    )
    first = ["10.77.1.10", "10.77.1.11"]
    second = ["10.77.2.10", "10.77.2.11"]
    check(found(start(bed["h1"], "-H", "h1:1,h2:1", quick)), first, first[0])
    for nics in (["h1=eth1,h2=ib0"], ["10.77.2.0/24"], ["^eth0"]):
        ranks = found(start(bed["h1"], "-H", "h1:1,h2:1", *(w for n in nics for w in ("--nics", n)), quick))
        check(ranks, second, second[0])
        assert [one["HOROVOD_GLOO_IFACE"] for one in ranks] == ["eth1", "ib0"]


@pytest.mark.parametrize(
    ("nics", "text"),
    [
        ("eth7", "--nics eth7 fits none of host h1's addresses; it has 10.77.1.10 (eth0), 172.17.0.1 (docker0)"),
        ("h2=ib0", "--nics ib0 fits none of host h2's addresses; it has 10.77.1.11 (eth0)"),
        ("192.168.0.0/16", "--nics 192.168.0.0/16 fits none of host h1's addresses"),
        ("^eth0", "  h1 -> h2: 172.17.0.1 (docker0) refused the connection (h1 has the same address), 10.200.1.1"),
        ("lo", "--nics lo chooses no address of host h1 "),
        ("127.0.0.0/8", "127.0.0.1 (lo) is loopback"),
    ],
)
def test_pain_8_and_9_nics_that_cannot_be(bed: Bed, quick: str, nics: str, text: str) -> None:
    assert text in refused(bed["h1"], "-H", "h1:1,h2:1", "--nics", nics, quick)


def test_horovod_s_names_for_it(bed: Bed, quick: str) -> None:
    done = start(bed["h1"], "-H", "h1:1,h2:1", "--network-interface", "eth7", quick)
    assert "--network-interface is deprecated and means --nics\n" in done.stderr
    assert "--nics eth7 fits none of host h1's addresses" in done.stderr
    both = refused(bed["h1"], "-H", "h1:1,h2:1", "--network-interfaces", "eth7", "--network-interfaces", "eth8", quick)
    assert "--nics eth7,eth8 fits none of host h1's addresses" in both


# What it costs, and what it leaves.


def test_four_hosts_are_settled_in_half_a_second(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(["h1", "h2", "h3", "h4"])
    taken = []
    for _ in range(3):  # a busy machine has its moments
        done = start(bed["h1"], "--verbose", "-H", "h1:1,h2:1,h3:1,h4:1", "true")
        assert done.returncode == 0, done.stderr
        began, ended = (
            [float(time) for time in re.findall(rf": {step} after ([\d.]+) s", done.stderr)]
            for step in ("probing", "ready")
        )
        assert len(began) == 4
        taken.append(max(ended) - min(began))
        if taken[-1] < 0.5:
            return
    pytest.fail(f"it took {taken} s")


def test_pain_30_listeners_stand_at_the_chosen_addresses_alone(bed: Bed, tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(
        "import os, time\nimport hvdgloo.numpy as hvd\n"
        f"def wait(name):\n    while not os.path.exists(os.path.join(r'{tmp_path}', name)):\n        time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1':\n    wait('come')\n"
        f"hvd.init()\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').close()\nwait('go')\n"
    )
    job = bed["h1"].popen([sys.executable, "-m", "hvdgloo.runner", "-H", "h1:1,h2:1", warm.python(), str(script)])
    try:
        # Rank 0 waits for rank 1: the server listens, and so does rank 0 for control connections.
        wait_for(lambda: len(bed["h1"].listening()) == 2 and not bed["h2"].listening(), 30, "rank 0")
        assert {address for address, _ in bed["h1"].listening()} == {bed["h1"].address}
        (tmp_path / "come").touch()
        wait_for(lambda: all((tmp_path / rank).exists() for rank in "01"), 30, "both ranks")
        for name in ("h1", "h2"):
            assert {address for address, _ in bed[name].listening()} == {bed[name].address}
        assert bed["h3"].listening() == set()
    finally:
        (tmp_path / "come").touch()
        (tmp_path / "go").touch()
    out, err = job.communicate(timeout=20)
    assert job.returncode == 0, (out, err)
    assert bed["h1"].listening() == bed["h2"].listening() == set()


# A job on one host.


@pytest.mark.parametrize(
    ("hosts", "nics", "address"),
    [
        ("h1:2", "lo", "127.0.0.1"),
        ("h1:2", "eth0", "10.77.1.10"),
        ("h2:2", "eth0", "10.77.1.11"),
        ("h2:2", "127.0.0.0/8,priv0", "10.200.1.1"),
    ],
)
def test_pain_8_a_job_on_one_host_with_nics(bed: Bed, quick: str, hosts: str, nics: str, address: str) -> None:
    server = address if hosts.startswith("h1") else "127.0.0.1"  # which h2's agent relays
    check(found(start(bed["h1"], "-H", hosts, "--nics", nics, quick)), [address, address], server)


def test_pain_8_nics_that_one_host_does_not_have(bed: Bed, quick: str) -> None:
    text = refused(bed["h1"], "-H", "h2:2", "--nics", "ib0", quick)
    assert "--nics ib0 fits none of host h2's addresses; it has 127.0.0.1 (lo), " in text


# Without a launcher.


def test_pain_9_a_worker_that_says_127_0_0_1_is_named(bed: Bed, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    command = "hvdgloo.rendezvous -np 2 --bind 127.0.0.1:29500 --bind 10.77.1.10:29500 --secret-file"
    server = bed["h1"].popen([sys.executable, "-m", *command.split(), str(secret)])
    workers = []
    try:
        assert server.stdout is not None
        assert "waits for 2 workers" in server.stdout.readline()
        wait_for(secret.exists, what="the secret")
        for name, address in (("h1", "127.0.0.1"), ("h2", "10.77.1.10")):
            env = {"HVDGLOO_RENDEZVOUS": f"{address}:29500", "HVDGLOO_SECRET_FILE": str(secret)}
            env["HVDGLOO_INDEX"] = name[1:]
            code = "import hvdgloo.numpy as hvd; hvd.init()"
            workers.append(bed[name].popen([warm.python(), "-c", code], env=env))
        for worker in workers:
            _, err = worker.communicate(timeout=20)
            assert worker.returncode == 1
            last = err.splitlines()[-1]
            assert last.startswith("hvdgloo.errors.ConfigError: rank 0 (host h1, pid ")
            assert "can be reached at 127.0.0.1 only by ranks on its own host" in last
    finally:
        server.kill()
        for worker in workers:
            worker.kill()


# A launcher outside of it all: the machine that the bed stands on, as kubectl on a laptop would be.


def running(host: Host, word: str) -> list[psutil.Process]:
    """The host's processes with this word in their command lines."""
    found = []
    for process in host.processes():
        try:
            if word in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def reach(bed: Bed, folder: Path) -> str:
    """An agent command like ``kubectl exec -i {host} --``, for hosts to which no network leads."""
    lines = [f'{host.name}) shift; exec {shlex.join(host.enter([]))} "$@" ;;' for host in bed]
    script = folder / "reach"
    script.write_text("#!/bin/sh\ncase $1 in\n" + "\n".join(lines) + "\nesac\n")
    script.chmod(0o755)
    return f"{script} {{host}}"


@pytest.mark.parametrize("tls", [(), ("--tls", "required")], ids=["plain", "encrypted"])
def test_a_launcher_to_which_no_network_leads(
    bed: Bed, launcher: Launcher, tmp_path: Path, worker: str, tls: Sequence[str]
) -> None:
    command = reach(bed, tmp_path)
    done = launcher.run("--agent-command", command, *tls, "-H", "h1:1,h2:1", warm.python(), worker, timeout=40)
    check(found(done), [bed["h1"].address, bed["h2"].address], "127.0.0.1")
    wait_for(lambda: not bed["h1"].processes() and not bed["h1"].listening(), what="the end of everything")


def test_who_is_missing_is_told_where_agents_relay(bed: Bed, launcher: Launcher, tmp_path: Path) -> None:
    """Pain 20: hvd.init() waits for a rank that never calls it."""
    script = launcher.script(
        "import os, time, hvdgloo.numpy as hvd\nif os.environ['RANK'] == '0':\n    hvd.init()\ntime.sleep(60)\n"
    )
    path = str(launcher.folder / script)
    command = reach(bed, tmp_path)
    done = launcher.run(
        "--agent-command", command, "-H", "h1:1,h2:1", "--start-timeout", "6", warm.python(), path, timeout=40
    )
    assert done.returncode == 1
    assert "rank 1 on host h2 had not " in done.stderr
    wait_for(lambda: not bed["h1"].processes() and not bed["h2"].processes(), what="the end of everything")


def test_an_agent_that_cannot_listen_for_its_workers_is_the_failure(bed: Bed, quick: str) -> None:
    taken = bed["h2"].popen(
        [
            sys.executable,
            "-c",
            "import socket, time\ns = socket.create_server(('', 29400))\nprint(flush=True)\ntime.sleep(60)",
        ]
    )
    try:
        taken.stdout.readline()
        text = refused(bed["h1"], "-H", "h2:1", "--port-range", "29400-29401", quick)  # the other one is MASTER_PORT's
    finally:
        taken.kill()
        taken.wait()
    assert (
        "the agent on host h2 cannot listen for its workers: cannot listen on any of the ports 29400-29401 of " in text
    )


def test_pain_24_what_relays_ends_with_a_launcher_that_is_killed(bed: Bed, launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("import time\ntime.sleep(60)\n")
    path = str(launcher.folder / script)
    job = launcher.start("--agent-command", reach(bed, tmp_path), "-H", "h1:1,h2:1", path)
    wait_for(lambda: running(bed["h2"], path), 20, "the workers")
    assert [address for address, _ in bed["h1"].listening()] == ["127.0.0.1"]
    job.kill()
    wait_for(lambda: not bed["h1"].processes() and not bed["h2"].processes(), 5, "the end of everything")
    assert bed["h1"].listening() == set()
