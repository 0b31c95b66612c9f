"""The key-value store through which processes find each other.

A ``Store`` holds bytes under text keys, and lets a reader wait for keys that do not exist yet: that wait is all a
rendezvous is. ``MemoryStore`` is the store of one process; the server keeps one for each scope, and tests and
single-process jobs use it directly. ``hvdgloo.rendezvous.HttpStore`` is the same thing accessed through the server.

Waiting costs nothing per key and wakes no thread needlessly: each waiter is filed under *one* key that it lacks, and
setting that key moves the waiter on to the next one it lacks, or releases it. With a condition variable, N workers that
wait for N keys would be woken N x N times.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdgloo.errors import RendezvousError, RendezvousTimeoutError

MAX_KEY_BYTES = 1024
MAX_SCOPE_BYTES = 255


class Store(Protocol):
    """The interface of a store for Gloo, the engine and the runner. Keys are text, values are bytes."""

    def set(self, key: str, value: bytes) -> None:
        """Put ``value`` under ``key``, replacing any other, and wake the readers that wait for it."""

    def set_many(self, items: Mapping[str, bytes]) -> None:
        """Set several keys at once; no reader sees only some of them."""

    def get(self, key: str, *, timeout: float) -> bytes:
        """Return the value of ``key``, waiting up to ``timeout`` seconds until it exists.

        Raises:
            RendezvousTimeoutError: it was not set by then.
        """

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
        """Return the values of all ``keys`` in their order, waiting up to ``timeout`` seconds until all exist.

        Raises:
            RendezvousTimeoutError: not all exist by then; the text names the missing ones.
        """

    def delete(self, key: str) -> bool:
        """Remove ``key``; return True if it existed."""


def check_key(key: str, what: str = "key", limit: int = MAX_KEY_BYTES) -> str:
    """Return ``key`` if it is a valid key.

    Slashes are allowed, even doubled ones (torch makes such keys). Segments "." and ".." are not: HTTP clients and
    proxies rewrite paths that contain them, so that a different key would arrive.

    Raises:
        ValueError: the key is invalid; the text says why.
    """
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError(f"a {what} must be text that can be written in UTF-8") from None
    if not 0 < size <= limit:
        raise ValueError(f"a {what} must have 1 to {limit} bytes, this one has {size}")
    if any(character < " " or character == "\x7f" for character in key):
        raise ValueError(f"a {what} must not hold control characters")
    if key.startswith(".") or "/." in key:  # nearly always False, which saves the split
        for segment in key.split("/"):
            if segment in (".", ".."):
                raise ValueError(f"a {what} must not hold a segment {segment!r}")
    return key


_EPOCH = "@hvdgloo."
"""Text before the epoch's number in a scope's name; users' own scopes do not contain it."""


def epoch_scope(epoch: int) -> str:
    """Return the suffix for names of scopes whose keys are useless once the next epoch has been formed."""
    return f"{_EPOCH}{epoch}"


def epoch_of(scope: str) -> int:
    """Return the epoch in a scope's name; -1 if it does not end in an ``epoch_scope``."""
    number = scope.rpartition(_EPOCH)[2] if _EPOCH in scope else ""
    return int(number) if number.isascii() and number.isdigit() else -1


class Latch:
    """A one-time event, for one thread that waits and another that causes it.

    A bare lock: a tenth of a ``threading.Event``'s cost, and the server of a large job makes thousands.
    """

    __slots__ = ("_callback", "_lock")

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._callback: Callable[[], None] | None = None

    def release(self) -> None:
        """Let the waiting thread continue. Calling it again changes nothing."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # it was released before
        if self._callback is not None:
            self._callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call back instead of letting a thread wait.

        Args:
            callback: called by the thread that causes the event, which may hold locks, or at once if it has happened.
                It may be called twice.
        """
        self._callback = callback
        if not self._lock.locked():
            callback()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; return False if nothing happened by then.

        Only one thread may wait, until this returns True.
        """
        if timeout > 0:
            return self._lock.acquire(timeout=min(timeout, _thread.TIMEOUT_MAX))
        return self._lock.acquire(blocking=False)


class Waiter(Latch):
    """One reader's wait for some keys of a MemoryStore."""

    __slots__ = ("keys", "position")

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self.keys = keys
        self.position = 0  # every key before this one existed when it was looked up


@dataclass(frozen=True)
class Limits:
    """Limits on the memory of a server's clients, in bytes: far more than a job needs, and less than would harm it.

    Attributes:
        in_flight: total size of requests that are being received or answered.
        stored: total size of all stored items, keys and bookkeeping included.
        stored_by_one: size of one client's stored items.
    """

    in_flight: int = 1 << 30
    stored: int = 4 << 30
    stored_by_one: int = 1 << 30


class StoreFullError(ValueError):
    """There is no room for the items to be set, and none was set. The text says how much room there is."""


class Quota:
    """The bytes that each owner, and all together, keep in some stores. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._lock = _thread.allocate_lock()
        self._limits = limits
        self._kept: dict[str, int] = {}
        self._total = 0

    def change(self, changes: Mapping[str, int]) -> None:
        """Change the number of bytes that owners keep.

        Raises:
            StoreFullError: it would be too many for one of them, or for all; then nothing has changed.
        """
        with self._lock:
            total = self._total + sum(changes.values())
            if total > max(self._limits.stored, self._total):
                raise StoreFullError(
                    f"{self._total} bytes are already stored, and at most {self._limits.stored} are allowed"
                )
            for owner, change in changes.items():
                kept = self._kept.get(owner, 0)
                if change > 0 and kept + change > self._limits.stored_by_one:
                    raise StoreFullError(
                        f"this client has already stored {kept} bytes, and each may store at most "
                        f"{self._limits.stored_by_one}"
                    )
            self._total = total
            for owner, change in changes.items():
                kept = self._kept.pop(owner, 0) + change
                if kept:
                    self._kept[owner] = kept


_BOOKKEEPING = 200
"""Bytes that a key and its value take in addition to their own, roughly."""


class MemoryStore:
    """A Store in this process's memory; all methods may be called from any thread.

    Args:
        quota: bytes that may be kept in this and other stores; None for no limit.
    """

    def __init__(self, quota: Quota | None = None) -> None:
        self._quota = quota
        self._owners: dict[str, str] = {}  # by key; empty without a quota
        self._lock = _thread.allocate_lock()
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[Waiter]] = {}
        self._closed = ""

    def set(self, key: str, value: bytes) -> None:
        self.set_many({key: value})

    def set_many(self, items: Mapping[str, bytes], *, owner: str = "") -> None:
        """Set several keys at once, as ``Store`` says.

        Args:
            owner: owner of the quota to which the items count.

        Raises:
            StoreFullError: they exceed it.
        """
        for key in items:
            check_key(key)
        with self._lock:
            self._account(items, owner)
            # An immutable copy: a caller that reuses its bytearray must not change what is stored.
            self._values.update((key, bytes(value)) for key, value in items.items())
            for key in items:
                for waiter in self._waiters.pop(key, ()):
                    self._advance(waiter)

    def get(self, key: str, *, timeout: float) -> bytes:
        return self.get_many([key], timeout=timeout)[0]

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        while True:
            found = self.peek_many(keys)
            if found is not None:
                return found
            waiter = self.waiter(keys)
            arrived = waiter.wait(deadline - time.monotonic())
            self.forget(waiter)
            if self._closed:
                raise RendezvousError(self._closed)
            if not arrived:
                raise RendezvousTimeoutError(f"{describe_keys(self.missing(keys))} not set within {timeout:g} s")

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            self._account({key: None}, "")
            return self._values.pop(key, None) is not None

    def peek_many(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all ``keys`` if all exist now, otherwise None."""
        values = self._values
        with self._lock:
            try:
                return [values[key] for key in keys]
            except KeyError:
                pass
        for key in keys:
            check_key(key)
        return None

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those ``keys`` that do not exist."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def waiter(self, keys: Sequence[str]) -> Waiter:
        """Return a Waiter that is released once all ``keys`` have existed, or the store is closed.

        A key may have been deleted again by the time the waiter's thread runs, so look again with ``peek_many``. Give
        the waiter back with ``forget``.
        """
        waiter = Waiter(keys)
        with self._lock:
            if self._closed:
                waiter.release()
            else:
                self._advance(waiter)
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting; releases nothing."""
        with self._lock:
            if waiter.position < len(waiter.keys):
                key = waiter.keys[waiter.position]
                others = self._waiters.get(key, [])
                if waiter in others:
                    others.remove(waiter)
                    if not others:
                        del self._waiters[key]

    def close(self, reason: str) -> None:
        """Release all waiters; ``get`` and ``get_many`` then raise RendezvousError(reason)."""
        with self._lock:
            self._closed = reason
            waiters = [waiter for some in self._waiters.values() for waiter in some]
            self._waiters.clear()
        for waiter in waiters:
            waiter.release()

    def clear(self) -> None:
        """Remove all keys."""
        with self._lock:
            self._account(dict.fromkeys(self._values), "")
            self._values.clear()

    def size(self) -> tuple[int, int]:
        """Return the number of keys, and of the bytes of their values."""
        with self._lock:
            return len(self._values), sum(map(len, self._values.values()))

    def _account(self, changed: Mapping[str, bytes | None], owner: str) -> None:
        """Account for values that are about to be set, or to be removed where they are None. Called with the lock
        held; raises StoreFullError."""
        if self._quota is None:
            return
        changes: dict[str, int] = {}
        for key, value in changed.items():
            old = self._values.get(key)
            if old is not None:
                before = self._owners[key]
                changes[before] = changes.get(before, 0) - _cost(key, old)
            if value is not None:
                changes[owner] = changes.get(owner, 0) + _cost(key, value)
        self._quota.change(changes)
        for key, value in changed.items():
            if value is not None:
                self._owners[key] = owner
            else:
                self._owners.pop(key, None)

    def _advance(self, waiter: Waiter) -> None:
        """File the waiter under the next key that it lacks, or release it. Called with the lock held."""
        keys, values = waiter.keys, self._values
        while waiter.position < len(keys) and keys[waiter.position] in values:
            waiter.position += 1
        if waiter.position == len(keys):
            waiter.release()
        else:
            self._waiters.setdefault(keys[waiter.position], []).append(waiter)


def _cost(key: str, value: bytes) -> int:
    return len(key) + len(value) + _BOOKKEEPING


def describe_keys(keys: Sequence[str], show: int = 8) -> str:
    """Describe keys for an error: ``3 keys (a, b, c) were``."""
    listed = ", ".join(keys[:show]) + (f" and {len(keys) - show} more" if len(keys) > show else "")
    return f"key {listed} was" if len(keys) == 1 else f"{len(keys)} keys ({listed}) were"
