"""The end of one worker's output, for the summary of a failed job. Pure.

Much may follow the traceback that matters: loggers that close, complaining children, a C library's last messages. So
the last traceback is kept as well, and precedes the last lines if these do not include it.
"""

from __future__ import annotations

import re
from collections import deque
from typing import AnyStr

HEAD = "Traceback (most recent call last):"

KEPT = 10
"""Maximum number of lines in a summary."""

_OF_TRACE = 5  # of them, the end of a traceback that was followed by more than the others can show
_FOLLOWING = 100  # lines after which a traceback no longer counts as the reason why the worker ended
_WIDTH = 400
_RANK = re.compile(r"\[rank\d+\]: ")
_RANK_BYTES = re.compile(_RANK.pattern.encode())
# First words of errors that are shown without a traceback: see ``_job.excepthook``, and mistakes in the program's text.
_ERRORS = ("hvdgloo.errors.", "SyntaxError: ", "IndentationError: ", "TabError: ")


def without_rank(line: AnyStr) -> AnyStr:
    """Remove the rank that torch.distributed puts before each line of a traceback once a process group exists."""
    found = _RANK.match(line) if isinstance(line, str) else _RANK_BYTES.match(line)
    return line[found.end() :] if found else line


class LastLines:
    """The last lines of one worker, from both streams in order of arrival."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, float]] = deque(maxlen=KEPT)
        self._trace: deque[tuple[str, float]] = deque(maxlen=_OF_TRACE)
        self._unfinished = False
        self._following = 0

    def add(self, text: str, position: float, *, error_stream: bool) -> None:
        """Process a line.

        Args:
            position: the number of lines printed before it, by all workers.
            error_stream: it was written to stderr, where tracebacks appear.
        """
        self._lines.append((text[:_WIDTH], position))
        text = without_rank(text)
        line = text[:_WIDTH], position
        if error_stream and (text == HEAD or (text.startswith(_ERRORS) and not self._unfinished)):
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
        """Return the lines of the summary, with a note in place of omitted ones."""
        if not self._relevant or self._following < KEPT:
            return list(self._lines)
        rest = list(self._lines)[len(self._trace) + 1 :]
        left_out = self._following - len(rest)
        return [*self._trace, (f"[{left_out} more line{'s' if left_out > 1 else ''}]", rest[0][1]), *rest]

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines to show."""
        return tuple(text for text, _ in self._chosen())

    @property
    def first_position(self) -> float | None:
        """Position of the first of ``lines``; None if there is none."""
        return min((position for _, position in self._chosen()), default=None)

    @property
    def exception(self) -> str:
        """The line that names the exception of the last relevant traceback; empty if there is none."""
        return self._trace[-1][0] if self._relevant else ""

    @property
    def cause(self) -> str:
        """The most likely reason for the worker's failure: the exception of its last traceback, otherwise its last
        line."""
        return self.exception or (self._lines[-1][0] if self._lines else "")
