"""Conversion of workers' bytes to whole, prefixed lines. Pure.

Lines end at a newline or a carriage return, so that progress bars still work: each state of a bar is a line that ends
in a carriage return, and on a terminal the next one overwrites it. The bytes of a line are never changed or decoded.

``Lines`` cuts one stream; ``Screen`` keeps track of the last line of one output, and thus of what must precede the next
piece: nothing, a line break, or the erasure of another rank's bar. On a terminal it also keeps the launcher's own list
below everything else.
"""

from __future__ import annotations

import re

MAX_LINE = 1024 * 1024
"""Longer lines are broken on the console, to bound memory. Per-rank files contain them unbroken."""

_ERASE = b"\x1b[K"
# A carriage return that is followed by a newline, or by nothing yet, does not end a line on its own.
_END = re.compile(rb"\r?\n|\r(?=[^\n])")

Source = tuple[int, int]
"""Worker and stream."""


class Lines:
    """A stream, cut into lines.

    Attributes:
        rest: the incomplete line after the last complete one.
        redrawn: the last complete line ended in a carriage return, so ``rest`` is the current state of a bar.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.redrawn = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, including their line ends."""
        looked_at = max(0, len(self.rest) - 1)  # a carriage return at the end was left undecided
        self.rest += data
        lines: list[bytes] = []
        position = 0
        for end in _END.finditer(self.rest, looked_at):
            line = self.rest[position : end.end()]
            position = end.end()
            self.redrawn = line.endswith(b"\r")
            # An empty state of a bar (tqdm begins with a carriage return) draws nothing.
            if line != b"\r":
                lines.append(line)
        self.rest = self.rest[position:]
        if len(self.rest) > MAX_LINE:
            lines.append(self.finish())
        return lines

    def finish(self) -> bytes:
        """Return the rest as a line, because nothing more follows; empty if there is none."""
        rest, self.rest = self.rest, b""
        return rest + b"\n" if rest and not rest.endswith(b"\r") else rest


class Screen:
    """The last line of one output, shared by all sources that write to it.

    Args:
        terminal: the output is a terminal, on which a carriage return moves the cursor.
    """

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal
        self._open: Source | None = None
        self._shown = b""
        self._is_bar = False
        self._drawn_by: Source | None = None
        self.below: tuple[bytes, ...] = ()
        """Our own lines, kept below all others; drawn by ``lower``, removed by ``lift``."""
        self._lowered = 0

    def lift(self) -> bytes:
        """Return the sequence that removes the lines below; it precedes any other output.

        It removes only as many lines as were drawn: if a terminal that became narrower has wrapped them, some remain,
        but no other line is ever erased.
        """
        lines, self._lowered = self._lowered, 0
        return b"\x1b[%dA\r\x1b[J" % lines if lines else b""

    def lower(self) -> bytes:
        """Return the sequence that draws the lines below, unless another line is unfinished; it follows any other
        output."""
        if not self.below or self._open is not None or self._drawn_by is not None:
            return b""
        self._lowered = len(self.below)
        return b"\r" + b"".join(line + b"\n" for line in self.below)

    def line(self, source: Source, prefix: bytes, line: bytes) -> bytes:
        """Return the bytes that show a complete line."""
        if self._open == source and line.startswith(self._shown):
            out = line[len(self._shown) :]
        else:
            out = self._break() + self._clear(source) + prefix + line
        self._open = None
        self._drawn_by = source if line.endswith(b"\r") else None
        return out

    def partial(self, source: Source, prefix: bytes, rest: bytes, *, bar: bool) -> bytes:
        """Return the bytes that show an unfinished line (a prompt, a bar)."""
        if self._open == source and rest.startswith(self._shown):
            out = rest[len(self._shown) :]
        else:
            out = self._break() + self._clear(source) + prefix + rest
        self._open, self._shown, self._is_bar = source, rest, bar
        return out

    def _break(self) -> bytes:
        """Return the bytes that end another source's unfinished line."""
        if self._open is None:
            return b""
        self._drawn_by = None
        return b"\r" + _ERASE if self._is_bar and self.terminal else b"\n"

    def _clear(self, source: Source) -> bytes:
        return _ERASE if self.terminal and self._drawn_by not in (None, source) else b""
