"""A writer thread, so that no other thread ever waits for a terminal, a pipe without a reader, or a hung disk.

Unwritten data waits in memory up to a limit, and beyond it in an anonymous temporary file. The user of ``backlog``
bounds that file: the supervisor gives workers no more credit while it is too long.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Protocol, TextIO

from hvdgloo._platform.files import overwrite

MEMORY = 4 * 1024 * 1024
_BATCH = 64 * 1024
_HEAD = struct.Struct("!II")


class Target(Protocol):
    """A destination of bytes. ``write`` may block, and may raise anything: it may be a stream of the user's."""

    def write(self, data: bytes) -> None: ...


class DescriptorTarget:
    """A file descriptor; ``write`` returns once all bytes are written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                # Another program that shares the terminal has made it non-blocking.
                select.select([], [self._descriptor], [])


class TextTarget:
    """A Python text stream, such as a notebook's replacement of ``sys.stdout``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream.write(data.decode("utf-8", "replace"))
        self._stream.flush()


class FileTarget:
    """A file that is created at once, readable for this user only, and written without a buffer.

    Args:
        path: the file's path.
        append: keep its content.
    """

    def __init__(self, path: str, *, append: bool = False) -> None:
        self._file: IO[bytes] = os.fdopen(overwrite(path, append=append, private=True), "wb", buffering=0)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


class Writer:
    """A thread that writes to several targets, in the order of ``put``.

    A target that fails is dropped, and ``on_failure(index, error)`` is called once from the writer's thread.
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[Target],
        on_failure: Callable[[int, Exception], None] = lambda index, error: None,
    ) -> None:
        self._targets: list[Target | None] = list(targets)
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._memory: deque[tuple[int, bytes]] = deque()
        self._in_memory = 0
        self._file: IO[bytes] | None = None
        self._read_at = self._write_at = 0
        self._writing = 0
        self._closed = False
        # Started with the first bytes: until then the launcher has only one thread, and can be forked.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, target: Target) -> int:
        """Add a target, and return its number for ``put``."""
        with self._changed:
            self._targets.append(target)
            return len(self._targets) - 1

    @property
    def backlog(self) -> int:
        """Bytes that have not been written yet."""
        return self._in_memory + self._write_at - self._read_at + self._writing

    def put(self, target: int, data: bytes) -> None:
        """Queue bytes to be written. Never waits for a target."""
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            spilled = self._write_at > self._read_at
            if (spilled or self._in_memory + len(data) > MEMORY) and self._spill(target, data):
                pass
            else:
                self._memory.append((target, data))
                self._in_memory += len(data)
            self._changed.notify()

    def wait_until_written(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; True once nothing is waiting to be written."""
        with self._changed:
            return self._changed.wait_for(lambda: self.backlog == 0, timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Stop the thread within ``timeout`` seconds. Queued data is dropped, and a blocked write abandoned."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._file is not None:
            self._file.close()

    def _spill(self, target: int, data: bytes) -> bool:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
            record = _HEAD.pack(target, len(data)) + data
            done = 0
            while done < len(record):
                done += os.pwrite(self._file.fileno(), record[done:], self._write_at + done)
        except OSError:
            return False  # the disk is full; memory, which credit bounds, has to suffice
        self._write_at += len(record)
        return True

    def _take(self) -> tuple[int, bytes] | None:
        """Return the next bytes of one target. The caller holds the lock."""
        if self._memory:
            target, data = self._memory.popleft()
            pieces = [data]
            size = len(data)
            while self._memory and self._memory[0][0] == target and size < _BATCH:
                pieces.append(self._memory.popleft()[1])
                size += len(pieces[-1])
            self._in_memory -= size
            self._writing = size
            return target, b"".join(pieces)
        if self._file is not None and self._write_at > self._read_at:
            descriptor = self._file.fileno()
            target, size = _HEAD.unpack(os.pread(descriptor, _HEAD.size, self._read_at))
            data = os.pread(descriptor, size, self._read_at + _HEAD.size)
            self._read_at += _HEAD.size + size
            if self._read_at == self._write_at:
                self._read_at = self._write_at = 0
                os.ftruncate(descriptor, 0)
            self._writing = size
            return target, data
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = 0
                if self.backlog == 0:
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self.backlog > 0)
                item = self._take()
                if item is None or self._closed:
                    self._writing = 0
                    self._changed.notify_all()
                    return
            self._write(*item)

    def _write(self, index: int, data: bytes) -> None:
        target = self._targets[index]
        if target is None:
            return
        try:
            target.write(data)
        except Exception as error:  # noqa: BLE001 - with this thread's end, the job would wait for its output for ever
            self._targets[index] = None
            self._on_failure(index, error)


def is_broken_pipe(error: Exception) -> bool:
    """Tell whether the reader of a pipe has gone, or the terminal was closed."""
    return isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO)
