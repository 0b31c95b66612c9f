"""The process that has imported everything, and becomes workers by forking: ``python server.py FOLDER MODULES...``.

What it forks is the program itself. It passes signals on, kills a program when its requester goes, and says how it
ended. Only what wants other namespaces has one more process between, which enters them: to fork is what costs most,
since torch has so many pages.
It ends, and the folder goes, when its standard input does, that is: when all processes of tests that used it have
ended. See the package for the rest.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import importlib.util
import io
import marshal
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LENGTH = 8
"""Bytes of the number of bytes of a request."""

FDS = 9
"""Standard input, output and error, the working directory, and five namespaces. What else is inherited follows."""

MOST_FDS = 64
"""That come with one request."""

NAMESPACES = {os.stat(f"/proc/self/ns/{name}").st_ino for name in ("mnt", "uts", "ipc", "net", "pid")}
"""This process's own."""


def main() -> None:
    folder = sys.argv[1]
    preload(sys.argv[2:])
    gc.freeze()  # or the first collection in each fork would copy all pages
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/coming")
    listener.listen(64)
    os.rename(f"{folder}/coming", f"{folder}/socket")
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, lambda: Requester(listener.accept()[0], selector))
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    lock = os.open(folder, os.O_RDONLY)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    # Otherwise another user came while this waited for the lock.
                    if select.select([sys.stdin], [], [], 0)[0]:
                        shutil.rmtree(folder)
                        return
                    os.close(lock)
                elif selector.get_map().get(key.fd) is key:  # else what came before has closed it
                    try:
                        key.data()
                    except OSError as error:  # one requester's matter, and no other's
                        os.write(2, f"warm server: {error!r}\n".encode())


def preload(modules: list[str]) -> None:
    """Import them. What a package does at its import may depend on nothing that a test sets."""
    for name in modules:
        importlib.import_module(name)
    # At an interpreter's end torch takes each library of operators down: 30 ms of every program, and no test's matter.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


class Requester:
    """The process that requests a program, until either has ended."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._connection, self._selector = connection, selector
        self._data, self._fds = b"", array.array("i")
        self._child = 0
        selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self) -> None:
        """Take what is there of the request; once it is whole, start the program."""
        try:
            data, ancillary, _, _ = self._connection.recvmsg(1 << 16, socket.CMSG_SPACE(MOST_FDS * self._fds.itemsize))
        except ConnectionResetError:
            data, ancillary = b"", []
        for _, _, content in ancillary:
            self._fds.frombytes(content)
        self._data += data
        length = int.from_bytes(self._data[:LENGTH], "big")
        if data and (len(self._data) < LENGTH or len(self._data) < LENGTH + length):
            return
        self._selector.unregister(self._connection)
        try:
            if data:
                self._start(marshal.loads(self._data[LENGTH:]), list(self._fds))
            else:
                self._connection.close()
        except OSError:
            self._connection.close()  # or the requester would wait for ever
            raise
        finally:
            for fd in self._fds:
                os.close(fd)

    def _start(self, request: dict[str, Any], fds: list[int]) -> None:
        elsewhere = any(os.stat(fd).st_ino not in NAMESPACES for fd in fds[4:FDS])
        self._child = os.fork() if elsewhere else fork()
        if self._child == 0:
            in_child(lambda: self._become(request, fds, elsewhere))
        ended = os.pidfd_open(self._child)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._ended(ended))
        if elsewhere:
            self._connection.close()
        else:
            tell(self._connection, self._child)
            self._selector.register(self._connection, selectors.EVENT_READ, self._hear)

    def _become(self, request: dict[str, Any], fds: list[int], elsewhere: bool) -> None:
        """Keep nothing of the server's, and turn into the program, or into who stands between."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fileobj is not sys.stdin:
                os.close(key.fd)
        self._selector.close()
        if elsewhere:
            stand_between(self._connection, request, fds)
        self._connection.close()
        be(request, fds)

    def _hear(self) -> None:
        if not pass_on(self._connection, self._child):
            self._selector.unregister(self._connection)
            self._connection.close()

    def _ended(self, ended: int) -> None:
        """Collect the child, so that its processor time counts as this process's, and say how it ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._selector.unregister(ended)
        os.close(ended)
        if self._connection.fileno() != -1:
            self._selector.unregister(self._connection)
            tell(self._connection, code)
            self._connection.close()


def fork() -> int:
    """Fork; the child is not made known before it leads a session of its own."""
    session, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(begun)
    else:
        os.close(begun)
        os.read(session, 1)
    os.close(session)
    return child


def in_child(body: Callable[[], None]) -> NoReturn:
    """A forked process must not go on with its parent's code, whatever happens."""
    try:
        body()
    except BaseException as error:
        os.write(2, f"warm server: {error!r}\n".encode())
    finally:
        os._exit(1)


def tell(connection: socket.socket, number: int) -> None:
    """Send the program's process id, or how it ended; that the requester has gone is heard elsewhere."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(number.to_bytes(4, "big", signed=True))


def pass_on(connection: socket.socket, child: int) -> bool:
    """Pass on the signal that the requester has sent, and if it has gone, SIGKILL; whether it is still there."""
    try:
        wanted = connection.recv(1)
    except ConnectionResetError:
        wanted = b""
    with suppress(ProcessLookupError, PermissionError):  # it may lead no group any more
        os.killpg(child, wanted[0] if wanted else signal.SIGKILL)
    return bool(wanted)


def stand_between(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Fork the program in its requester's namespaces, and serve the requester until one of both has ended."""
    for fd in fds[4:FDS]:
        if os.stat(fd).st_ino not in NAMESPACES and LIBC.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    child = fork()
    if child == 0:
        connection.close()
        be(request, fds)
    for fd in fds:
        os.close(fd)
    tell(connection, child)
    ended = os.pidfd_open(child)
    while ended not in select.select([connection, ended], [], [])[0]:
        if not pass_on(connection, child):
            os._exit(0)
    tell(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def be(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Turn into the program."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.fchdir(fds[3])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    # None may be where another belongs.
    inherited = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds[FDS:]]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(request.get("inherited", ()), inherited, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    show_environment(request["environ"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    arguments = list(request["arguments"])
    unbuffered = arguments[:1] == ["-u"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    arguments = arguments[1:] if arguments[:1] == ["-u"] else arguments
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _stream(1, unbuffered, "strict")
    sys.stderr = _stream(2, True, "backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "torch" in sys.modules:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        sys.modules["torch"].set_num_threads(int(threads) if threads.isdecimal() else os.cpu_count() or 1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    status = _status_of(arguments)
    # What an interpreter does at its end, but for one thing: to take all modules down costs more than most programs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def show_environment(environ: dict[str, str]) -> None:
    """Let /proc show it, as far as there is room: by what is written there, processes of a job or a test are found.

    The system shows the memory in which this process's first environment was. Nothing else is there any more.
    """
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    room = end - start
    whole = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in environ.items())
    ctypes.memmove(start, whole[: whole.rfind(b"\0", 0, room) + 1].ljust(room, b"\0"), room)


def _status_of(arguments: list[str]) -> int:
    """Run the program; its status."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        with open(arguments[0], "rb") as file:
            text = file.read()
        module = types.ModuleType("__main__")
        module.__file__ = os.path.abspath(arguments[0])
        sys.modules["__main__"] = module
        exec(compile(text, arguments[0], "exec"), module.__dict__)


def _stream(fd: int, at_once: bool, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    buffer = raw if at_once else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, errors=errors, write_through=at_once, line_buffering=os.isatty(fd))


if __name__ == "__main__":
    main()
