"""The side of a process that another system has started: it brings an agent with ``bring_agent``.

The agent is a child of this process, in a session of its own. No code of the user's runs in this process itself: it may
have run other tasks before, and may run others afterwards.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

from hvdgloo._net.handshake import Link
from hvdgloo.config import without_place
from hvdgloo.errors import AuthenticationError, LaunchError
from hvdgloo.rendezvous._host_identity import host_identity, host_name
from hvdgloo.runner.inbound.hello import Bootstrap, TaskHello, introduce
from hvdgloo.runner.job.command import THREAD_VARIABLES
from hvdgloo.runner.job.spec import PROGRAM_S_TIMEOUT
from hvdgloo.runner.worker import function_task
from hvdgloo.version import __version__

_HANDSHAKE = 10.0
"""Seconds for a handshake, which takes two round trips."""

_STAGGER = 0.2
"""Seconds after which another address is tried, too."""

_PAUSE = 0.3
"""Seconds until the next attempt where the listener is overrun."""

P = ParamSpec("P")

_OVERRUN = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


@dataclass(frozen=True)
class Invitation:
    """Everything that a task needs to bring an agent. It can be pickled; a process that can read it can join the job.

    Attributes:
        endpoints: addresses and ports at which the launcher listens, best first.
        secret: of the job.
    """

    endpoints: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)


def start_agent(
    invitation: Invitation,
    index: int,
    *,
    name: str = "",
    host: str | None = None,
    machine: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    path: Sequence[str] | None = None,
    executable: str | None = None,
    attempt: int = 0,
    connect_timeout: float = 30.0,
) -> BroughtAgent:
    """Connect to the launcher, and start an agent once the launcher has let this task in.

    The thread that calls this must live as long as the agent: on Linux, the agent ends with that thread.

    Args:
        index: which of the job's tasks this is.
        name: shown with the host in messages: ``executor 3``.
        host: name of this machine; by default its own.
        machine: equal for tasks whose workers are to form one host of the job, with shared memory; by default tasks of
            one machine that are in the same container.
        cwd: working directory of the workers; by default this process's.
        env: variables for the workers, in addition to this process's own. They hold, whatever the launcher gives.
        path: where workers look for modules; by default where this process does.
        executable: the Python interpreter of the workers; by default this process's.
        attempt: how often this task was tried before, for messages.
        connect_timeout: seconds for reaching the launcher. If its machine accepts the connection, the launcher has a
            minute more to answer: one long call of the user's program may hold its interpreter.

    Raises:
        LaunchError: the launcher cannot be reached, does not know the secret, or refuses this task; the text says why.
    """
    own = {} if env is None else dict(env)
    environ = {**without_place(os.environ), **own}
    search_path = _search_path(sys.path if path is None else path)
    hello = TaskHello(
        index,
        __version__,
        function_task.python_version(),
        host=host_name(host),
        name=name,
        machine=machine or f"{host_identity()} {os.environ.get('CONTAINER_ID', '')}",
        cwd=cwd or os.getcwd(),
        command=function_task.command(executable or sys.executable),
        path=search_path,
        kept=frozenset(own),
        limits=frozenset(name for name in THREAD_VARIABLES if name in environ),
        pid=os.getpid(),
        attempt=attempt,
    )
    link = _connect(invitation, hello, time.monotonic() + connect_timeout)
    with link.sock:  # then only the agent has the connection, so that its end is the stream's
        link.sock.settimeout(None)
        return _start(link, invitation.secret, {**environ, "PYTHONPATH": search_path})


def _search_path(path: Sequence[str]) -> str:
    """Return the part of ``sys.path`` that workers would lack; its "" means this process's directory."""
    return os.pathsep.join(os.path.abspath(entry) for entry in function_task.beyond_installation(path))


def _start(link: Link, secret: bytes, environ: Mapping[str, str]) -> BroughtAgent:
    macs = (link.sending.state, link.receiving.state)
    bootstrap = Bootstrap(secret, *macs, link.sock.fileno(), os.getpid(), environ)
    # In "/" and without the task's path: the agent must not import a json.py from there.
    bare = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return BroughtAgent(function_task.command(sys.executable, "hvdgloo.runner.inbound.agent"), bare, bootstrap)


def _and_wait(start: Callable[P, BroughtAgent]) -> Callable[P, int]:
    def bring(*args: P.args, **kwargs: P.kwargs) -> int:
        with start(*args, **kwargs) as agent:
            return agent.wait()

    return bring


bring_agent = _and_wait(start_agent)
"""As ``start_agent``, and then wait for the agent's end. Returns its exit status: 0 unless it was killed."""


class BroughtAgent:
    """An agent as a child process. A context manager: the agent ends when it is left, and so do its workers.

    Raises:
        LaunchError: at construction, if it cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], bootstrap: Bootstrap) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                env=environ,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                pass_fds=(bootstrap.socket,),
            )
        except OSError as error:
            raise LaunchError(f"no agent could be started with {sys.executable}: {error}") from error
        assert self._process.stdin is not None
        self._lifeline = self._process.stdin
        try:
            left = memoryview(bootstrap.encode())
            while left:  # a pipe whose reader goes meanwhile has taken a part of it
                left = left[self._lifeline.write(left) :]
        except OSError as error:
            self._lifeline.close()
            status = self._process.wait()
            raise LaunchError(
                f"the agent that was started with {sys.executable} ended at once, with status {status}"
            ) from error

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """Have it end its workers, and itself. Returns at once."""
        self._lifeline.close()

    def __enter__(self) -> BroughtAgent:
        return self

    def __exit__(self, *_: object) -> None:
        # Also where this thread is interrupted.
        self.terminate()
        self._process.wait()


# Reaching the launcher.


def _connect(invitation: Invitation, hello: TaskHello, deadline: float) -> Link:
    """Connect to the launcher, and have it accept this task.

    Raises:
        LaunchError: none of its addresses leads to it, or it refuses this task.
    """
    last = deadline + PROGRAM_S_TIMEOUT
    while True:
        reasons: dict[tuple[str, int], str] = {}
        overrun = held = False
        now = time.monotonic()
        for endpoint, sock in _connections(invitation.endpoints, max(deadline, min(last, now + _HANDSHAKE)), reasons):
            try:
                link, reply = introduce(invitation.secret, sock, hello, min(last, time.monotonic() + _HANDSHAKE))
            except (OSError, EOFError, ValueError, AuthenticationError) as error:
                sock.close()
                reasons[endpoint] = str(error) or type(error).__name__
                # Where too many connect at once, those that it has not heard yet are sent away, or wait for too long.
                overrun |= isinstance(error, EOFError) or getattr(error, "errno", None) in _OVERRUN
                held |= isinstance(error, TimeoutError)
                continue
            if reply.refused:
                sock.close()
                raise LaunchError(reply.refused)
            return link
        if time.monotonic() + _PAUSE >= (last if held else deadline if overrun else 0.0):
            tried = "; ".join(f"{host} port {port}: {reason}" for (host, port), reason in reasons.items())
            raise LaunchError(
                f"the launcher cannot be reached from {hello.host} ({tried}). Does its machine accept connections "
                "from here (firewall, network of the container), and does the job still run?"
            )
        time.sleep(_PAUSE)


def _connections(
    endpoints: Sequence[tuple[str, int]], deadline: float, reasons: dict[tuple[str, int], str]
) -> Iterator[tuple[tuple[str, int], socket.socket]]:
    """Connected, blocking sockets, in the order in which connections come about; several addresses are tried at a time.

    Args:
        reasons: receives why an endpoint is not among them.
    """
    waiting = list(endpoints)
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                now = time.monotonic()
                if now >= deadline:
                    return
                if waiting:
                    _begin(waiting.pop(0), selector, reasons)
                if not selector.get_map():
                    continue
                for key, _ in selector.select(min(_STAGGER if waiting else deadline - now, deadline - now)):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    selector.unregister(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code:
                        sock.close()
                        reasons[key.data] = os.strerror(code)
                        continue
                    sock.setblocking(True)
                    yield key.data, sock
        finally:
            for key in list(selector.get_map().values()):
                reasons.setdefault(key.data, "timed out")
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()


def _begin(endpoint: tuple[str, int], selector: selectors.BaseSelector, reasons: dict[tuple[str, int], str]) -> None:
    """Have a connection come about."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        reasons[endpoint] = error.strerror or str(error)
        return
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        reasons[endpoint] = os.strerror(code)
        return
    selector.register(sock, selectors.EVENT_WRITE, endpoint)
