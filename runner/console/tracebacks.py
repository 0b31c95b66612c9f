"""Tracebacks of many workers: each is shown in one piece, and only once if several ranks print the same. Pure; the
caller supplies all times.

A traceback arrives in many small writes, and the tracebacks of eight ranks that raise the same error would be mixed
line by line. So a traceback is held back until it is complete, which takes only a moment; other lines are shown at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdgloo.runner.console.last_lines import HEAD, without_rank
from hvdgloo.runner.console.lines import Source

QUIET = 0.1
"""Seconds without another line after which a traceback counts as complete: messages may have several lines."""

LONGEST = 1.0
"""Seconds after which a traceback is shown in any case."""

GATHER = 0.5
"""Seconds for which the ranks with the same traceback are collected."""

MEMORY = 10.0
"""Seconds after which the same traceback is shown again."""

_MOST_LINES = 2000
_HEAD = HEAD.encode()
_GROUP, _GROUP_ENDS = b"  + Exception Group " + _HEAD, b"    +" + 36 * b"-"
_SYNTAX = b'  File "'  # an error in the program's own file has no other head
_ALONE = b"hvdgloo.errors."  # an error that is shown without a traceback; see ``hvdgloo._job.excepthook``
_BEFORE = (b"Stopped because rank ", b"(without hvdgloo's own frames")  # what comes from there before an error
_HEADS = (_HEAD, _GROUP, _SYNTAX, _ALONE, *_BEFORE)
_CHAINS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


@dataclass(frozen=True)
class Piece:
    """Lines of one source, to be shown together."""

    source: Source
    lines: Sequence[bytes]


class _Held:
    """A traceback that is arriving, and the lines after it.

    Attributes:
        trace: the lines of the traceback.
        rest: the lines after it.
        inside: True until the traceback is complete.
    """

    def __init__(self, head: bytes, now: float) -> None:
        self._since = self._last = now
        self._grouped = head.startswith(_GROUP)
        self.trace = [head]
        self.rest: list[bytes] = []
        self.inside = not head.startswith(_ALONE)

    @property
    def due(self) -> float:
        """Latest time at which the traceback is shown."""
        latest = self._since + LONGEST
        return latest if self.inside else min(latest, self._last + QUIET)

    @property
    def error(self) -> str:
        """The line that names the exception."""
        lines = [line for line in self.trace if line.startswith(b"  | ") and line[4:5].strip()] if self._grouped else []
        return (lines or self.trace[-1:])[0].decode("utf-8", "replace").removeprefix("  | ").strip()

    def add(self, line: bytes, now: float) -> bool:
        """Append a line; return False if it begins another traceback, or there are too many lines."""
        if len(self.trace) + len(self.rest) >= _MOST_LINES:
            return False
        if not self.inside and line.startswith(_HEADS):
            words = [text for each in self.rest if (text := each.strip())]
            if len(words) != 1 or words[0] not in _CHAINS:
                return False
            self.trace += self.rest
            self.rest = []
            self.inside, self._grouped = True, line.startswith(_GROUP)
        self._last = now
        if not self.inside:
            self.rest.append(line)
            return True
        self.trace.append(line)
        ends = line.rstrip() == _GROUP_ENDS if self._grouped else not line.startswith((b" ", _HEAD)) and line.strip()
        self.inside = not ends
        return True


@dataclass
class _Shown:
    """A traceback that was shown, and the workers that printed the same one.

    Attributes:
        number: the worker that printed it first.
        numbers: all workers that printed it.
        same: the workers that remain to be reported.
    """

    since: float
    number: int
    error: str
    rest: Sequence[bytes]
    numbers: set[int]
    same: list[int] = field(default_factory=list)
    due: float = 0.0


class Tracebacks:
    """All tracebacks of a job."""

    def __init__(self) -> None:
        self._held: dict[Source, _Held] = {}
        self._shown: dict[tuple[bytes, ...], _Shown] = {}
        self._shown_with: dict[int, int] = {}

    def feed(self, source: Source, lines: Sequence[bytes], now: float) -> list[Piece]:
        """Process complete lines; return the pieces to show now."""
        shown: list[Piece] = []
        plain: list[bytes] = []
        for line in lines:
            bare = without_rank(line)  # or no two ranks would raise the same
            held = self._held.get(source)
            if held is not None and held.add(bare, now):
                continue
            if held is not None:
                shown += self._release(source, now)
            if bare.startswith(_HEADS):
                shown += [Piece(source, plain)] if plain else []
                plain = []
                self._held[source] = _Held(bare, now)
            else:
                plain.append(line)
        return [*shown, *([Piece(source, plain)] if plain else [])]

    def take(self, now: float, *, over: bool = False) -> list[Piece]:
        """Return the pieces that are due; all pieces if the output is over."""
        due = [source for source, held in self._held.items() if over or held.due <= now]
        return [piece for source in due for piece in self._release(source, now)]

    def same(self, now: float, *, over: bool = False) -> list[tuple[Sequence[int], str]]:
        """Return workers whose traceback equals one that was shown, and its error; each is returned once."""
        told = [shown for shown in self._shown.values() if shown.same and (over or shown.due <= now)]
        found: list[tuple[Sequence[int], str]] = [(shown.same, shown.error) for shown in told]
        for shown in told:
            shown.same = []
        return found

    def shown_with(self, number: int) -> int:
        """Return the worker whose traceback was shown in place of this one's last; itself if its own was."""
        return self._shown_with.get(number, number)

    @property
    def next(self) -> float | None:
        """Next time at which ``take`` or ``same`` has a result."""
        times = [held.due for held in self._held.values()]
        return min([*times, *(shown.due for shown in self._shown.values() if shown.same)], default=None)

    def _release(self, source: Source, now: float) -> list[Piece]:
        held = self._held.pop(source)
        number = source[0]
        self._shown = {key: each for key, each in self._shown.items() if each.same or now - each.since < MEMORY}
        key = tuple(line.rstrip() for line in held.trace)
        known = None if held.inside else self._shown.get(key)
        if known is not None and number not in known.numbers:
            known.numbers.add(number)
            known.same.append(number)
            self._shown_with[number] = known.number
            known.due = now + GATHER
            other = [line.strip() for line in held.rest] != [line.strip() for line in known.rest]
            return [Piece(source, held.rest)] if held.rest and other else []
        self._shown_with.pop(number, None)
        if not held.inside:
            self._shown[key] = _Shown(now, number, held.error, held.rest, {number})
        return [Piece(source, [*held.trace, *held.rest])]
