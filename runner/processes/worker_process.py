"""A worker from its agent's point of view: a process in its own session, its pipes, and its exit status.

Because of its own session, a terminal's Ctrl-C reaches a worker only once, through us, and a signal to its process
group also reaches a shell script's children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO

from hvdgloo import as_horovod
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.protocol.frames import CHUNK, STDERR, STDOUT, Spawn

WINDOW = 256 * 1024
"""Bytes of one worker's output that may be sent to the launcher without a Credit for them."""


class WorkerProcess:
    """A started worker.

    Attributes:
        number, pid: the worker's identity.
        status: exit status or minus the signal, once it has ended.
        streams: the open pipes, by number (1 stdout, 2 stderr).
        stdin: the pipe to its standard input, if it has one.
        unacknowledged: bytes of output without credit.
        paused: True while its pipes stay unread for lack of credit.
        result: the file with a task's result.
        overdue: True once it was killed because it had not ended in time.
        reported: True once its end has been reported to the launcher.
        kill_at: time at which the rest of its process group is killed, on the monotonic clock; None for never.
    """

    def __init__(self, spawn: Spawn, environ: Mapping[str, str], cwd: str, blob: IO[bytes] | None) -> None:
        """Start the worker.

        Raises:
            OSError: the program cannot be executed, or the working directory does not exist.
        """
        self.number = spawn.number
        self.status: int | None = None
        self.killed_by_us = False
        self.overdue = False
        self.reported = False
        self.kill_at: float | None = None
        self.unacknowledged = 0
        self.paused = False
        self.result: IO[bytes] | None = None
        argv = list(spawn.argv)
        descriptors: tuple[int, ...] = ()
        if spawn.task and blob is not None:
            self.result = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            descriptors = (blob.fileno(), self.result.fileno())
            argv += [str(fd) for fd in descriptors]
        env = {**environ, **spawn.env}
        self._popen = subprocess.Popen(
            argv,
            env={**env, **as_horovod.environment(env)},
            cwd=cwd,
            stdin=subprocess.PIPE if spawn.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=descriptors,
            # The agent has one thread, so running Python in the forked child is safe. This is the last of three safety
            # nets: it ends workers at once if agent and watchdog are both killed.
            preexec_fn=_die_with_agent,
        )
        self.pid = self._popen.pid
        self._group_lives = True
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.streams: dict[int, IO[bytes]] = {STDOUT: self._popen.stdout, STDERR: self._popen.stderr}
        self.stdin = self._popen.stdin
        for pipe in (*self.streams.values(), self.stdin):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def may_be_read(self) -> bool:
        """True while the launcher keeps up with the worker's output."""
        return self.unacknowledged < WINDOW

    def read(self, stream: int) -> bytes | None:
        """Return the available output; empty at the end of the stream, None if there is none now."""
        try:
            return os.read(self.streams[stream].fileno(), CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def ended(self, wait_status: int) -> None:
        """Record the status that waitpid returned."""
        self.status = os.waitstatus_to_exitcode(wait_status)
        # The agent has called waitpid, because adopted processes show up there too; Popen must not call it again.
        self._popen.returncode = self.status
        self.group_lives()

    def signal_group(self, signum: int) -> None:
        """Send a signal to every process of the worker's process group, whether or not the worker itself has ended."""
        if not self.group_lives():
            return
        if signum == signal.SIGKILL and self.running:
            self.killed_by_us = True
        try:
            os.killpg(self.pid, signum)
            if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.killpg(self.pid, signal.SIGCONT)  # a stopped process would not receive it
        except (ProcessLookupError, PermissionError):
            pass

    def stop(self, signum: int, kill_at: float) -> None:
        """Send a signal to the process group, and kill the rest of it at ``kill_at``, or at the time of an earlier call
        if that is sooner.
        """
        self.signal_group(signum)
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def kill_if_late(self, now: float) -> None:
        """Kill the process group if its time is up."""
        if self.kill_at is None:
            return
        if not self.group_lives():
            self.kill_at = None
        elif now >= self.kill_at:
            self.kill_overdue()
            self.kill_at = None

    def kill_overdue(self) -> None:
        """Kill the process group, whose time is up."""
        self.overdue = self.overdue or (self.running and not self.killed_by_us)
        self.signal_group(signal.SIGKILL)

    def group_lives(self) -> bool:
        """Tell whether any process of the group exists.

        Poll this once the worker has ended: the system reserves the group's number as long as any process is in it, and
        may then give it to an unrelated one. So a group that was empty once is gone for good.
        """
        if self._group_lives and not self.running:
            self._group_lives = group_exists(self.pid)
        return self._group_lives

    def close_stdin(self) -> None:
        if self.stdin is not None:
            self.stdin.close()
            self.stdin = None

    def close(self) -> None:
        """Close all open files."""
        self.close_stdin()
        for pipe in self.streams.values():
            pipe.close()
        self.streams.clear()
        if self.result is not None:
            self.result.close()
            self.result = None


def group_exists(number: int) -> bool:
    """Tell whether any process is in the process group of this number."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _die_with_agent() -> None:
    reaper.die_with_parent(signal.SIGKILL)
