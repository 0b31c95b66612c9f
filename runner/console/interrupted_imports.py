"""Suppression of a worker's traceback if it was interrupted during an import. Pure.

Ctrl-C reaches workers wherever they are. In the program's own code, the traceback shows what the program was doing, and
is kept. In the middle of ``import torch``, it is useless, is printed by every worker, and may be followed by complaints
about incomplete initialization.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEAD = b"Traceback (most recent call last):"
_STARTING = b"Fatal Python error: init"
_IMPORT = re.compile(rb"^\s+(import\s|from\s+\S+\s+import\b|File \"<frozen (importlib|site|runpy))")
_INTERRUPT = b"KeyboardInterrupt"


class InterruptedImport:
    """One worker's standard error, from the interruption on."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._muted = False

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Return the lines to show, of these and of those held back before."""
        shown: list[bytes] = []
        for line in lines:
            shown += self._feed(line)
        return shown

    def _feed(self, line: bytes) -> list[bytes]:
        if self._muted or line.startswith(_STARTING):
            self._muted = True
            return []
        head = line.startswith(_HEAD)
        if not self._held and not head:
            return [line]
        self._held.append(line)
        if head or line.startswith(b" ") or not line.strip():
            return []
        if line.startswith(_INTERRUPT) and any(_IMPORT.match(each) for each in self._held):
            self._held.clear()
            self._muted = True
        return self.finish()

    def finish(self) -> list[bytes]:
        """Return the lines still held back, because no more lines will arrive."""
        held, self._held = self._held, []
        return held
