"""The process that has imported everything, and becomes workers by forking: ``python server.py FOLDER MODULES...``.

For each connection it forks twice. The first child enters the requester's namespaces and stands between: it passes
signals on, kills the program when the requester goes, and says how it ended. The second one is the program.
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
import shutil
import signal
import socket
import sys
import threading
import types
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LENGTH = 8
"""Bytes of the number of bytes of a request."""

FDS = 9
"""Standard input, output and error, the working directory, and five namespaces."""


def main() -> None:
    folder = sys.argv[1]
    preload(sys.argv[2:])
    gc.freeze()  # or the first collection in each fork would copy all pages
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/coming")
    listener.listen(64)
    os.rename(f"{folder}/coming", f"{folder}/socket")
    while True:
        ready = select.select([listener, sys.stdin], [], [])[0]
        reap()
        if listener not in ready:
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if select.select([sys.stdin], [], [], 0)[0]:  # else one more has come while this waited for the lock
                shutil.rmtree(folder)
                break
            os.close(lock)
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            request, fds = stand_between(connection)
            be(request, fds)
        connection.close()
    reap()


def reap() -> None:
    """Collect those that stood between and have ended, so that their processor time counts as this process's."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def preload(modules: list[str]) -> None:
    """Import what most workers import. What a package does at its import may depend on nothing that a test sets."""
    for name in ("numpy.random", "hvdgloo._job.join", "hvdgloo.numpy", *modules):
        importlib.import_module(name)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request, and the descriptors that came with it."""
    data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(FDS * array.array("i").itemsize))
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    while len(data) < LENGTH or len(data) < LENGTH + int.from_bytes(data[:LENGTH], "big"):
        more = connection.recv(1 << 16)
        if not more:
            os._exit(1)
        data += more
    request: dict[str, Any] = marshal.loads(data[LENGTH:])
    return request, list(fds)


def stand_between(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork the program, and serve its requester until one of both has ended. Returns in the program only."""
    try:
        request, fds = receive(connection)
        own = {os.stat(f"/proc/self/ns/{name}").st_ino for name in ("mnt", "uts", "ipc", "net", "pid")}
        for fd in fds[4:]:
            if os.stat(fd).st_ino not in own and LIBC.setns(fd, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        os.fchdir(fds[3])
        session, begun = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            for fd in (session, begun):
                os.close(fd)
            connection.close()
            return request, fds
        os.close(begun)
        os.read(session, 1)  # nobody hears of it before it leads a session of its own
        for fd in fds:
            os.close(fd)
        connection.sendall(child.to_bytes(4, "big"))
        ended = os.pidfd_open(child)
        while ended not in (ready := select.select([connection, ended], [], [])[0]):
            assert ready
            wanted = connection.recv(1)
            os.killpg(child, wanted[0] if wanted else signal.SIGKILL)
            if not wanted:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(code.to_bytes(4, "big", signed=True))
    except BrokenPipeError:
        pass
    except BaseException as error:  # a forked process must not go on with its parent's code
        os.write(2, f"warm server: {error!r}\n".encode())
        os._exit(1)
    os._exit(0)


def be(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Turn into the program."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    arguments = list(request["arguments"])
    unbuffered = arguments[:1] == ["-u"]
    arguments = arguments[1:] if unbuffered else arguments
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _stream(1, unbuffered, "strict")
    sys.stderr = _stream(2, True, "backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "torch" in sys.modules:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        sys.modules["torch"].set_num_threads(int(threads) if threads.isdecimal() else os.cpu_count() or 1)
    sys.modules["numpy"].random.seed()
    status = _status_of(arguments)
    # What an interpreter does at its end, but for one thing: to take all modules down costs more than most programs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
