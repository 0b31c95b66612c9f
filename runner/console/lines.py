"""Workers' bytes to whole, prefixed lines. Pure.

Lines end at a newline or a carriage return, so that progress bars stay what they are: each state of a bar is a line
that ends in a carriage return, and on a terminal the next one overwrites it. The bytes of a line are never changed or
decoded.

``Lines`` cuts one stream; ``Screen`` knows what stands on the last line of one output and so what must precede the
next piece: nothing, a line break, or erasing a bar of another rank that is still there. On a terminal it also keeps
the launcher's own list below everything else.
"""

from __future__ import annotations

import re

MAX_LINE = 1024 * 1024
"""Longer lines are broken on the console, to bound memory. Per-rank files hold them unbroken."""

_ERASE = b"\x1b[K"
# A carriage return that is followed by a newline, or by nothing yet, does not end a line by itself.
_END = re.compile(rb"\r?\n|\r(?=[^\n])")

Source = tuple[int, int]
"""Rank and stream."""


class Lines:
    """One stream, cut into lines.

    Attributes:
        rest: what follows the last complete line.
        redrawn: the last complete line ended in a carriage return, so ``rest`` is a bar's present state.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.redrawn = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, with their ends."""
        looked_at = max(0, len(self.rest) - 1)  # a carriage return at the end was undecided
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
        """The rest as a line, when nothing follows any more; empty if there is none."""
        rest, self.rest = self.rest, b""
        return rest + b"\n" if rest and not rest.endswith(b"\r") else rest


class Screen:
    """The last line of one output, shared by all sources that write to it.

    Args:
        terminal: it is one, where a carriage return moves the cursor.
    """

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal
        self._open: Source | None = None
        self._shown = b""
        self._is_bar = False
        self._drawn_by: Source | None = None
        self.below: tuple[bytes, ...] = ()
        """Lines of ours that stand below all others; drawn by ``lower``, taken away again by ``lift``."""
        self._lowered = 0

    def lift(self) -> bytes:
        """What to write before anything else: takes the lines below away.

        Only as many lines as were drawn: where a terminal that became narrower has broken them into more, a part stays
        behind, but nothing of anybody else's is ever erased.
        """
        lines, self._lowered = self._lowered, 0
        return b"\x1b[%dA\r\x1b[J" % lines if lines else b""

    def lower(self) -> bytes:
        """What to write after anything else: draws the lines below, unless somebody's line is unfinished."""
        if not self.below or self._open is not None or self._drawn_by is not None:
            return b""
        self._lowered = len(self.below)
        return b"\r" + b"".join(line + b"\n" for line in self.below)

    def line(self, source: Source, prefix: bytes, line: bytes) -> bytes:
        """What to write for a complete line."""
        if self._open == source and line.startswith(self._shown):
            out = line[len(self._shown) :]
        else:
            out = self._break() + self._clear(source) + prefix + line
        self._open = None
        self._drawn_by = source if line.endswith(b"\r") else None
        return out

    def partial(self, source: Source, prefix: bytes, rest: bytes, *, bar: bool) -> bytes:
        """What to write so that an unfinished line (a prompt, a bar) can be seen."""
        if self._open == source and rest.startswith(self._shown):
            out = rest[len(self._shown) :]
        else:
            out = self._break() + self._clear(source) + prefix + rest
        self._open, self._shown, self._is_bar = source, rest, bar
        return out

    def _break(self) -> bytes:
        """Get off another source's unfinished line."""
        if self._open is None:
            return b""
        self._drawn_by = None
        return b"\r" + _ERASE if self._is_bar and self.terminal else b"\n"

    def _clear(self, source: Source) -> bytes:
        return _ERASE if self.terminal and self._drawn_by not in (None, source) else b""
