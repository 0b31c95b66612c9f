"""``--tls``: jobs whose rendezvous and control plane are encrypted, whatever starts their workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_launch_networks import reach
from tests.support import warm
from tests.support.certificates import authority
from tests.support.hosts import Bed
from tests.support.launching import Launcher, run_command, wait_for

WORKER = """
import os, sys
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo._job.process import current
hvd.init()
links = current().engine._control.peers.connections.values()
encrypted = {type(link._socket).__mro__[1].__name__ == "SSLSocket" for link in links}
total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="a_name_that_travels")[0]
assert hvd.broadcast_object("of rank 0" if hvd.rank() == 0 else None) == "of rank 0"
loaded = [name for name in ("ssl", "cryptography", "requests") if name in sys.modules]
os.write(1, f"FOUND {hvd.rank()} {total} {encrypted} {' '.join(loaded)}\\n".encode())
"""

# Everything that passes a network interface, into a file, until a line comes.
RECORDER = """
import select, socket, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock, open(sys.argv[1], "wb", 0) as file:
    sock.bind(("eth0", 0))
    print("ready", flush=True)
    while True:
        for ready in select.select([sock, sys.stdin], [], [])[0]:
            if ready is sys.stdin:
                sys.exit()
            file.write(sock.recv(1 << 16))
"""


def found(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line.partition("FOUND ")[2] for line in done.stdout.splitlines() if "FOUND " in line)


def test_on_one_host_it_is_off_unless_it_is_asked_for(launcher: Launcher) -> None:
    """Off, it costs a worker nothing, not even an import; on, only who listens needs to make a certificate."""
    script = launcher.script(WORKER)
    assert found(launcher.run("-np", "2", script)) == ["0 2.0 {False} ", "1 2.0 {False} "]
    done = launcher.run("-np", "2", "--tls", "required", "--verbose", script)
    assert found(done) == ["0 2.0 {True} ssl cryptography", "1 2.0 {True} ssl"]
    assert done.stderr.count("encrypted (TLS 1.3), with certificates that are made for this job alone\n") == 1
    done = launcher.run("-np", "2", script, env={"HVDGLOO_TLS": "required"})
    assert found(done) == ["0 2.0 {True} ssl cryptography", "1 2.0 {True} ssl"]


def test_certificates_of_the_user_s(launcher: Launcher) -> None:
    certificate, key = authority(launcher.folder, "own")
    files = ["--tls-cert", certificate, "--tls-key", key, "--tls-ca", certificate]
    done = launcher.run("-np", "2", "--verbose", *files, launcher.script(WORKER))
    assert found(done) == ["0 2.0 {True} ssl", "1 2.0 {True} ssl"]
    assert done.stderr.count(f"encrypted (TLS 1.3), with the certificate {certificate}\n") == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tls", "yes"], "--tls yes: 'yes' cannot be used: expected one of auto, off, required"),
        (["--tls-ca", "ca"], "HVDGLOO_TLS_CA is set without HVDGLOO_TLS_CERT"),
        (["--tls-cert", "absent"], "HVDGLOO_TLS_CERT, HVDGLOO_TLS_KEY: absent cannot be used: No such file"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(launcher: Launcher, flags: list[str], text: str) -> None:
    done = launcher.run("-np", "1", *flags, launcher.script("open('started', 'w').close()"))
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (launcher.folder / "started").exists()


def test_without_cryptography_no_agent_is_started(launcher: Launcher) -> None:
    """It is looked for before the first host is connected to, which may take long; here it would fail."""
    code = f"""
import importlib.util, sys
from hvdgloo.runner.cli.main import main
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "cryptography" else found(name, *rest)
sys.exit(main(["--tls", "required", "-H", "h1:1", "--agent-command", "touch {launcher.folder}/started", "true"]))
"""
    done = run_command([sys.executable, "-c", code], timeout=40, cwd=launcher.folder)
    assert done.returncode == 2, done.stderr
    assert "pip install 'hvdgloo[tls]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize("wanted", ["off", "required"])
def test_between_hosts_nothing_but_tensors_is_seen(bed: Bed, tmp_path: Path, wanted: str) -> None:
    script, record = tmp_path / "worker.py", tmp_path / "record"
    script.write_text(WORKER)
    recorder = bed["h1"].popen(
        [sys.executable, "-c", RECORDER, str(record)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert recorder.stdout is not None
    assert recorder.stdin is not None
    assert recorder.stdout.readline() == "ready\n"
    command = [*warm.launcher(), "--tls", wanted, "-H", "h1:1,h2:1", warm.python(), str(script)]
    assert len(found(bed["h1"].run(command, timeout=40))) == 2
    recorder.stdin.close()
    assert recorder.wait(10) == 0
    seen = record.read_bytes()
    assert len(seen) > 10_000
    for words in (b"a_name_that_travels", b"/v1/kv/"):
        assert (words in seen) == (wanted == "off")


def test_a_server_beside_the_agent(bed: Bed, launcher: Launcher, tmp_path: Path) -> None:
    """It is started by an agent, which tells it."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = reach(bed, tmp_path)
    flags = ["--agent-command", command, "--tls", "required", "-H", "h1:1,h2:1"]
    done = launcher.run(*flags, warm.python(), str(script), timeout=40)
    assert [line[:12] for line in found(done)] == ["0 2.0 {True}", "1 2.0 {True}"]


def test_workers_that_something_else_starts_need_the_setting_and_the_secret(tmp_path: Path) -> None:
    """Kubernetes, Slurm, a shell: what the server prints is all that workers need."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HVDGLOO_")}
    output = tmp_path / "output"
    with output.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "hvdgloo.rendezvous", "-np", "2", "--once"],
            stdout=file,
            stderr=file,
            env={**clean, "HVDGLOO_TLS": "required", "TMPDIR": str(tmp_path)},
        )
    try:
        wait_for(lambda: "State: https://" in output.read_text(), what="what workers need")
        lines = [line.strip() for line in output.read_text().splitlines() if line.startswith("  HVDGLOO_")]
        told: dict[str, Any] = dict(line.split("=", 1) for line in lines)
        assert sorted(told) == ["HVDGLOO_RENDEZVOUS", "HVDGLOO_SECRET_FILE", "HVDGLOO_TLS"]
        workers = [
            subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, env={**clean, **told})
            for _ in range(2)
        ]
        answers = sorted(worker.communicate(timeout=30)[0] for worker in workers)
        assert answers == ["FOUND 0 2.0 {True} ssl cryptography\n", "FOUND 1 2.0 {True} ssl\n"]
        assert server.wait(10) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
