"""A network that encrypts: the recipe of docs/security.md, followed between two hosts with a recorder beside."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.processes.test_launch_tls import RECORDER
from tests.support import warm
from tests.support.hosts import Bed, Host
from tests.support.launching import run_command

pytestmark = pytest.mark.extended

PAGE = ROOT / "docs/security.md"
WORKER = """
import os
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
pattern = np.frombuffer(b"tensors that no observer should see " * 1000, np.uint8)
total = hvd.allreduce(pattern, op=hvd.Max, name="pattern")
assert total.tobytes() == pattern.tobytes()
os.write(1, f"FOUND {os.environ['HVDGLOO_ADDRESS']}\\n".encode())
"""


def recipe() -> list[str]:
    """The page's commands, from making a key to switching the interface on."""
    text = PAGE.read_text().partition("umask 077;")[2]
    return [
        "umask 077;" + line if number == 0 else line for number, line in enumerate(text.split("```")[0].splitlines())
    ]


def follow(host: Host, key: Path, public: str, changes: dict[str, str]) -> None:
    lines = recipe()[1:]
    for old, new in {"/etc/wireguard/key": str(key), "OTHER_PUBLIC_KEY": public, **changes}.items():
        lines = [line.replace(old, new) for line in lines]
    subprocess.run(host.enter(["sh", "-ec", "\n".join(lines)]), check=True, timeout=10)


def why_not(host: Host) -> str:
    """Return the reason why there can be no tunnel here; empty if there can."""
    if shutil.which("wg") is None:
        return "wg (wireguard-tools) is not installed"
    made = run_command(host.enter(["ip", "link", "add", "probe", "type", "wireguard"]), timeout=10)
    if made.returncode:
        return f"the kernel has no WireGuard: {made.stderr.strip()}"
    subprocess.run(host.enter(["ip", "link", "delete", "probe"]), check=True, timeout=10)
    return ""


def test_the_recipe_says_what_each_host_needs() -> None:
    """The requirements of the test below exist, even where it cannot run."""
    assert [line.split()[0] for line in recipe()] == ["umask", "ip", "wg", "ip", "ip"]
    assert "--nics wg0" in PAGE.read_text()


def test_tensors_are_seen_in_the_tunnel_alone(bed: Bed, tmp_path: Path) -> None:
    one, other = bed["h1"], bed["h2"]
    if reason := why_not(one):
        pytest.skip(reason)
    keys = {host.name: tmp_path / f"{host.name}.key" for host in (one, other)}
    public = {}
    for name, path in keys.items():
        made = run_command(["wg", "genkey"], check=True, timeout=10).stdout
        path.write_text(made)
        path.chmod(0o600)
        public[name] = run_command(["wg", "pubkey"], input=made, check=True, timeout=10).stdout.strip()
    follow(one, keys["h1"], public["h2"], {"10.0.0.6": other.address})
    swapped = {"10.200.0.2/32": "10.200.0.1/32", "10.200.0.1/24": "10.200.0.2/24", "10.0.0.6": one.address}
    follow(other, keys["h2"], public["h1"], swapped)
    script, record = tmp_path / "worker.py", tmp_path / "record"
    script.write_text(WORKER)
    recorder = one.popen([sys.executable, "-c", RECORDER, str(record)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert recorder.stdout is not None
    assert recorder.stdin is not None
    assert recorder.stdout.readline() == "ready\n"
    run = [*warm.launcher(), "--nics", "wg0", "-H", "h1:1,h2:1"]
    done = one.run([*run, warm.python(), str(script)], timeout=40)
    recorder.stdin.close()
    assert recorder.wait(10) == 0
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["10.200.0.1", "10.200.0.2"]
    seen = record.read_bytes()
    assert len(seen) > 36_000
    assert b"tensors that no observer" not in seen
