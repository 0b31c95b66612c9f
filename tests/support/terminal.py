"""A real pseudo-terminal with a program on it, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte


class Terminal:
    """A program that leads a session on a terminal of its own.

    Attributes:
        raw: every byte that it has written.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        columns: int = 100,
        rows: int = 30,
        stdout: int | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        self.raw = b""
        self.columns, self.rows = columns, rows
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._set_size(columns, rows)
        self.process = subprocess.Popen(
            argv,
            env={"TERM": "xterm-256color", **env},
            cwd=cwd,
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(slave)

    def resize(self, columns: int, rows: int) -> None:
        """As if a user had dragged the window's corner: the program gets SIGWINCH."""
        self.pump()
        self._set_size(columns, rows)
        self._screen.resize(rows, columns)
        self.columns, self.rows = columns, rows

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def pump(self, patience: float = 0.0) -> bool:
        """Read what has arrived; False once the other end is closed."""
        while select.select([self._master], [], [], patience)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return False  # the last one who had it open has gone
            if not data:
                return False
            self.raw += data
            self._stream.feed(data)
            patience = 0.0
        return True

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, without empty lines at the end."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        """Wait until the screen's text matches; the match."""
        return self.until(lambda: re.search(pattern, self.text), timeout, pattern)

    def until(self, condition: Callable[[], object], timeout: float, what: str) -> re.Match[str]:
        deadline = time.monotonic() + timeout
        while True:
            alive = self.pump(0.02)
            found = condition()
            if found:
                return found  # type: ignore[return-value]
            assert alive, f"the program ended without {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}\n{self.text}"

    def end(self, timeout: float = 20.0) -> int:
        """Wait for the program's end; its exit status."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
            self.pump(0.05)
        self.pump(0.1)
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            for signum in (signal.SIGCONT, signal.SIGTERM, signal.SIGHUP):
                self.process.send_signal(signum)
            try:
                self.end(10)
            except AssertionError:
                self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def terminal(*arguments: str, env: Mapping[str, str], cwd: Path, **size: int) -> Iterator[Terminal]:
    """This Python on a terminal, with these arguments."""
    made = Terminal([sys.executable, *arguments], env=env, cwd=cwd, **size)
    try:
        yield made
    finally:
        made.close()
