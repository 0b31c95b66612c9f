"""A job over the hosts of a bed: a launcher on one of them, real ssh to the others, and what is left afterwards."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from hvdgloo.runner.agent.agent import PROCESS_NAME
from tests.support.hosts import Bed, Host, HostProcess
from tests.support.launching import wait_for

STUBBORN_BECOMES = ["sleep", "600"]
STUBBORN = ["sh", "-c", f"trap '' TERM; exec {' '.join(STUBBORN_BECOMES)}"]
"""A program that SIGTERM does not end, and what its command line is after a moment."""

FERTILE = f"""
import os, signal, socket, subprocess, sys, time
rank = os.environ["RANK"]
program = {STUBBORN!r}
subprocess.Popen(program)
subprocess.Popen(program, start_new_session=True)
subprocess.Popen(program, preexec_fn=lambda: os.setpgid(0, 0))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvpe(program[0], program, {{"FORGETFUL": "1"}})
    os._exit(0)
os.wait()
ready = open(f"ready{{rank}}.new", "w")
ready.write(str(os.getpid()))
ready.close()
os.rename(f"ready{{rank}}.new", f"ready{{rank}}")
if rank == os.environ.get("TEST_ENDS"):
    while not os.path.exists("now"):
        time.sleep(0.01)
    exec(os.environ["TEST_HOW"])
signal.pause()
"""
"""A worker with every kind of offspring: a child, one in a session and one in a process group of its own, and a daemon
that forked twice and has forgotten its environment."""

OFFSPRING = 4


class HostsJob:
    """``hvdgloo-run`` on the first host of a bed, with a worker or more on each.

    Args:
        folder: of the job; all hosts see it.
        slots: workers for each host.
    """

    def __init__(self, bed: Bed, folder: Path, slots: int = 1, hosts: Sequence[str] | None = None) -> None:
        self.bed = bed
        self.folder = folder
        self.hosts = list(hosts or bed.names)
        self.slots = slots
        self.process: HostProcess | None = None

    @property
    def size(self) -> int:
        return len(self.hosts) * self.slots

    def start(
        self,
        script: str,
        *flags: str,
        env: dict[str, str] | None = None,
        launcher: str = "",
        around: Sequence[str] = (),
        python: str = sys.executable,
    ) -> HostProcess:
        """Start it, with its output in the files out and err.

        Args:
            around: a command that runs the launcher.
            python: the workers' interpreter.
        """
        self.folder.mkdir(exist_ok=True)
        (self.folder / "worker.py").write_text(textwrap.dedent(script))
        hosts = ",".join(f"{name}:{self.slots}" for name in self.hosts)
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            self.process = self.bed[launcher or self.hosts[0]].popen(
                [*around, sys.executable, "-m", "hvdgloo.runner", "-H", hosts, *flags, python, "worker.py"],
                cwd=self.folder,
                env=env,
                stdout=out,
                stderr=err,
            )
        return self.process

    def start_fertile(self, *flags: str, ends: int | None = None, how: str = "", launcher: str = "") -> HostProcess:
        """Start workers with offspring, and wait until all are there.

        Args:
            ends: a rank that does ``how`` when ``strike`` is called.
        """
        names = [] if ends is None else ["-x", "TEST_ENDS", "-x", "TEST_HOW"]
        env = {} if ends is None else {"TEST_ENDS": str(ends), "TEST_HOW": textwrap.dedent(how)}
        process = self.start(FERTILE, *names, *flags, env=env, launcher=launcher)
        for rank in range(self.size):
            self.file(f"ready{rank}")
        return process

    def strike(self) -> None:
        (self.folder / "now").write_text("")

    def file(self, name: str) -> Path:
        path = self.folder / name
        process = self.process
        assert process is not None

        def written() -> bool:
            return path.exists() and path.stat().st_size > 0

        wait_for(lambda: written() or process.poll() is not None, 20, f"file {name}")
        assert written(), f"the launcher ended: {self.error}"
        return path

    def worker(self, rank: int) -> psutil.Process:
        """A worker's process, as this machine numbers it."""
        host = self.host_of(rank)
        number = int(self.file(f"ready{rank}").read_text())
        return next(process for process in host.processes() if inner_pid(process) == number)

    def host_of(self, rank: int) -> Host:
        return self.bed[self.hosts[rank // self.slots]]

    def agents(self, host: str) -> tuple[psutil.Process, psutil.Process]:
        """Watchdog and agent proper on a host; the watchdog is the older one."""
        found = [p for p in self.bed[host].processes() if is_agent(p)]
        found = [p for p in found if any(worker.is_relative_to(self.folder) for worker in _folders_below(p))]
        assert len(found) == 2, found
        first, second = sorted(found, key=lambda p: p.ppid() in {q.pid for q in found})
        return first, second

    def ssh_client(self, host: str) -> psutil.Process:
        """The launcher's ssh to a host."""
        launcher = self.bed[self.hosts[0]]
        return next(p for p in launcher.processes() if p.name() == "ssh" and host in p.cmdline())

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def error(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def last_words(self) -> str:
        """The summary, if there is one."""
        _, mark, after = self.error.rpartition("hvdgloo-run: the job failed: ")
        return mark + after if mark else ""

    def wait(self, timeout: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout)


def inner_pid(process: psutil.Process) -> int:
    """The number that a process has on its host."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("NSpid:")).split()[-1])


def is_agent(process: psutil.Process) -> bool:
    try:
        return process.name() == PROCESS_NAME
    except psutil.NoSuchProcess:
        return False


def _folders_below(process: psutil.Process) -> list[Path]:
    folders = []
    for child in process.children(recursive=True):
        try:
            folders.append(Path(child.cwd()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return folders


def occupied(bed: Bed) -> bool:
    """Tell whether some process is left on some host: a hundredth of the time that ``leftovers`` takes to name it."""
    return not all(host.is_empty() for host in bed)


def leftovers(bed: Bed) -> dict[str, list[str]]:
    """Return the processes, listeners and shared memory left on the hosts that are on; nothing for a clean host."""
    found = {}
    for host in bed:
        left = [f"process {' '.join(_command(process))[:200]}" for process in host.processes()]
        left += [f"listener {address}:{port}" for address, port in host.listening()]
        left += [f"shared memory {name}" for name in host.shared_memory()]
        if left:
            found[host.name] = left
    return found


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def assert_clean(
    bed: Bed, within: float, since: float, find: Callable[[Bed], dict[str, list[str]]] = leftovers
) -> float:
    """Nothing is left ``within`` seconds from the time ``since``; returns how long it took."""
    while True:
        # Most looks find what the last one found: a glance tells, and leaves the cores to those who are to end.
        busy = find is leftovers and occupied(bed)
        left = {} if busy else find(bed)
        took = time.monotonic() - since
        if not busy and not left:
            break
        assert took < within, f"left after {took:.1f} s: {left or find(bed)}"
        time.sleep(0.02)
    assert took < within, f"all was gone, but only after {took:.1f} s"
    return took
