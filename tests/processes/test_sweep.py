"""A second agent sweeps up after one that was lost: pain 24 (orphans), without the network in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hvdgloo.runner.processes import reaper
from hvdgloo.runner.processes.worker_process import WorkerProcess
from hvdgloo.runner.protocol.frames import Spawn
from tests.support.launching import Launcher, in_namespace, run_command, wait_for

GRACE = 3.0
"""The default grace period after a failure."""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``start(program, **environ)``: a process that has printed a line."""
    processes: list[subprocess.Popen[bytes]] = []

    def make(program: str, **environ: str) -> subprocess.Popen[bytes]:
        made = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, **environ})
        processes.append(made)
        assert made.stdout is not None
        assert made.stdout.readline()
        return made

    yield make
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


ATTENDS = """
import signal
from hvdgloo.runner.processes import reaper as sweep
sign = sweep.attend({job!r})
print("up", flush=True)
signal.pause()
"""

WAITS = "import signal; print('up', flush=True); signal.pause()"


def test_pain_24_an_agent_that_hangs_gets_the_default_grace_period_and_is_ended(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """It used to be asked so often meanwhile that its queue of connections filled up, and the sweep never ended."""
    job = os.urandom(16).hex()
    agent = start(ATTENDS.format(job=job))
    worker = start(WAITS, HVDGLOO_AGENT_ID=job)
    agent.send_signal(signal.SIGSTOP)
    program = f"from hvdgloo.runner.processes import reaper as sweep; print(sweep.end_abandoned({job!r}, {GRACE}))"
    started = time.monotonic()
    done = run_command([sys.executable, "-c", program], timeout=15)
    assert done.stdout == "set()\n", done.stderr
    assert GRACE < time.monotonic() - started < GRACE + 4
    assert agent.wait(0) == -signal.SIGKILL
    assert worker.wait(0) == -signal.SIGKILL, "it had its time while the agent was waited for"


def test_an_agent_that_ends_in_time_is_waited_for_and_not_killed(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    job = os.urandom(16).hex()
    agent = start(ATTENDS.format(job=job))
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            agent.terminate()
            agent.wait()
        time.sleep(seconds)

    started = time.monotonic()
    assert reaper.end_abandoned(job, 10.0, rest) == set()
    assert time.monotonic() - started < 5
    assert agent.returncode == -signal.SIGTERM
    assert len(rests) >= 3


FOREIGN = ATTENDS.replace("sign =", "import os; os.setuid(65534)\nsign =")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_a_sign_that_another_user_shows_does_not_count(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Names of sockets can be read by all users of a host, and taken by any."""
    job = os.urandom(16).hex()
    stranger = start(FOREIGN.format(job=job))
    started = time.monotonic()
    assert reaper.end_abandoned(job, 30.0) == set()
    assert time.monotonic() - started < 5
    assert stranger.poll() is None


def test_a_long_grace_period_still_ends_in_sigkill(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """The time for unkillable processes starts at the SIGKILL."""
    worker = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS)

    def find() -> set[int]:
        return set() if worker.poll() is not None else {worker.pid}

    assert reaper.end_all(find, grace=0.5, limit=0.2) == set()
    assert worker.wait(0) == -signal.SIGKILL


def test_who_is_stopped_is_let_go_on_to_save_its_work(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    worker = start("import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + WAITS)
    worker.send_signal(signal.SIGSTOP)
    assert reaper.end_all(lambda: set() if worker.poll() is not None else {worker.pid}, grace=10) == set()
    assert worker.wait(0) == 7


def test_a_job_s_processes_are_found_by_its_whole_id(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    job = os.urandom(16).hex()
    own, other = start(WAITS, HVDGLOO_AGENT_ID=job), start(WAITS, HVDGLOO_AGENT_ID=f"{job}0")
    assert reaper.processes_of(job) == {own.pid}
    assert reaper.processes_of(f"{job}0") == {other.pid}


IMMORTAL = """
# The first process of a namespace: nothing inside it can kill it. It passes for a process of the job.
import ctypes, os, subprocess, sys, time
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_void_p
libc.getenv.argtypes = [ctypes.c_char_p]
variable = libc.getenv(b"HVDGLOO_AGENT_ID")
launcher = subprocess.Popen(sys.argv[1:])
while not os.path.exists("job") and launcher.poll() is None:
    time.sleep(0.01)
job = open("job").read().encode()
ctypes.memmove(variable, job, len(job))
open("taken", "w").write("1")
sys.exit(launcher.wait())
"""

WORKER = """
import os, time
open("job.new", "w").write(os.environ["HVDGLOO_AGENT_ID"])
os.rename("job.new", "job")
while not os.path.exists("taken"): time.sleep(0.01)
"""


APART = ("--pid", "--fork", "--mount-proc", "--kill-child")


def test_pain_23_a_job_that_leaves_behind_what_cannot_be_killed_has_succeeded(launcher: Launcher) -> None:
    done = launcher.run(
        *("-np", "1", "--heartbeat-timeout", "2", launcher.script(WORKER)),
        env={"HVDGLOO_AGENT_ID": "0" * 34},
        wrapper=[
            *in_namespace(*APART),
            sys.executable,
            "-S",
            "-c",
            IMMORTAL,
        ],
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    assert "processes 1 on localhost cannot be killed" in done.stderr


REUSED = """
import os, signal, subprocess, sys, time
from hvdgloo.runner.protocol.frames import Spawn
from hvdgloo.runner.processes.worker_process import WorkerProcess
from hvdgloo.runner.processes.bootstrap import CommandStream
from hvdgloo.runner.transport.local import LocalStream

def worker():
    made = WorkerProcess(Spawn(0, ["true"], {}), dict(os.environ), "/", None)
    made.ended(os.waitpid(made.pid, 0)[1])
    assert not made.group_lives()
    made.close()
    return made.pid, lambda: made.signal_group(signal.SIGTERM)

def command(kind):
    made = kind(["true"])
    while made.poll() is None: time.sleep(0.01)
    return made.pid, made.kill

local, other = lambda: command(LocalStream), lambda: command(CommandStream)
pid, strike = {"worker": worker, "command": other, "local": local}[sys.argv[1]]()
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(pid - 1))
wait = "import os; pid = os.fork(); print(flush=True); os.wait() if pid else __import__('signal').pause()"
stranger = subprocess.Popen([sys.executable, "-S", "-c", wait], start_new_session=True, stdout=subprocess.PIPE)
assert stranger.pid == pid, (stranger.pid, pid)
assert stranger.stdout.readline() and stranger.stdout.readline()
strike()
try:
    print("killed", stranger.wait(0.5))
except subprocess.TimeoutExpired:
    print("spared")
"""


@pytest.mark.parametrize("whose", ["worker", "command", "local"])
def test_a_stranger_that_got_the_number_of_a_process_that_ended_is_not_signalled(whose: str) -> None:
    done = run_command(
        [*in_namespace(*APART), sys.executable, "-c", REUSED, whose],
        timeout=20,
    )
    assert done.stdout == "spared\n", done.stderr


def test_what_a_worker_leaves_in_its_group_is_signalled_until_it_has_ended() -> None:
    worker = WorkerProcess(Spawn(0, ["sh", "-c", "sleep 100 & echo $!"], {}), dict(os.environ), "/", None)
    _, status = os.waitpid(worker.pid, 0)
    worker.ended(status)
    child = int(worker.read(1) or b"")
    try:
        assert worker.group_lives()
        worker.signal_group(signal.SIGTERM)
        wait_for(lambda: not worker.group_lives(), what=f"the end of process {child}")
    finally:
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil tells whose a process is")
def test_processes_belong_to_their_effective_user(
    start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To /proc, no matter which user has started them."""
    process = start(WAITS, **{reaper.AGENT_VARIABLE: "of-this-test"})
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert reaper.processes_of("of-this-test") == {process.pid}
