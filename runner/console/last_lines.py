"""The end of what one worker printed, for the summary of a job that failed. Pure.

Much may follow the traceback that matters: loggers that close, children that complain, a C library's last words. So the
last traceback is kept, too, and shown before the last lines if these do not reach back to it.
"""

from __future__ import annotations

import re
from collections import deque
from typing import AnyStr

HEAD = "Traceback (most recent call last):"

KEPT = 10
"""Lines that a summary has at most."""

_OF_TRACE = 5  # of them, the end of a traceback that was followed by more than the others can show
_FOLLOWING = 100  # lines after which a traceback no longer counts as the reason why the worker ended
_WIDTH = 400
_RANK = re.compile(r"\[rank\d+\]: ")
_RANK_BYTES = re.compile(_RANK.pattern.encode())
_ERROR = "hvdgloo.errors."  # the first word of an error that is shown without a traceback; see ``_job.excepthook``


def without_rank(line: AnyStr) -> AnyStr:
    """Remove what torch.distributed writes before each line of a traceback once a process group has been made."""
    found = _RANK.match(line) if isinstance(line, str) else _RANK_BYTES.match(line)
    return line[found.end() :] if found else line


class LastLines:
    """Takes in one worker's lines, of both streams, in the order of their arrival."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, float]] = deque(maxlen=KEPT)
        self._trace: deque[tuple[str, float]] = deque(maxlen=_OF_TRACE)
        self._unfinished = False
        self._following = 0

    def add(self, text: str, position: float, *, error_stream: bool) -> None:
        """Take in a line.

        Args:
            position: how many lines had been printed before it, by all workers.
            error_stream: it was written to stderr, where tracebacks are.
        """
        self._lines.append((text[:_WIDTH], position))
        text = without_rank(text)
        line = text[:_WIDTH], position
        if error_stream and (text == HEAD or (text.startswith(_ERROR) and not self._unfinished)):
            self._trace.clear()
            self._trace.append(line)
            self._unfinished = text == HEAD
            self._following = 0
        elif error_stream and self._unfinished:
            self._trace.append(line)
            self._unfinished = text.startswith(" ")
        else:
            self._following += 1

    @property
    def _relevant(self) -> bool:
        return bool(self._trace) and not self._unfinished and self._following < _FOLLOWING

    def _chosen(self) -> list[tuple[str, float]]:
        """The lines of the summary; an empty text stands for what is left out."""
        if not self._relevant or self._following < KEPT:
            return list(self._lines)
        rest = list(self._lines)[len(self._trace) + 1 :]
        left_out = self._following - len(rest)
        return [*self._trace, (f"[{left_out} more line{'s' if left_out > 1 else ''}]", rest[0][1]), *rest]

    @property
    def lines(self) -> tuple[str, ...]:
        """What to show of them."""
        return tuple(text for text, _ in self._chosen())

    @property
    def first_position(self) -> float | None:
        """Where the first of ``lines`` was printed; None if there is none."""
        return min((position for _, position in self._chosen()), default=None)

    @property
    def exception(self) -> str:
        """The line that names the exception of the last traceback; empty if there is none that matters."""
        return self._trace[-1][0] if self._relevant else ""

    @property
    def cause(self) -> str:
        """The line that most likely says why the worker failed: its last traceback's, else its last one."""
        return self.exception or (self._lines[-1][0] if self._lines else "")
