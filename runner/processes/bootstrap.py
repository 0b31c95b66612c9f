"""The agent's command line on another host, and the command that connects to it: the common part of all transports.

The command line contains nothing secret or large: the job's secret and the environment travel inside the stream. It
runs ``python -c`` with a few lines that work with any version of hvdgloo, so that a missing or different version is
reported in one line instead of a traceback.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

import hvdgloo
from hvdgloo.errors import LaunchError
from hvdgloo.runner.processes.worker_process import group_exists
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import PREAMBLE
from hvdgloo.version import __version__

REQUIRED = ("cheroot", "cloudpickle", "flask", "msgspec", "numpy", "prometheus_client", "psutil", "yaml")
"""Packages that hvdgloo itself imports and that are installed with it; the agent and ``doctor`` look for them on every
host.

Without this check, each worker would fail with a traceback of its own if one is missing.
"""

# Run in "/" and not in the user's directory: the agent must not import a json.py from there. The preamble comes first,
# so that a slow file system shows as a slow Python. No single quote, backslash, "!" or newline: a shell reads this.
_BOOTSTRAP = (
    "import os, sys; "
    'os.chdir("/"); '
    'here = [p for p in sys.argv[2:] if os.path.isdir(os.path.join(p, "hvdgloo"))]; '
    "sys.path[:] = here + [p for p in sys.path if p]; "
    f'os.write(1, bytes.fromhex("{PREAMBLE.hex()}")); '
    "from importlib.util import find_spec as find; "
    'find("hvdgloo") or sys.exit("hvdgloo agent: No module named hvdgloo"); '
    "from hvdgloo.version import __version__ as found; "
    'found == sys.argv[1] or sys.exit("hvdgloo agent: version " + found + " is installed here"); '
    f'[find(n) or sys.exit("hvdgloo agent: No module named " + n) for n in "{" ".join(REQUIRED)}".split()]; '
    "from hvdgloo.runner.agent import agent; "
    'os._exit(agent.main(b""))'
)


def agent_argv(python: str) -> tuple[str, ...]:
    """Return the agent's command line on another host."""
    return (python, "-c", _BOOTSTRAP, __version__, *checkout())


def checkout() -> tuple[str, ...]:
    """Return the directory that hvdgloo is imported from, if it was not installed: a shared file system may have it
    too."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(hvdgloo.__file__)))
    return () if os.path.basename(root) in ("site-packages", "dist-packages") else (root,)


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a local agent: the launcher's, modified so that hvdgloo can be imported in it.

    An installed hvdgloo needs no change; a checkout in the current directory, or one that the caller put on
    ``sys.path``, is added to PYTHONPATH.
    """
    root = checkout()
    if not root:
        return dict(environ)
    paths = [path for path in (environ.get("PYTHONPATH", ""), *root) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


class PipedProcess(subprocess.Popen[bytes]):
    """A command in its own session, whose standard streams are pipes to the launcher.

    Without a terminal, it cannot ask for passwords, and a terminal's Ctrl-C and Ctrl-Z do not reach it: they concern
    the launcher, which passes them on.

    Args:
        instead: called in the child instead of executing the command; it does not return.
    """

    # Popen's own annotations allow for absent streams.
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: str | None = None,
        instead: Callable[[], NoReturn] | None = None,
    ) -> None:
        """Start the command.

        Raises:
            OSError: the program or directory does not exist, or the program cannot be executed.
        """
        pipe = subprocess.PIPE
        super().__init__(
            argv,
            env=environ,
            cwd=cwd,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
            preexec_fn=instead,
        )

    def starved(self) -> bool:
        return False  # its agent is on another host, as far as is known here

    def channel(self) -> FrameChannel:
        """Return a channel over these streams; a login shell's greeting may precede its frames."""
        return FrameChannel(self.stdout.fileno(), self.stdin.fileno(), preamble=PREAMBLE)


class CommandStream(PipedProcess):
    """A command that connects to an agent, together with everything that it starts."""

    def __init__(self, argv: Sequence[str], *, environ: Mapping[str, str] | None = None) -> None:
        """Start the command.

        Raises:
            LaunchError: there is no such program, or it cannot be executed.
        """
        try:
            super().__init__(argv, environ=environ)
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be executed on this machine: {error.strerror}") from error
        self._group_lives = True

    def poll(self) -> int | None:
        status = super().poll()
        self._look()
        return status

    def wait(self, timeout: float | None = None) -> int:
        status = super().wait(timeout)
        self._look()
        return status

    def kill(self) -> None:
        self._look()
        if not self._group_lives:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def _look(self) -> None:
        # Once the command has been reaped and its group is empty, its number may belong to another process.
        if self._group_lives and self.returncode is not None:
            self._group_lives = group_exists(self.pid)
