"""Messages between two ranks of a group: send and recv.

They are in no order with collectives, so each direction between two ranks has a data plane of its own, which its first
message opens. A message is a header and its tensor's bytes, which travel in the header if they are few. One that no
receive has asked for yet is kept.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hvdgloo._backends import base
from hvdgloo._backends.base import Backend, Done, Several
from hvdgloo._backends.shm.calls import Call
from hvdgloo._net.cancelling import TURN
from hvdgloo._observe.counters import Counters
from hvdgloo.errors import BackendError
from hvdgloo.torch.distributed import _tensors
from hvdgloo.torch.distributed._connection import Connection
from hvdgloo.torch.distributed._processes import ABSENT_LOOK, Published
from hvdgloo.torch.distributed._queue import Operation, OperationQueue
from hvdgloo.torch.distributed._record import Record
from hvdgloo.torch.distributed._store import FIRST_LOOK, LAST_LOOK, TorchStore
from hvdgloo.torch.distributed._tensors import Finish
from hvdgloo.types import Buffer

_HEADER = struct.Struct("=qQ")
"""Tag and number of bytes."""

_INLINE = 256 - _HEADER.size
"""Bytes for which a header has room."""

_HEAD_START = 0.002
"""Seconds after which a channel's thread takes over from a caller that has not come to wait: most come at once, and a
message that arrives in the caller's own thread saves a switch between threads."""

_CLOSING_SECONDS = 5.0
_SENDER, _RECEIVER = 0, 1
_OPEN = "open"
_MESSAGE = Call("message")


class Messages:
    """One rank's messages in a group.

    Args:
        store: torch's, with this group's prefix.
        rank, size: within the group.
        label: of the group.
        seconds: until a message fails.
        counters: of the process; None to count nothing.
    """

    def __init__(
        self, store: Store, rank: int, size: int, label: str, seconds: float, counters: Counters | None
    ) -> None:
        self.record = None if counters is None else Record(counters, label)
        self._store, self.rank, self._size, self.label, self.seconds = store, rank, size, label, seconds
        self.everyone = PrefixStore("all", store)
        """Store in which the group's ranks have published their processes."""
        self._outgoing: dict[int, OperationQueue] = {}
        self._incoming: dict[int, Incoming] = {}
        self.posted: list[Receive] = []
        self.changed = threading.Condition()
        """Guards ``posted``; notified when a receive has ended."""

    def send(self, tensor: torch.Tensor, to: int, tag: int, result: Any) -> Operation:
        """Send a contiguous tensor."""
        queue = self._outgoing.get(to)
        if queue is None:
            store = PrefixStore(f"messages/{self.rank}to{to}", self._store)
            label = f"messages from rank {self.rank} to rank {to} of {self.label}"

            def connect(seconds: float, cancelled: Any) -> Connection:
                store.set(_OPEN, "1")
                names = (self.rank, to)
                return Connection(store, _SENDER, 2, label, seconds, cancelled, names=names, everyone=self.everyone)

            record = None if self.record is None else Record(self.record.counters, self.label)
            queue = self._outgoing[to] = OperationQueue(label, record, connect)
        payload = _tensors.content(tensor)
        packed = np.zeros(_HEADER.size + _INLINE, np.uint8)
        _HEADER.pack_into(packed.data, 0, tag, payload.nbytes)
        is_inline = payload.nbytes <= _INLINE
        if is_inline:
            packed[_HEADER.size : _HEADER.size + payload.nbytes] = payload.array()
        header = Buffer.of_array(packed)

        def start(backend: Backend) -> base.Work:
            first = backend.broadcast(header, _SENDER)
            return first if is_inline else Several([first, backend.broadcast(payload, _SENDER)])

        operation = Operation(queue, _MESSAGE, start, None, result, self.seconds, "send", payload.nbytes)
        return queue.add(operation, waits=False)

    def receive(self, memory: torch.Tensor, back: Finish | None, source: int | None, tag: int, result: Any) -> Receive:
        """Receive into a contiguous tensor.

        Args:
            back: called once the message is there.
            source: rank that the message comes from; None for any.
        """
        receive = Receive(self, memory, back, source, tag, result)
        sources = [source] if source is not None else [rank for rank in range(self._size) if rank != self.rank]
        with self.changed:
            self.posted.append(receive)
        channels = [self._channel(each) for each in sources]
        for channel in channels:
            channel.wake()
        if source is not None:
            receive.channel = channels[0]
        return receive

    def _channel(self, source: int) -> Incoming:
        channel = self._incoming.get(source)
        if channel is None:
            store = PrefixStore(f"messages/{source}to{self.rank}", self._store)
            label = f"messages from rank {source} to rank {self.rank} of {self.label}"
            channel = self._incoming[source] = Incoming(self, store, source, label)
        return channel

    def is_waited_for(self, source: int) -> bool:
        """Tell whether a message from a rank may answer a receive."""
        with self.changed:
            return any(receive.wanted in (None, source) for receive in self.posted)

    def claim(self, source: int, tag: int) -> Receive | None:
        """Return the receive that was asked for first of those that a message answers."""
        with self.changed:
            for receive in self.posted:
                if receive.tag == tag and receive.wanted in (None, source):
                    self.posted.remove(receive)
                    return receive
        return None

    def unanswerable(self, source: int) -> list[Receive]:
        """Return the receives that nothing can answer any more, now that a source has failed."""
        with self.changed:
            lost = [channel.failure is not None for channel in self._incoming.values()]
            all_lost = len(lost) == self._size - 1 and all(lost)
            failed = [each for each in self.posted if each.wanted == source or (each.wanted is None and all_lost)]
            self.posted = [each for each in self.posted if each not in failed]
        return failed

    def overdue(self) -> list[Receive]:
        """Return the receives whose timeout has passed."""
        now = time.monotonic()
        with self.changed:
            late = [each for each in self.posted if now >= each.deadline]
            self.posted = [each for each in self.posted if each not in late]
        return late

    def abort(self) -> None:
        """Make what is under way fail soon."""
        for queue in self._outgoing.values():
            queue.abort()
        for channel in self._incoming.values():
            channel.abort()

    def close(self) -> None:
        """End all channels."""
        for queue in self._outgoing.values():
            queue.close()
        for channel in self._incoming.values():
            channel.close()
        if self.record is not None:
            self.record.close()

    def after_fork_in_child(self) -> None:
        """Make every message in a forked child fail."""
        self.changed = threading.Condition()
        self.posted = []
        for queue in self._outgoing.values():
            queue.after_fork_in_child()
        for channel in self._incoming.values():
            channel.after_fork_in_child()


class Receive(Operation):
    """A receive under way.

    Args:
        source: rank that the message must come from; None for any.
    """

    def __init__(
        self, messages: Messages, memory: torch.Tensor, back: Finish | None, source: int | None, tag: int, result: Any
    ) -> None:
        super().__init__(None, _MESSAGE, None, back, result, messages.seconds, "recv", memory.nbytes)
        self._messages = messages
        self.memory, self.tag = memory, tag
        self.wanted = source
        self.deadline = time.monotonic() + messages.seconds
        self.channel: Incoming | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        record = self._messages.record
        counters = None if record is None else record.counters
        if self.has_ended() or counters is None or counters.blocked_in is not None:
            return self._wait(timeout)
        counters.blocked_since = time.monotonic()
        counters.blocked_in = self
        try:
            return self._wait(timeout)
        finally:
            counters.unblocked(0.0, time.monotonic())

    def _wait(self, timeout: timedelta) -> bool:
        seconds = timeout.total_seconds()
        until = time.monotonic() + seconds if seconds > 0 else None
        if self.channel is not None:
            self.channel.run_until_ended(self, until)
        changed = self._messages.changed
        with changed:
            while not self.has_ended():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise dist.DistBackendError(
                        f"hvdgloo: no message with tag {self.tag} has arrived within this wait's timeout"
                    )
                changed.wait(left)
        if self.error is not None:
            raise self.error.with_traceback(None)
        return True

    def _wake(self) -> None:
        pass  # its channels' threads are awake

    def deliver(self, source: int, error: Exception | None) -> None:
        """Take note of the message, or of why there is none."""
        if error is None and self.finish is not None:
            self.finish()
        self.source = source
        record = self._messages.record
        with self._messages.changed:
            if record is not None and error is None:
                record.ended(self.call, self.kind, self.nbytes or 0, self.submitted)
            self.end(error)
            self._messages.changed.notify_all()


class Incoming:
    """Messages from one rank, in the order in which it sends them.

    Args:
        store: torch's, with this direction's prefix.
        source: the rank.
    """

    def __init__(self, messages: Messages, store: Store, source: int, label: str) -> None:
        self._messages, self._store, self._source, self._label = messages, store, source, label
        self._connection: Connection | None = None
        self.failure: Exception | None = None
        self._early: deque[tuple[int, torch.Tensor]] = deque()
        self._header = Buffer.of_array(np.zeros(_HEADER.size + _INLINE, np.uint8))
        self._awaited: base.Work | None = None
        """The next header, under way."""
        self._claimed: Receive | None = None
        """The receive that the message under way answers."""
        self._carrying_out = threading.Lock()
        self._pause, self._next_look = FIRST_LOOK, 0.0
        self._published = Published(TorchStore(messages.everyone), (source,))
        self._more = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def wake(self) -> None:
        """Have the channel's thread receive what is awaited."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"hvdgloo {self._label}", daemon=True)
            self._thread.start()
        self._more.release()

    def run_until_ended(self, receive: Receive, until: float | None) -> None:
        """Receive messages in the calling thread until one has answered a receive, or time is up."""
        while not receive.has_ended() and (until is None or time.monotonic() < until):
            if not self._carrying_out.acquire(timeout=TURN):
                continue
            try:
                ended = [] if receive.has_ended() else self._turn()
            finally:
                self._carrying_out.release()
            for each in ended:
                each.settle()

    def _work(self) -> None:
        while True:
            self._more.acquire()
            if not self._closed:
                time.sleep(_HEAD_START)
            while not self._closed:
                with self._carrying_out:
                    if not self._messages.is_waited_for(self._source):
                        break
                    ended = self._turn()
                for each in ended:
                    each.settle()
            if self._closed:
                return

    def _turn(self) -> list[Receive]:
        """Go on for a moment.

        Returns:
            the receives that have ended.
        """
        ended = self._messages.overdue()
        for receive in ended:
            receive.deliver(self._source, self._error(f"no message with tag {receive.tag} came in time"))
        try:
            if self.failure is None:
                return [*ended, *self._receive()]
        except Exception as failure:  # noqa: BLE001 - the calls that receive raise it
            self.failure = self._error(str(failure))
            if self._connection is not None:
                self._connection.backend.abort()
        error = self.failure
        assert error is not None
        failed = self._messages.unanswerable(self._source)
        if self._claimed is not None:
            failed.append(self._claimed)
            self._claimed = None
        for receive in failed:
            receive.deliver(self._source, error)
        return [*ended, *failed]

    def _error(self, text: str) -> Exception:
        return dist.DistBackendError(f"hvdgloo: {self._label}: {text}")

    def _receive(self) -> list[Receive]:
        for tag, memory in list(self._early):
            receive = self._claimed = self._messages.claim(self._source, tag)
            if receive is not None:
                self._early = deque(each for each in self._early if each[1] is not memory)
                return [self._answer(receive, memory)]
        connection = self._connect()
        if connection is None:
            return []
        if self._awaited is None:
            self._awaited = connection.backend.broadcast(self._header, _SENDER)
        if not self._awaited.completes_within(TURN):
            connection.check_peers()
            return []
        self._awaited = None
        header = self._header.array()
        tag, nbytes = _HEADER.unpack_from(header.data)
        receive = self._claimed = self._messages.claim(self._source, tag)
        fits = receive is not None and receive.memory.nbytes == nbytes
        memory = receive.memory if receive and fits else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        content = _tensors.content(memory)
        payload: base.Work = Done()
        if nbytes <= _INLINE:
            content.array()[:] = header[_HEADER.size : _HEADER.size + nbytes]
        else:
            payload = connection.backend.broadcast(content, _SENDER)
        deadline = time.monotonic() + self._messages.seconds
        while not payload.completes_within(TURN):
            connection.check_peers()
            if self._closed or time.monotonic() >= deadline:
                raise BackendError(f"a message of {nbytes} bytes has not arrived as a whole in time")
        if receive is None:
            self._early.append((tag, memory))
            return []
        return [self._answer(receive, memory)]

    def _answer(self, receive: Receive, message: torch.Tensor) -> Receive:
        """Give a message to the receive that asked for it, or the error that it is of another size."""
        error = None
        if receive.memory.nbytes != message.nbytes:
            sent = f"rank {self._source} sent {message.nbytes} bytes with tag {receive.tag}"
            error = self._error(f"{sent}, and recv was given a tensor of {receive.memory.nbytes}")
        elif message is not receive.memory:
            _tensors.content(receive.memory).array()[:] = _tensors.content(message).array()
        receive.deliver(self._source, error)
        self._claimed = None
        return receive

    def _connect(self) -> Connection | None:
        """Return the connection, once the other rank has something to send."""
        if self._connection is None:
            if not self._store.check([_OPEN]):
                self._look_for_sender()
                time.sleep(self._pause)
                self._pause = min(2 * self._pause, LAST_LOOK)
                return None
            self._published.close()
            self._connection = Connection(
                self._store,
                _RECEIVER,
                2,
                self._label,
                self._messages.seconds,
                lambda: self._closed,
                names=(self._source, self._messages.rank),
                everyone=self._messages.everyone,
            )
        return self._connection

    def _look_for_sender(self) -> None:
        """Look now and then whether a rank that has never sent a message still can.

        Raises:
            BackendError: its process on this host has ended.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + ABSENT_LOOK
        # In this order: the rank may have sent a message before it ended.
        if self._published.ended([0]) and not self._store.check([_OPEN]):
            raise BackendError(f"{self._published.describe([0])} has ended without sending a message")

    def abort(self) -> None:
        """Make what is under way fail soon."""
        if self._connection is not None:
            self._connection.backend.abort()

    def close(self) -> None:
        """End the channel."""
        self._closed = True
        if self._thread is not None:
            self._more.release()
            if self._thread is not threading.current_thread():
                self._thread.join(_CLOSING_SECONDS)
        with self._carrying_out:
            self._published.close()
            connection, self._connection = self._connection, None
            if connection is None:
                return
            failed = self._awaited is not None or self.failure is not None
            if failed:
                connection.backend.abort()
            connection.close(failed=failed)

    def after_fork_in_child(self) -> None:
        """Make every message in a forked child fail."""
        if self._connection is not None:
            self._connection.after_fork_in_child()
        self._published.after_fork_in_child()
        self.failure = self._error("they belong to the process that this one was forked from")
        self._carrying_out, self._more, self._thread = threading.Lock(), threading.Semaphore(0), None
