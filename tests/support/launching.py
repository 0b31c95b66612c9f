"""Real launches for tests: a launcher as a child process, and whatever is left of it afterwards."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
import pytest

from tests.support import warm

T = TypeVar("T")

_MARK = "HVDGLOO_TEST_MARK"


def wait_for(condition: Callable[[], T | None], timeout: float = 15.0, what: str = "") -> T:
    """Poll until ``condition`` gives something true, and return that.

    A condition that is costly to look at is looked at less often, so that those who are waited for have the cores.
    """
    deadline = time.monotonic() + timeout
    while True:
        began = time.thread_time()
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        time.sleep(max(0.01, min(0.1, 10 * (time.thread_time() - began))))


def run_command(command: Sequence[str], *, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its output as text."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def is_running(pid: int) -> bool:
    """Tell whether there is a process that has not ended; one that merely was not collected has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_namespace(*flags: str, setup: str = "true") -> list[str]:
    """Return a command that runs another one in a namespace of its own, in which ``setup`` was done before; skips where
    none can be made."""
    command = ["unshare", *flags, "sh", "-c", f'{setup} && exec "$@"', "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no such namespace can be made here")
    return command


def hold_interpreter(seconds: float) -> None:
    """Keep all other threads of this process from running, as one long call of a library does."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def of_a_service(name: str) -> dict[str, str]:
    """The variables that Kubernetes gives to containers for a Service whose name reads like this in capitals."""
    return {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": "29400",
        f"{name}_SERVICE_PORT_HTTP": "29400",
        f"{name}_PORT": "tcp://10.0.0.1:29400",
        f"{name}_PORT_29400_TCP": "tcp://10.0.0.1:29400",
        f"{name}_PORT_29400_TCP_PROTO": "tcp",
        f"{name}_PORT_29400_TCP_PORT": "29400",
        f"{name}_PORT_29400_TCP_ADDR": "10.0.0.1",
    }


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher or scheduler around the tests may have put there."""
    prefixes = ("HVDGLOO_", "HOROVOD_", "OMP_", "MKL_", "TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_", "SLURM_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}


class Launcher:
    """``hvdgloo-run`` in a folder of its own.

    Every process that descends from it, however far and detached, carries a mark in its environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "worker.py") -> str:
        """Write a program and return its name."""
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def start(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
        new_session: bool = True,
        wrapper: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-m", "hvdgloo.runner"),
    ) -> subprocess.Popen[bytes]:
        """Launch; ``wrapper`` is a command that runs the one that follows it."""
        process = subprocess.Popen(
            [*wrapper, *command, *arguments],
            cwd=self.folder,
            env={**clean_environment(), _MARK: self.mark, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
        )
        self.processes.append(process)
        return process

    def run(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        input: bytes | None = None,
        timeout: float = 30.0,
        wrapper: Sequence[str] = (),
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Launch and wait for the end; output as text, with carriage returns kept.

        To import what a launcher is made of takes more processor time than most jobs of tests, so this is a warm one,
        unless it is to be ``fresh``, or has a wrapper.
        """
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        start = self.start if fresh or wrapper else partial(self.start, command=warm.launcher())
        process = start(*arguments, env=env, stdin=stdin, wrapper=wrapper)
        out, err = process.communicate(input, timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())

    def living(self) -> list[psutil.Process]:
        """Every living process that descends from a launcher of this test."""
        # Straight from /proc: this is asked again and again, and psutil would take ten times as long for each process.
        mark = f"{_MARK}={self.mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                if mark not in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    continue
                process = psutil.Process(int(name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has just ended, or is not ours to look at
        return found

    def agents(self, launcher: subprocess.Popen[bytes]) -> tuple[psutil.Process, psutil.Process]:
        """The watchdog and the agent proper of a running job."""
        watchdog = wait_for(lambda: psutil.Process(launcher.pid).children(), what="the watchdog")[0]
        agent = wait_for(lambda: watchdog.children(), what="the agent")[0]
        return watchdog, agent

    def file(self, name: str) -> Path:
        """A file in the folder, once it is there and not empty."""
        path = self.folder / name
        wait_for(lambda: path.exists() and path.stat().st_size > 0, what=f"file {name}")
        return path

    def assert_nothing_left(self, timeout: float = 10.0) -> None:
        wait_for(lambda: not self.living(), timeout, "the end of all processes of the job")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        deadline = time.monotonic() + 10
        while (left := self.living()) and time.monotonic() < deadline:
            for survivor in left:
                try:
                    survivor.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    pass
            time.sleep(0.05)


@contextmanager
def launcher_in(folder: Path) -> Iterator[Launcher]:
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        launcher.close()
