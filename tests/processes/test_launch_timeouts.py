"""Four questions, four timeouts, each by flag or by variable, each on real processes: pain 11.

How long may others take to come (start), to be connected once they are there (connect), to answer while a rank waits
for them (operation), and to submit what others have submitted (stall)? In each test the one in question takes effect at
its time, while others that are shorter, or longer, do not matter.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.support import warm
from tests.support.launching import Launcher

# Rank 0 tells what it waited for, how long, and with which error the wait ended.
HEAD = """\
import os, signal, sys, time
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo import errors

rank = int(os.environ["RANK"])

def waiting(call):
    begin = time.monotonic()
    try:
        call()
    except errors.HvdglooError as error:
        said = str(error).replace("\\n", " ")
        # In one piece: rank 0 may be ended while it writes.
        os.write(1, f"WAITED {time.monotonic() - begin:.2f} {type(error).__name__} {said}\\n".encode())
        os._exit(3)
"""
NEVER_COMES = """
if rank == 1:
    time.sleep(60)
waiting(hvd.init)
"""
NEVER_CONNECTS = """
if rank == 1:
    from hvdgloo.config import Config
    from hvdgloo.rendezvous import RendezvousClient, WorkerInfo, host_identity
    config = Config.from_env()
    client = RendezvousClient(config.rendezvous, config.secret)
    client.register(0, WorkerInfo(1, None, "localhost", host_identity(), "127.0.0.1", 0, os.getpid()), timeout=60)
    time.sleep(60)
waiting(hvd.init)
"""
ANSWERS_NOTHING = """
hvd.init()
hvd.allreduce(np.ones(3), name="first")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
waiting(lambda: hvd.allreduce(np.ones(3), name="second"))
"""
SUBMITS_NOTHING = """
hvd.init()
hvd.allreduce(np.ones(3), name="first")
if rank == 1:
    time.sleep(60)
waiting(lambda: hvd.allreduce(np.ones(3), name="second"))
"""

FLAGS = {
    "start": ("--start-timeout", "HVDGLOO_START_TIMEOUT", "HOROVOD_START_TIMEOUT"),
    "connect": ("--connect-timeout-seconds", "HVDGLOO_CONNECT_TIMEOUT", None),
    "operation": ("--gloo-timeout-seconds", "HVDGLOO_OPERATION_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    "warning": (
        "--stall-check-warning-time-seconds",
        "HVDGLOO_STALL_CHECK_TIME_SECONDS",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
    ),
    "stall": (
        "--stall-check-shutdown-time-seconds",
        "HVDGLOO_STALL_SHUTDOWN_TIME_SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    ),
}


def run(launcher: Launcher, how: str, body: str, times: dict[str, float]) -> subprocess.CompletedProcess[str]:
    launcher.script(HEAD + body)
    arguments: list[str] = []
    environ: dict[str, str] = {}
    for name, seconds in times.items():
        flag, variable, horovod = FLAGS[name]
        if how == "flag":
            arguments += [flag, f"{seconds:g}"]
        else:
            environ[(horovod if how == "Horovod's variable" and horovod else variable)] = f"{seconds:g}"
    return launcher.run(*arguments, "-np", "2", warm.python(*warm.NUMPY), "worker.py", env=environ, timeout=40)


def waited(done: subprocess.CompletedProcess[str]) -> tuple[float, str, str]:
    """Return the time that rank 0 waited, the class of the error, and its text."""
    lines = [line.partition(":WAITED ")[2] for line in done.stdout.splitlines() if ":WAITED " in line]
    assert lines, done.stdout + done.stderr
    seconds, kind, text = lines[0].split(" ", 2)
    return float(seconds), kind, text


WAYS = pytest.mark.parametrize("how", ["flag", "variable", "Horovod's variable"])
SOON = 2.5  # seconds that a busy machine may take longer


@WAYS
def test_pain_11_start(launcher: Launcher, how: str) -> None:
    done = run(launcher, how, NEVER_COMES, {"start": 2.5, "connect": 1, "operation": 0.5, "warning": 0.5, "stall": 1})
    seconds, kind, text = waited(done)
    assert kind == "RendezvousTimeoutError"
    assert "missing: rank 1" in text
    assert 2.3 < seconds < 2.5 + SOON


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_pain_11_connect(launcher: Launcher, how: str) -> None:
    done = run(launcher, how, NEVER_CONNECTS, {"connect": 2, "start": 30, "operation": 0.5, "stall": 0.7})
    seconds, kind, text = waited(done)
    assert kind == "ConnectError"
    assert "rank 0 waited 2 s" in text
    assert 1.9 < seconds < 2 + SOON


@WAYS
def test_pain_11_operation(launcher: Launcher, how: str) -> None:
    done = run(launcher, how, ANSWERS_NOTHING, {"operation": 2, "start": 30, "connect": 30, "stall": 30})
    seconds, kind, text = waited(done)
    assert kind == "PeerLostError"
    assert "rank 1" in text
    assert 1.5 < seconds < 2 + SOON


@WAYS
def test_pain_11_stall(launcher: Launcher, how: str) -> None:
    """A rank that answers, and is merely late, is waited for far longer than the operation timeout."""
    times = {"stall": 2.0, "warning": 1.0, "operation": 0.5, "connect": 30, "start": 30}
    done = run(launcher, how, SUBMITS_NOTHING, times)
    seconds, kind, text = waited(done)
    assert kind == "StallError"
    assert "second" in text
    assert 1.9 < seconds < 2 + SOON


def test_pain_11_a_flag_wins_over_its_variable(launcher: Launcher) -> None:
    launcher.script(HEAD + NEVER_CONNECTS)
    done = launcher.run(
        "--connect-timeout-seconds", "1", "-np", "2", "worker.py", env={"HVDGLOO_CONNECT_TIMEOUT": "25"}, timeout=40
    )
    assert "rank 0 waited 1 s" in waited(done)[2]
