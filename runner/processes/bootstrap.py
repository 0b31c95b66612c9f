"""What the transports to other hosts have in common: the agent's command line there, and the command that leads to it.

The command line holds nothing that is secret or large: the job's secret and the environment travel inside the stream.
It runs ``python -c`` with a few lines that work with any version of hvdgloo, so that a missing or different version is
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
from hvdgloo.runner.processes.worker import group_exists
from hvdgloo.runner.protocol.channel import Channel
from hvdgloo.runner.protocol.frames import PREAMBLE
from hvdgloo.version import __version__

REQUIRED = ("cheroot", "cloudpickle", "flask", "msgspec", "numpy", "prometheus_client", "psutil", "yaml")
"""What hvdgloo itself imports and what is installed with it: looked for on every host, by its agent and by ``doctor``.

Where something is missing, each worker would fail with a traceback of its own.
"""

# In "/" and not in the user's folder: the agent must not import a json.py from there. The preamble goes first, so that
# a slow file system shows as a slow Python. No single quote, backslash, "!" or newline: a shell reads this.
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
    """The agent's command line on another host."""
    return (python, "-c", _BOOTSTRAP, __version__, *checkout())


def checkout() -> tuple[str, ...]:
    """The folder that hvdgloo is imported from, if it was not installed: a shared file system may have it too."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(hvdgloo.__file__)))
    return () if os.path.basename(root) in ("site-packages", "dist-packages") else (root,)


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a local agent: the launcher's, modified so that hvdgloo can be imported in it.

    Where hvdgloo is installed nothing needs to be added; a checkout that is just in the current folder, or was put on
    ``sys.path`` by the caller, is named in PYTHONPATH.
    """
    root = checkout()
    if not root:
        return dict(environ)
    paths = [path for path in (environ.get("PYTHONPATH", ""), *root) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


class PipedProcess(subprocess.Popen[bytes]):
    """A command in its own session, whose standard streams are pipes to the launcher.

    Without a terminal it cannot ask for passwords, and a terminal's Ctrl-C and Ctrl-Z do not reach it: they concern the
    launcher, which passes them on.

    Args:
        instead: what the child calls instead of executing the command; it does not return.
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
        """Start it.

        Raises:
            OSError: the program or folder does not exist, or the program cannot be executed.
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

    def channel(self) -> Channel:
        """Frames over these streams, which a login shell's greeting may precede."""
        return Channel(self.stdout.fileno(), self.stdin.fileno(), preamble=PREAMBLE)


class CommandStream(PipedProcess):
    """A command that leads to an agent, with everything that it starts."""

    def __init__(self, argv: Sequence[str], *, environ: Mapping[str, str] | None = None) -> None:
        """Start it.

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
        # Once the command has been reaped and nothing that it started is left, its number may be another process's.
        if self._group_lives and self.returncode is not None:
            self._group_lives = group_exists(self.pid)
