"""The page's live events: one thread writes changes to all readers.

Each change is taken from the observatory and encoded once, however many readers there are. No reader is waited for:
what it has not taken is kept up to a limit, beyond which the reader is disconnected. Browsers then reconnect by
themselves, and get what they missed, or a new snapshot.
"""

from __future__ import annotations

import json
import logging
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from hvdgloo._net.event_loop import WakeUp
from hvdgloo._observe.view import Snapshot, Update, encode
from hvdgloo.rendezvous._server.http_connection import HttpConnection

if TYPE_CHECKING:
    from hvdgloo._observe.observatory import Observatory, Subscription

logger = logging.getLogger(__name__)

MOST_READERS = 128
MOST_BEHIND = 8 << 20  # bytes
_KEPT = 4  # of the last encoded values; readers that keep up need no more
_LONGEST_REVISION = 18  # digits
_TURN = 0.25  # seconds between two looks for news
_ALIVE = 15.0  # seconds between two keep-alive comments
_LAST_WORDS = 0.5  # seconds for sending the end


class _News:
    """A snapshot or an update, with its bytes for readers with and without the right to trace."""

    def __init__(self, value: Snapshot | Update, id: str) -> None:
        self.value = value
        self._id = id
        self._bytes: dict[bool, bytes] = {}

    def text(self, controls: bool) -> bytes:
        if controls not in self._bytes:
            job = msgspec.structs.replace(self.value.job, control=controls)
            data = encode(msgspec.structs.replace(self.value, job=job))
            kind = "snapshot" if isinstance(self.value, Snapshot) else "update"
            self._bytes[controls] = _event(kind, data, self._id)
        return self._bytes[controls]


class _Reader:
    """A reader of the live events, with what it has not taken yet."""

    def __init__(self, connection: HttpConnection, subscription: Subscription, *, controls: bool) -> None:
        self.connection = connection
        self.subscription = subscription
        self.controls = controls
        self.behind = 0
        self._waiting: deque[memoryview] = deque()

    def give(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self.behind += len(data)

    def send(self) -> None:
        """Send as much as the reader takes.

        Raises:
            OSError: the reader has disconnected.
        """
        while self._waiting:
            rest = self._waiting[0]
            try:
                sent = self.connection.socket.send(rest)
            except BlockingIOError:
                return
            self.behind -= sent
            if sent == len(rest):
                self._waiting.popleft()
            else:
                self._waiting[0] = rest[sent:]


class Feed:
    """Writes events to connections that are handed over to it.

    Args:
        observatory: the observatory that readers are shown.
        close: called for each connection when it ends.
    """

    def __init__(self, observatory: Observatory, close: Callable[[HttpConnection], None]) -> None:
        self._observatory = observatory
        self._close = close
        self._life = secrets.token_hex(4)  # so that another server's revisions are not taken for this one's
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._coming: deque[_Reader] = deque()
        self._readers: set[_Reader] = set()
        self._places = 0  # in use, from ``reserve`` until the reader disconnects
        self._thread: threading.Thread | None = None
        self._fresh: deque[_News] = deque(maxlen=_KEPT)
        self._alive = 0.0
        self._ended = ""

    @property
    def watchers(self) -> int:
        """Number of readers."""
        return self._places

    def reserve(self) -> bool:
        """Reserve a place for a reader, before ``join``; return False if there is none."""
        with self._lock:
            if self._places >= MOST_READERS or self._ended:
                return False
            self._places += 1
            return True

    def join(self, connection: HttpConnection, *, controls: bool, last: str) -> None:
        """Take over a connection on which the head of the answer was sent.

        Args:
            controls: its reader may have steps traced, which ``Job.control`` tells it.
            last: id of the last event that the reader got, from the Last-Event-ID header; empty if it got none.
        """
        try:
            connection.socket.setblocking(False)
            subscription = self._observatory.subscribe(self._revision(last))
            with self._lock:
                if self._ended:
                    self._places -= 1
                    self._close(connection)
                    return
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="hvdgloo-page-feed", daemon=True)
                    thread.start()
                    self._thread = thread
                self._coming.append(_Reader(connection, subscription, controls=controls))
        except BaseException:
            with self._lock:
                self._places -= 1
            raise
        self._wake_up.wake()

    def stop(self, reason: str) -> None:
        """Send a last snapshot and the end to all readers, within half a second, and stop. May be repeated."""
        with self._lock:
            self._ended = self._ended or reason
            thread = self._thread
        self._wake_up.wake()
        if thread is not None:
            thread.join(2 * _LAST_WORDS + 5)
        elif self._wake_up.fileno() >= 0:
            self._release()

    def _revision(self, last: str) -> int | None:
        """Return the revision in an event's id, if this server sent it."""
        life, _, revision = last.partition("-")
        known = life == self._life and revision.isdecimal() and len(revision) <= _LONGEST_REVISION
        return int(revision) if known else None

    # The thread.

    def _run(self) -> None:
        try:
            while not self._ended:
                try:
                    self._turn()
                except Exception:  # neither the job nor its page should end
                    logger.exception("the page's events")
                    self._forget_all()
            self._say_goodbye()
        finally:
            self._forget_all()
            self._release()

    def _turn(self) -> None:
        for key, mask in self._selector.select(_TURN if self._readers else None):
            if key.data is None:
                self._wake_up.clear()
            elif not mask & selectors.EVENT_READ or self._is_there(key.data):
                self._send(key.data)
        while self._coming:
            self._welcome(self._coming.popleft())
        for reader in list(self._readers):
            self._tell(reader)
        if self._readers and time.monotonic() >= self._alive:
            self._alive = time.monotonic() + _ALIVE
            for reader in list(self._readers):
                self._give(reader, b":\n\n")

    def _welcome(self, reader: _Reader) -> None:
        self._readers.add(reader)
        self._selector.register(reader.connection.socket, selectors.EVENT_READ, reader)
        self._give(reader, b"retry: 2000\n\n")

    def _tell(self, reader: _Reader) -> None:
        """Give a reader what is new to it."""
        while reader in self._readers and (value := reader.subscription.next(0)) is not None:
            self._give(reader, self._news(value, reader.subscription.revision).text(reader.controls))

    def _news(self, value: Snapshot | Update, revision: int | None) -> _News:
        """Return the encoded form of a value, which is shared by all readers of that value."""
        for news in self._fresh:
            if news.value is value:
                return news
        self._fresh.append(_News(value, f"{self._life}-{revision}"))
        return self._fresh[-1]

    def _give(self, reader: _Reader, data: bytes) -> None:
        if reader in self._readers:
            reader.give(data)
            self._send(reader)

    def _send(self, reader: _Reader) -> None:
        if reader not in self._readers:
            return
        try:
            reader.send()
        except OSError:
            self._forget(reader)
            return
        if reader.behind > MOST_BEHIND:
            logger.debug("a reader of the page is %d bytes behind, and is disconnected", reader.behind)
            self._forget(reader)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if reader.behind else 0)
        if self._selector.get_key(reader.connection.socket).events != events:
            self._selector.modify(reader.connection.socket, events, reader)

    def _is_there(self, reader: _Reader) -> bool:
        """Return whether a reader is still connected. What it sends is ignored."""
        try:
            if reader.connection.socket.recv(4096):
                return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        self._forget(reader)
        return False

    def _forget(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        self._selector.unregister(reader.connection.socket)
        self._close(reader.connection)
        with self._lock:
            self._places -= 1

    def _forget_all(self) -> None:
        for reader in list(self._readers):
            self._forget(reader)

    def _say_goodbye(self) -> None:
        """Send the last snapshot and the end."""
        while self._coming:
            self._welcome(self._coming.popleft())
        if not self._readers:
            return
        last = _News(self._observatory.snapshot(), "")
        end = _event("end", json.dumps({"reason": self._ended}).encode(), "")
        for reader in list(self._readers):
            self._give(reader, last.text(reader.controls) + end)
        deadline = time.monotonic() + _LAST_WORDS
        while any(reader.behind for reader in self._readers) and time.monotonic() < deadline:
            for key, mask in self._selector.select(max(0.0, deadline - time.monotonic())):
                if key.data is None:
                    self._wake_up.clear()
                elif not mask & selectors.EVENT_READ or self._is_there(key.data):
                    self._send(key.data)

    def _release(self) -> None:
        self._selector.close()
        self._wake_up.close()


def _event(kind: str, data: bytes, id: str) -> bytes:
    """Format a server-sent event. JSON has no line breaks but escaped ones, so one line holds the data."""
    number = f"id: {id}\n" if id else ""
    return f"event: {kind}\n{number}data: ".encode() + data + b"\n\n"
