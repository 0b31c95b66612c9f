"""Workers that need not import anything: forks of one process that has imported numpy, torch and hvdgloo already.

To import torch takes more processor time than all that most tests of collectives do. What starts here is a process of
its own, in a session of its own, with the arguments, environment, working directory, descriptors 0 to 2 and namespaces
that it was asked to have, and it ends as an interpreter does. What is *not* as in a fresh interpreter: everything is
imported already, ``OMP_NUM_THREADS`` is applied by torch.set_num_threads, /proc shows the server's command line, and
its parent is not who asked for it. So nothing here is of use where start-up, sessions, orphans, or signals from outside
are tested.

    Process(["-c", code], env=..., stdout=file, ...)       # instead of subprocess.Popen([sys.executable, "-c", code])
    python()                                               # a command that stands in for sys.executable
    python("hvdgloo.tensorflow")                           # one that has imported this instead of torch
    python(*NUMPY)                                         # one for workers of one host that use numpy only
    launcher()                                             # a command that stands in for ``hvdgloo-run``
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import json
import marshal
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

_SERVER = Path(__file__).with_name("server.py")
_CLIENT = Path(__file__).with_name("client.py")
_CHECKOUT = Path(__file__).parents[3]
TORCH = ("torch.distributed", "hvdgloo._backends.gloo", "hvdgloo.torch", "torch._dynamo")
"""Imports of a worker that uses torch. Its first optimizer would import the last one, in two seconds."""

TENSORFLOW = ("hvdgloo.tensorflow",)
"""Imports of a worker that uses TensorFlow, with Keras on it."""


NUMPY = ("hvdgloo.elastic",)
"""Imports of a worker that uses numpy on one host. A fork of this small process takes half the time of one with torch;
but if hosts exchange data, each would have to import torch for its Gloo."""

LAUNCHER = (
    "hvdgloo._commands",
    "hvdgloo.runner.cli.main",
    "hvdgloo.runner.launch",
    "hvdgloo.runner.elastic_launch",
    "hvdgloo.runner.agent.agent",
    # A job whose workers call init() needs its server.
    "hvdgloo.rendezvous._server.http_front",
    "hvdgloo._observe.jobs",
    "hvdgloo._observe.page.page",
    "hvdgloo.rendezvous._page_server.server",
    "hvdgloo.rendezvous._server.routes",
    "encodings.idna",
)
"""Imports of a launcher, and of the agent that it forks. It has no numpy."""

_WORKER = (
    "numpy.random",
    "hvdgloo._job.join",
    "hvdgloo.numpy",
    # What init() imports.
    "hvdgloo._backends.shm.backend",
    "hvdgloo._engine.coordinator",
    "hvdgloo._observe.lateness",
    "encodings.idna",
)
"""Imports of all others."""

_ROOM = 32 * 1024
"""Bytes in which /proc shows the environments of programs, beside the server's own."""


def _usual() -> tuple[str, ...]:
    if not importlib.util.find_spec("torch"):
        return ()
    return (*TORCH, "sklearn.datasets") if importlib.util.find_spec("sklearn") else TORCH  # the examples read digits


_NAMESPACES = ("mnt", "uts", "ipc", "net", "pid")


@cache
def _folder(*modules: str, **environ: str) -> Path:
    """The running server's folder, with its socket and the stand-in; both end with the last process that uses them.

    The processes of one pytest -n share it.
    """
    what = json.dumps([sys.executable, modules, sorted(environ.items())])
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    path = Path(tempfile.gettempdir()) / f"warm-{run}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    with _locked(path):
        try:
            # The server ends when no process has this open any more.
            used = os.open(path / "users", os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            used, server = _start(path, modules if modules == LAUNCHER else (*_WORKER, *(modules or _usual())), environ)
            atexit.register(server.wait)
        atexit.register(os.close, used)  # what is registered last is called first
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have a folder that is there, whose server is neither about to come nor about to go."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            folder = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(folder), path.stat()):  # its server may have gone with the folder
                    yield
                    return
            finally:
                os.close(folder)


def _start(path: Path, modules: Sequence[str], environ: Mapping[str, str]) -> tuple[int, subprocess.Popen[bytes]]:
    """The server, and the descriptor that keeps it from ending."""
    os.mkfifo(path / "users")
    users = os.open(path / "users", os.O_RDONLY | os.O_NONBLOCK)
    used = os.open(path / "users", os.O_WRONLY)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HVDGLOO_", "HOROVOD_"))}
    server = subprocess.Popen(
        [sys.executable, str(_SERVER), str(path), *modules],
        stdin=users,
        cwd="/",
        env={**environment, "PYTHONPATH": str(_CHECKOUT), "OMP_NUM_THREADS": "1", "ROOM": " " * _ROOM, **environ},
        start_new_session=True,
    )
    os.close(users)
    stand_in = path / "python"
    header = f"#!{sys.executable} -IS\nPYTHON, SOCKET = {sys.executable!r}, {str(path / 'socket')!r}\n"
    stand_in.write_text(header + _CLIENT.read_text(encoding="utf-8"))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    deadline = time.monotonic() + 60
    while not (path / "socket").exists():
        assert server.poll() is None, "the server of warm interpreters has failed; what it wrote is above"
        assert time.monotonic() < deadline, "the server of warm interpreters did not come up within 60 s"
        time.sleep(0.01)
    return used, server


def python(*modules: str, **environ: str) -> str:
    """The path of a program that stands in for ``sys.executable``, on every host of a bed too.

    Args:
        modules: what it has imported beside numpy; torch, if nothing is given. It must not start threads.
        environ: variables that are set while it imports.

    It understands ``-u``, ``-c``, ``-m`` and a script, and passes SIGINT, SIGTERM and the like on.
    """
    return str(_folder(*modules, **environ) / "python")


def launcher() -> list[str]:
    """``hvdgloo-run``, as the beginning of a command: for launches that are only waited for."""
    return [python(*LAUNCHER), "-m", "hvdgloo.runner"]


class Process:
    """A program in a warm interpreter, with what ``subprocess.Popen`` has that tests use.

    Args:
        arguments: what follows ``python`` on a command line.
        env: the whole environment.
        modules: as for ``python``.
        stdin, stdout, stderr: descriptors; the caller closes them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        cwd: Path | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(30)
        self._connection.connect(str(_folder(*modules) / "socket"))
        with ExitStack() as opened:
            fds = [stdin, stdout, stderr]
            for path in (str(cwd or "."), *(f"/proc/self/ns/{name}" for name in _NAMESPACES)):
                fds.append(os.open(path, os.O_RDONLY))
                opened.callback(os.close, fds[-1])
            data = marshal.dumps({"arguments": self.args, "environ": dict(env)})
            data = len(data).to_bytes(8, "big") + data
            sent = socket.send_fds(self._connection, [data], fds)
            self._connection.sendall(data[sent:])
            self.pid = int.from_bytes(self._connection.recv(4, socket.MSG_WAITALL), "big")
        assert self.pid, "no process came of it; what the server of warm interpreters wrote is above"

    def poll(self) -> int | None:
        """Its status, as subprocess has it, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, at most ``timeout`` seconds.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                code = self._connection.recv(4)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            assert code, f"who stood between process {self.pid} and this one is gone"
            self.returncode = int.from_bytes(code, "big", signed=True)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to itself, and not to its group."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
