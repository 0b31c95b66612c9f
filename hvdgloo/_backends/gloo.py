"""CPU collectives over Gloo, as torch carries it: ``ProcessGroupGloo`` built directly on the rendezvous store.

The group never becomes torch's default group, so a user's own torch.distributed is untouched. It is bound to an
explicit address, and connects pairs lazily: each rank publishes 170 bytes whatever the job's size, where an eager mesh
publishes a slot for every other rank. A few ranks are all connected with each other. Among many, each has connections
to its neighbours in a cube and in a ring, over which everything goes but an alltoall; the first of those connects the
rest.

Gloo tells only a ring's neighbours of a dead peer, and ``wait`` cannot be interrupted otherwise; so ``abort`` ends the
group's connected sockets by shutdown(2), which makes everything that is under way fail at once. Every Gloo connection
has one end at a listener that some rank has published: that is how its sockets are told from the user's. (A wait that
times out closes all of them, too. But it does so beside Gloo's own thread, and often enough that thread then finds a
connection in a state that must not be, and ends the process: ``Pair::handleEvents``.)

Gloo believes any process that connects to its port first and names a rank. So once the ranks are connected they prove
to each other, over these very connections, that they know the job's secret; and if that fails on some rank, or does not
come to an end, all of them try once more at other ports.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hvdgloo._backends import gpu, kernels
from hvdgloo._backends.base import (
    CANCELLED,
    FEW_RANKS,
    RendezvousStore,
    Work,
    first_line,
    get_all,
    gloo_unconnected,
    peek,
)
from hvdgloo._backends.butterfly import Butterfly, Bytes
from hvdgloo._backends.codec import Codec, Values
from hvdgloo._backends.codec_torch import codec_of
from hvdgloo._backends.cube import Cube
from hvdgloo._backends.narrow import Narrow
from hvdgloo._backends.process_group import ProcessGroupBackend, tensor_of
from hvdgloo._backends.progress_thread import ProgressThread
from hvdgloo._backends.sockets import Connections
from hvdgloo._net.cancelling import LONGEST_TURN, TURN
from hvdgloo._net.descriptors import close_keeping_numbers, reserve_descriptors
from hvdgloo._net.proofs import NONCE_BYTES, PROOF_BYTES, derive, new_nonce, prove, proves
from hvdgloo.errors import AuthenticationError, BackendError, HvdglooError, RendezvousError
from hvdgloo.types import Buffer, ReduceOp, WireFormat

logger = logging.getLogger(__name__)

AT_ONCE_FROM, AT_ONCE_BYTES = 64, 1 << 19
"""Bytes of a tensor, and bytes of all ranks' together, from and up to which few ranks send everything to each other.
On 2 hosts with 2 ranks each, which share 2 cores, an allreduce of 8 KiB takes 1.3 ms so and 5 in a ring. A few bytes
are as fast in Gloo's own way."""

_MET = b"ok"

_SHORTEST_WAIT = 0.001
"""Seconds: torch waits whole milliseconds, and takes none for no deadline at all."""

_GRACE = 1.0
"""Seconds for this rank's own connections to be made after another one has given up. A connection that is ended before
it has told who it is leaves this rank's thread waiting for it."""

_LAST_WAIT = 2.0
"""Seconds for which the interpreter's end waits for groups that are being destroyed, which takes some 0.02 s."""

_LONGEST_OPERATION = timedelta(days=1)
"""Gloo's own timeout is set at construction and knows nothing of a payload's size: the engine's deadlines rule. And if
a connection is made after Gloo has given up waiting for it, Gloo ends the process."""


class GlooStore(dist.Store):  # type: ignore[name-defined,misc] # absent from torch's own annotations
    """A rendezvous store as Gloo sees it.

    Gloo publishes this rank's address when the group is made, and asks for others' one by one when it first connects to
    them. ``fetch`` gets them in one request before that: no wait, and no error, happens inside of Gloo, where neither
    could be given up safely.

    Attributes:
        published: this rank's address, in Gloo's form.
        addresses: of the ranks that were asked for, by Gloo's names.
        nonces: numbers that are used only once, by rank; each is published with an address.
    """

    def __init__(
        self, store: RendezvousStore, prefix: str, rank: int, timeout: float, cancelled: Callable[[], bool] | None
    ) -> None:
        super().__init__()
        self._cancelled = cancelled
        self._store = store
        self._prefix = prefix
        self._timeout = timeout
        self._base = ""
        self.published = b""
        self.addresses: dict[str, bytes] = {}
        self.nonces = {rank: new_nonce()}
        self._nonce = self.nonces[rank]

    def set(self, key: str, value: bytes | str) -> None:
        self._base = key.rpartition("/")[0]  # its keys are "<counter>/<rank>"
        self.published = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._prefix + key, self._nonce + self.published)

    def get(self, key: str) -> bytes:
        return self.addresses[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def fetch(self, ranks: Sequence[int]) -> list[bytes]:
        """Wait until some ranks have published their addresses; returns these.

        Raises:
            RendezvousError: some did not do so in time, or the server cannot be reached.
            BackendError: it was cancelled.
        """
        names = [f"{self._base}/{rank}" for rank in ranks]
        values = get_all(self._store, [self._prefix + name for name in names], self._timeout, self._cancelled)
        for rank, name, value in zip(ranks, names, values, strict=True):
            self.nonces[rank], self.addresses[name] = value[:NONCE_BYTES], value[NONCE_BYTES:]
        return [self.addresses[name] for name in names]


class _GlooWire:
    """Gloo's send and receive, as a ``Wire``. Whatever has begun is known, so that its end can be waited for.

    Args:
        aborted: whether nothing may begin any more.
        abort: to be called again for a connection that was made while it was going on.
    """

    def __init__(self, group: Any, aborted: Callable[[], bool], abort: Callable[[], None]) -> None:
        self._group = group
        self._aborted, self._abort = aborted, abort
        self._under_way: dict[Any, Bytes] = {}

    def send(self, data: Bytes, peer: int) -> Any:
        return self._begin(self._group.send, data, peer)

    def receive(self, data: Bytes, peer: int) -> Any:
        return self._begin(self._group.recv, data, peer)

    def wait(self, begun: Any) -> None:
        begun.wait(_LONGEST_OPERATION)
        del self._under_way[begun]

    def settle(self) -> None:
        """Wait until nothing of what has begun is under way any more; after a failure, that takes an abort."""
        for begun in list(self._under_way):
            try:
                self.wait(begun)
            except RuntimeError as error:
                logger.debug("aborted: %s", error)
                del self._under_way[begun]

    def _begin(self, method: Callable[..., Any], data: Bytes, peer: int) -> Any:
        if self._aborted():
            raise BackendError("the process group was aborted")
        begun = method([torch.from_numpy(data)], peer, 0)
        self._under_way[begun] = data
        if self._aborted():
            self._abort()
        return begun


class _GlooWork:
    """A torch Work, and what must happen after it."""

    def __init__(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> None:
        self._what = what
        self._work = work
        self._keep = keep
        self._finish = finish

    def completes_within(self, timeout: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=max(timeout, _SHORTEST_WAIT)))
        except HvdglooError:
            raise  # a RuntimeError of ours comes from the store, not from the operation
        except RuntimeError:
            # Either the operation failed, or only the wait has ended, and the operation perhaps since.
            if not self._work.is_completed():
                return False
            self._raise_failure()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def _raise_failure(self) -> None:
        """Raise what a completed operation failed with; do nothing if it succeeded."""
        try:
            self._work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise BackendError(f"Gloo {self._what}: {first_line(error)}") from error


def _device(address: str) -> Any:
    """Return the device on which Gloo listens, and from which it connects when two ranks first talk to each other."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
    except TypeError:  # torch before 2.8, where all ranks are connected with each other at once
        return dist.ProcessGroupGloo.create_device(hostname=address)


def _is_used(held: list[Any]) -> bool:
    """Return whether anything else refers to the only item of a list."""
    return sys.getrefcount(held[0]) > 2  # the list's, and the argument's own


class _Ends:
    """Groups that are destroyed on threads of their own, since that may wait for what is still under way in them; and
    errors refer to them, so that the garbage collector would wait, in whatever thread it happens to run.

    A thread that returns from a destructor while the interpreter ends is ended by Python, and that ends the process
    (SIGABRT). So at its end the interpreter waits for groups that are just being destroyed, and no other is.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._are_over = threading.Event()

    def begin(self, held: list[Any], connections: Connections | None) -> None:
        """Destroy a group when nothing refers to it any more; arguments as for ``_destroy``."""
        if self._are_over.is_set():
            _keep(held[0])
            return
        thread = threading.Thread(target=self._run, args=(held, connections), name="hvdgloo-gloo-end", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self, held: list[Any], connections: Connections | None) -> None:
        pause = 0.01
        while _is_used(held) and not self._are_over.wait(pause):
            pause = min(1.0, 2 * pause)
        if self._are_over.is_set():
            _keep(held[0])
        else:
            _destroy(held, connections)
        self._threads.discard(threading.current_thread())

    def end(self) -> None:
        """At the end of the interpreter."""
        self._are_over.set()
        deadline = time.monotonic() + _LAST_WAIT
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))


_ENDS = _Ends()
atexit.register(_ENDS.end)


def _keep(*objects: Any) -> None:
    """Have these never destroyed."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _destroy(held: list[Any], connections: Connections | None) -> None:
    """Destroy a group in this thread.

    Args:
        held: the group, alone, with the only reference that its owner had.
        connections: the group's, if it has got so far.
    """
    if connections is not None:
        connections.part()
    held.clear()


class GlooBackend(ProcessGroupBackend):
    """One rank's membership in a Gloo process group.

    Args:
        store: of the rendezvous.
        prefix: of this group's keys in it, the same on all ranks and never used before.
        rank, size: within the group.
        address: this host's IP address that the other ranks can reach.
        connect_timeout: seconds until all neighbours are connected.
        cancelled: polled to see whether to give up connecting.
        secret: of the job, which ranks prove to know.
        silence: seconds after which the connections with a host that does not answer end; 0 for never.

    Raises:
        ConnectError: at construction, if they cannot be connected.
        BackendError: connecting was cancelled.
    """

    name = "gloo"
    blocks = False
    in_rank_order = False

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        address: str,
        connect_timeout: float,
        cancelled: Callable[[], bool] | None = None,
        secret: bytes = b"",
        silence: float = 0.0,
    ) -> None:
        self._silence = silence
        self._cancelled = cancelled or (lambda: False)
        self._aborted = self._is_abandoned = False
        self._key = derive(secret, "Gloo connection")
        super().__init__(rank, size)
        self._cube = Cube(rank, size) if size > FEW_RANKS else None
        self._progress: ProgressThread | None = None
        self._wire: _GlooWire | None = None
        self._butterfly: Butterfly | None = None
        self._narrow: Narrow | None = None
        self._codecs: dict[WireFormat, Codec] = {}
        self._all_connected = False
        self._connections: Connections | None = None
        self._missing: Sequence[int] = ()  # ranks from which nothing arrived in the last try
        self._received: dict[int, npt.NDArray[np.uint8]] = {}  # proofs, which are zeros until they come
        deadline = time.monotonic() + connect_timeout
        try:
            problem = self._try(store, prefix, address, deadline, last=False)
            if problem:
                logger.info("connecting Gloo once more, at other ports: %s", problem)
                problem = self._try(store, f"{prefix}again/", address, deadline, last=True)
            if problem:
                raise BackendError(problem)
        except (RendezvousError, AuthenticationError):
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise gloo_unconnected(rank, address, first_line(error), self._missing) from error
        self._group._set_default_timeout(_LONGEST_OPERATION)

    def _try(self, store: RendezvousStore, prefix: str, address: str, deadline: float, *, last: bool) -> str:
        """Make a group, and connect all who will talk to each other, so that what cannot work is an error in init().

        Args:
            last: take all the time that there is, rather than half of it.

        Returns:
            why it cannot be used, the same on all ranks; empty if it can.
        """
        left = (deadline - time.monotonic()) / (1 if last else 2)
        self._missing, self._received, self._is_abandoned = (), {}, False
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_device(address)]
        options._timeout = _LONGEST_OPERATION
        if self._cube is not None:
            options._threads = 1  # there is a thread of ours besides
        self._store = GlooStore(store, prefix, self._rank, deadline - time.monotonic(), self._gives_up)
        self._group = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        self._wire = wire = _GlooWire(self._group, lambda: self._aborted, self.abort)
        self._butterfly = Butterfly(self._cube, wire) if self._cube is not None else None
        self._progress = self._new_progress(wire)
        self._prefix = prefix.encode()
        connections = self._connections = Connections(self._store.published)
        self._met = {self._rank}
        left = deadline - time.monotonic()
        peers = self._cube.neighbours if self._cube is not None else range(self._size)
        connections.learn(self._store.fetch(peers))
        try:
            self._reserve_descriptors(len(peers))
            self._connect(
                peers, connections, left if last else left / 2, lambda: peek(store, f"{prefix}failed").decode()
            )
            problem = ""
        except RuntimeError as error:
            self._missing = [peer for peer, proof in self._received.items() if not proof.any()]
            self.abandon()
            if self._cancelled():
                raise
            problem = first_line(error)
        problem = self._agreed(store, prefix, problem, deadline)
        if problem:
            connections.end()  # so that nothing of a group that is never closed stays under way
            self.close()
        else:
            self._settle(connections)
        return problem

    def _settle(self, connections: Connections) -> None:
        """Prepare connections that are used from now on."""
        connections.keep_to_this_process()
        if self._silence:
            connections.end_when_silent(self._silence)

    def _agreed(self, store: RendezvousStore, prefix: str, problem: str, deadline: float) -> str:
        """The problem of the lowest rank that has one: what one rank cannot use, no rank uses. Rank 0 asks all, and
        tells all."""
        if problem:
            store.set(f"{prefix}failed", problem.encode())
        store.set(f"{prefix}met/{self._rank}", problem.encode() or _MET)
        keys = [f"{prefix}met/{rank}" for rank in range(self._size)] if self._rank == 0 else [f"{prefix}met/all"]
        try:
            told = get_all(store, keys, max(TURN, deadline - time.monotonic()), self._cancelled)
        except RendezvousError:
            if problem:
                raise BackendError(problem) from None
            raise
        found = next((text for text in told if text != _MET), b"")
        if self._rank == 0:
            store.set(f"{prefix}met/all", found or _MET)
        return found.decode()

    def _reserve_descriptors(self, connections: int) -> None:
        """Check the number of file descriptors: with too few, Gloo would fail in its own thread, without a message.

        Raises:
            ConfigError: so many connections more cannot be had.
        """
        reserve_descriptors(connections, f"rank {self._rank} of a Gloo group", "connections with other ranks")

    def _gives_up(self) -> bool:
        return self._aborted or self._cancelled()

    def _connect(
        self, peers: Sequence[int], connections: Connections, timeout: float, failed: Callable[[], str]
    ) -> None:
        """Connect with others, whose addresses are known.

        Args:
            connections: the group's.
            timeout: in seconds.
            failed: asked now and then why another rank has given up; empty if none has.

        Raises:
            BackendError, RuntimeError: it failed.
        """
        assert self._progress is not None
        work, deadline = self._progress.begin("connect", lambda: self._check(peers)), time.monotonic() + timeout
        look_at = time.monotonic() + min(LONGEST_TURN, timeout)
        while not work.completes_within(min(TURN, timeout)):
            if self._gives_up():
                raise BackendError(CANCELLED)
            if time.monotonic() < min(look_at, deadline):
                continue
            look_at = time.monotonic() + LONGEST_TURN
            if reason := failed():
                work.completes_within(min(_GRACE, max(0.0, deadline - time.monotonic())))
                raise BackendError(reason)
            came, known = connections.incoming(), len(self._met.union(peers)) - 1
            if came > known:
                raise BackendError(
                    f"{came} connections arrived at port {connections.listener[1]}, and there are {known} ranks to "
                    "connect with: something that is not part of this job connects to Gloo's ports"
                )
            if time.monotonic() >= deadline:
                raise BackendError(f"not connected within {max(timeout, 0.0):.0f} s")
        if self._cube is None:
            self._progress.close()
            self._progress = None

    def _check(self, peers: Sequence[int]) -> None:
        """Exchange proofs with others, on the progress thread. The first bytes between two ranks connect them."""
        wire, new = self._wire, sorted(set(peers) - self._met)
        assert wire is not None
        sent = {peer: np.frombuffer(bytearray(self._proof(self._rank, peer)), np.uint8) for peer in new}
        received = self._received = {peer: np.zeros(PROOF_BYTES, np.uint8) for peer in new}
        begun = [wire.receive(received[peer], peer) for peer in new]
        begun += [wire.send(sent[peer], peer) for peer in new]
        for each in begun:
            wire.wait(each)
        for peer, proof in received.items():
            if not proves(proof.tobytes(), self._key, *self._proven(peer, self._rank)):
                raise BackendError(
                    f"the process connected as rank {peer} of the group did not prove that it knows this job's secret"
                )
        self._met.update(new)

    def _proof(self, of: int, to: int) -> bytes:
        """Return what one rank shows another."""
        return prove(self._key, *self._proven(of, to))

    def _proven(self, of: int, to: int) -> tuple[str, bytes, bytes, bytes, bytes]:
        """Return what a proof covers. Both nonces are new for each try, so proofs of another one are worthless."""
        nonces = self._store.nonces
        return "rank", self._prefix, nonces[of], nonces[to], struct.pack("!II", of, to)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        if self._goes_through_cube(buffer.nbytes):
            what = f"allreduce of {buffer.nbytes} bytes"
            return self._through_cube(what, lambda cube: cube.allreduce(buffer, op), buffer)
        if not self._goes_at_once(buffer.nbytes, buffer.nbytes * self._size):
            return super().allreduce(buffer, op)
        received = np.empty((self._size, buffer.count), buffer.dtype.numpy_dtype)

        def finish() -> None:
            np.copyto(buffer.array(), kernels.reduce(list(received), buffer.dtype, op))

        return self._tell_all(
            buffer, Buffer.of_array(received, buffer.dtype), [buffer.nbytes] * self._size, finish=finish
        )

    def allreduce_encoded(self, buffer: Buffer, form: WireFormat, residual: Values | None = None) -> Work:
        """See ``Encoding``. A thread exchanges messages and encodes a piece while others are on the wire; the group's
        own operations may be under way at the same time."""
        what = f"allreduce of {buffer.nbytes} bytes as {form}"
        wire = self._wire
        if wire is None:
            raise BackendError(f"Gloo {what}: the process group has been closed")
        if self._narrow is None:
            self._narrow = Narrow(self._rank, self._size, wire, self._cube)
        if self._progress is None:
            self._progress = self._new_progress(wire)
        codec = self._codecs.get(form)
        if codec is None:
            codec = self._codecs[form] = codec_of(form)
        narrow = self._narrow
        return self._progress.begin(what, lambda: narrow.allreduce(buffer, codec, residual), buffer)

    @property
    def rounding(self) -> tuple[float, float]:
        """See ``Encoding``."""
        narrow = self._narrow
        return (0.0, 0.0) if narrow is None else narrow.rounding

    def _new_progress(self, wire: _GlooWire) -> ProgressThread:
        return ProgressThread(f"hvdgloo-gloo-{self._rank}", wire.settle)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        if self._goes_through_cube(sum(nbytes)):
            return self._through_cube("allgather", lambda cube: cube.allgather(source, target, nbytes), source, target)
        if not self._goes_at_once(max(nbytes), sum(nbytes)):
            return super().allgather(source, target, nbytes)
        return self._tell_all(source, target, nbytes)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        if self._cube is None:
            return super().broadcast(buffer, root)
        what = f"broadcast of {buffer.nbytes} bytes"
        return self._through_cube(what, lambda cube: cube.broadcast(buffer, root), buffer)

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        if self._cube is None:
            return super().reducescatter(source, target, nbytes, op)

        def body(cube: Butterfly) -> None:
            cube.reducescatter(source, target, nbytes, op)

        return self._through_cube("reducescatter", body, source, target)

    def alltoall(
        self,
        source: Buffer,
        target: Buffer,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        finish: Callable[[], object] | None = None,
    ) -> Work:
        if self._cube is None:
            return super().alltoall(source, target, sent, received, finish=finish)

        def body(cube: Butterfly) -> None:
            self._connect_all_pairs(cube)
            work = ProcessGroupBackend.alltoall(self, source, target, sent, received, finish=finish)
            while not work.completes_within(_LONGEST_OPERATION.total_seconds()):
                pass

        return self._through_cube("alltoall", body, source, target)

    def _through_cube(self, what: str, body: Callable[[Butterfly], None], *keep: Buffer) -> Work:
        """Have the progress thread do something with the cube."""
        progress, cube = self._progress, self._butterfly
        if progress is None or cube is None:
            raise BackendError(f"Gloo {what}: the process group has been closed")
        return progress.begin(what, lambda: body(cube), keep)

    def _connect_all_pairs(self, cube: Butterfly) -> None:
        """Connect this rank with those that are no neighbours; all ranks do so in their first alltoall."""
        if self._all_connected:
            return
        others = [rank for rank in range(self._size) if rank not in self._met]
        self._reserve_descriptors(len(others))
        # No rank begins before all are connected: a connection that does not exist yet cannot be ended by an abort.
        cube.allreduce(Buffer.of_array(np.zeros(1, np.uint8)), ReduceOp.SUM)
        connections = self._connections
        assert connections is not None
        connections.learn(self._store.fetch(others))
        self._check(others)
        self._settle(connections)
        self._all_connected = True

    def _goes_through_cube(self, nbytes: int) -> bool:
        return self._cube is not None and nbytes <= self._cube.most_bytes

    def _goes_at_once(self, largest: int, total: int) -> bool:
        return largest >= AT_ONCE_FROM and total <= AT_ONCE_BYTES and 1 < self._size <= FEW_RANKS

    def _tell_all(
        self, source: Buffer, target: Buffer, nbytes: Sequence[int], *, finish: Callable[[], object] | None = None
    ) -> Work:
        """Send everything to every rank: one step, where a ring has twice as many as ranks and each wakes two
        threads."""
        sent = Buffer.of_array(np.tile(source.array().view(np.uint8), self._size))
        return self.alltoall(sent, target, [source.nbytes] * self._size, nbytes, finish=finish)

    def _work(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> Work:
        return _GlooWork(what, work, keep, finish)

    def scale(self, buffer: Buffer, factor: float) -> None:
        if kernels.is_half(buffer.dtype):
            gpu.scale(tensor_of(buffer), factor)  # torch computes half types in float32, and faster than numpy
        else:
            kernels.scale(buffer, factor)

    def abort(self) -> None:
        self._aborted = True
        connections = self._connections
        if connections is not None:
            connections.end()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        group, connections = self._group, self._connections
        self._progress = self._butterfly = self._narrow = self._wire = self._group = self._connections = None
        if group is None or self._is_abandoned:
            return
        held = [group]
        del group
        if self._aborted or _is_used(held):
            _ENDS.begin(held, connections)
        else:
            _destroy(held, connections)

    def abandon(self) -> None:
        # The destructor would wait for an operation that never ends, even if only at the interpreter's exit.
        if self._group is not None:
            self._is_abandoned = True
            _keep(self._group, self._store)

    def after_fork_in_child(self) -> None:
        """Let go of the connections in a forked child, whose copies would hide this rank's death from its peers.

        The group itself is kept forever: its threads do not exist here, and its destructor would wait for them.
        """
        if self._group is not None:
            self.abandon()
        if self._connections is not None:
            close_keeping_numbers(list(self._connections.descriptors(connected=False)))
