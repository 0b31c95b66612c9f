"""The process in which pygloo runs, beside the worker whose collectives it carries out one after another.

pygloo holds the interpreter's lock until a collective has ended, for as long as some rank is late: in the worker itself
no thread would go on meanwhile. The worker starts this file as a program (``backends/pygloo.py``), so that nothing is
inherited but three descriptors:

* standard input, on which nothing ever arrives. It ends when the worker does, and then the kernel ends this process by
  SIGIO, even in the middle of a collective, while no Python code can run. (PDEATHSIG would fire as soon as the thread
  that started this process ends.)
* a socket of messages: first what ``Order`` says, then a ``Command`` for each collective, each with one answer. While
  it connects, this process asks the worker for what is in the rendezvous store.
* memory that both have mapped, where the tensors' bytes are.

Only the standard library and pygloo are imported here.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
from dataclasses import asdict, astuple, dataclass
from typing import Any

MOST_BYTES = 1 << 20
"""Of a message."""

_COMMAND = struct.Struct("=BBBIQQQ")
_OUR_ADDRESS = object.__basicsize__
_GLOO_TIMEOUT, _NO_TIMEOUT = 30_000, 10**12  # milliseconds


class Verb(enum.IntEnum):
    """A collective, or half of one."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    SEND = 3
    RECEIVE = 4


class Type(enum.IntEnum):
    """An element type that pygloo can compute with."""

    Uint8 = 0
    Int8 = 1
    Int32 = 2
    Int64 = 3
    Float16 = 4
    Float32 = 5
    Float64 = 6


class Op(enum.IntEnum):
    """The ways to combine elements, by pygloo's names."""

    SUM = 0
    MIN = 1
    MAX = 2
    PRODUCT = 3


class Tell(enum.IntEnum):
    """The first byte of what this process says to the worker; after FAILED and PUBLISH comes a text or value."""

    DONE = 0
    FAILED = 1
    PUBLISH = 2
    ASK = 3


@dataclass(frozen=True)
class Order:
    """The first message of the worker.

    Attributes:
        path: where modules are found, as in the worker.
        rank, size: within the group.
        address: of this host, on which Gloo listens.
        nbytes: of the shared memory.
    """

    path: list[str]
    rank: int
    size: int
    address: str
    nbytes: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Command:
    """One collective.

    Attributes:
        peer: the rank that a broadcast comes from, or that something is sent to or received from.
        source, target: offsets in the shared memory.
        count: of elements.
    """

    verb: Verb
    type: Type = Type.Uint8
    op: Op = Op.SUM
    peer: int = 0
    source: int = 0
    target: int = 0
    count: int = 0

    def encode(self) -> bytes:
        return _COMMAND.pack(*astuple(self))

    @classmethod
    def decode(cls, message: bytes) -> Command:
        verb, kind, op, *rest = _COMMAND.unpack(message)
        return cls(Verb(verb), Type(kind), Op(op), *rest)


class _Store:
    """The rendezvous store as pygloo sees it, made of the worker's answers.

    ``<rank>`` says where a rank listens. ``rank_<rank>`` is its host's name, for an optimisation that does not exist
    over TCP: it is not worth a request, so all ranks appear to be on one host.
    """

    def __init__(self, channel: socket.socket, rank: int, size: int) -> None:
        self._channel, self._rank, self._size = channel, rank, size
        self._host = b""
        self._addresses: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:
        if key == str(self._rank):
            self._channel.send(bytes([Tell.PUBLISH]) + value)
        else:
            self._host = value

    def wait(self, keys: list[str]) -> None:
        """Nothing: ``get`` waits."""

    def get(self, key: str) -> bytes:
        if not key.isdigit():
            return self._host
        if not self._addresses:
            self._channel.send(bytes([Tell.ASK]))
            self._addresses = [self._channel.recv(MOST_BYTES) for _ in range(self._size)]
        return self._addresses[int(key)]


def _connect(pygloo: Any, channel: socket.socket, order: Order) -> Any:
    """Connect with all other ranks; how long that may take is up to the worker."""
    context = pygloo.rendezvous.Context(order.rank, order.size)
    _lift_timeout(pygloo, context)
    device = pygloo.transport.tcp.CreateDevice(pygloo.transport.tcp.attr(order.address))
    store = pygloo.rendezvous.CustomStore(_Store(channel, order.rank, order.size))
    context.connectFullMesh(store, device)
    return context, store, device


def _lift_timeout(pygloo: Any, context: Any) -> None:
    """Remove the time limit of collectives: the engine decides when a rank is lost.

    pygloo's own ``setTimeout`` cannot be called from Python, since it lacks a conversion for its argument's type. So
    the function that it wraps is called: in a pybind11 object, the pointer to the wrapped object follows the header.
    """
    library = ctypes.PyDLL(pygloo.__file__)
    this = ctypes.c_void_p.from_address(id(context) + _OUR_ADDRESS)
    try:
        read = library["_ZNK4gloo7Context10getTimeoutEv"]
        write = library["_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"]
    except AttributeError:
        raise RuntimeError("this version of pygloo is unknown; use 0.2.1") from None
    read.restype, read.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    write.restype, write.argtypes = None, [ctypes.c_void_p, ctypes.c_int64]
    if read(this) != _GLOO_TIMEOUT:
        raise RuntimeError("this version of pygloo is unknown; use 0.2.1")
    write(this, _NO_TIMEOUT)


def _perform(pygloo: Any, context: Any, base: int, command: Command) -> None:
    kind = getattr(pygloo.glooDataType_t, f"gloo{command.type.name}")
    source, target, count = base + command.source, base + command.target, command.count
    if command.verb is Verb.ALLREDUCE:
        op = getattr(pygloo.ReduceOp, command.op.name)
        pygloo.allreduce(context, source, target, count, kind, op, pygloo.allreduceAlgorithm.RING)
    elif command.verb is Verb.ALLGATHER:
        pygloo.allgather(context, source, target, count, kind)
    elif command.verb is Verb.BROADCAST:
        pygloo.broadcast(context, source, target, count, kind, command.peer)
    elif command.verb is Verb.SEND:
        pygloo.send(context, source, count, kind, command.peer)
    else:
        pygloo.recv(context, target, count, kind, command.peer)


def _serve(pygloo: Any, context: Any, base: int, channel: socket.socket) -> None:
    """Carry out commands. After one has failed, all others fail: connections are broken, and ranks out of step."""
    answer = bytes([Tell.DONE])
    while message := channel.recv(MOST_BYTES):
        if answer[0] == Tell.DONE:
            try:
                _perform(pygloo, context, base, Command.decode(message))
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker raises it
                answer = _failure(error)
        channel.send(answer)


def _failure(error: BaseException) -> bytes:
    return bytes([Tell.FAILED]) + (str(error) or type(error).__name__).encode()[: MOST_BYTES // 2]


def _end_with_worker() -> None:
    """End when standard input does, and not by signals meant for the worker, which may have something to finish."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:
        os._exit(0)  # it had ended before


def main() -> None:
    """Serve the worker whose descriptors are the arguments: the socket's, and the memory's."""
    _end_with_worker()
    channel = socket.socket(fileno=int(sys.argv[1]))
    order = Order(**json.loads(channel.recv(MOST_BYTES)))
    sys.path[:] = order.path
    memory = mmap.mmap(int(sys.argv[2]), order.nbytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        import pygloo

        connection = _connect(pygloo, channel, order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the worker raises it
        channel.send(_failure(error))
    else:
        channel.send(bytes([Tell.DONE]))
        _serve(pygloo, connection[0], base, channel)
    os._exit(0)  # whatever Gloo's destructors would wait for


if __name__ == "__main__":
    main()
