"""The last lines that each rank wrote, with a bound on their memory."""

from __future__ import annotations

import codecs
import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from hvdgloo._observe.view import OutputLine

_LINES = 50_000  # of all ranks together
_CHARACTERS = 16 * 2**20
_LEAST_LINES = 50  # of each rank, however many there are
_LEAST_CHARACTERS = 16 * 2**10
_LONGEST = 4096
_LONGEST_PART = 4 * _LONGEST  # of a line without an end yet: colours and overwritten text are removed later

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
"""Colours, cursor movements and titles for terminals (ECMA-48's CSI, OSC and two-character sequences)."""


class Output:
    """The output of ranks: takes it in pieces as they arrive, and returns it in lines.

    A progress bar that overwrites itself (carriage returns) is kept as a terminal shows it in the end. Bytes that are
    not UTF-8 become replacement characters. Lines longer than 4,096 characters are cut.
    """

    def __init__(self) -> None:
        self.number = 0
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._ranks: dict[int, _Tail] = {}

    def write(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Add what a rank wrote to its standard output (1) or standard error (2)."""
        self._keep(rank, stream, self._streams.setdefault((rank, stream), _Stream()).feed(data), now)

    def finish(self, rank: int, now: float) -> None:
        """Take the last text of a rank, which writes no more for now, as a line even without an end."""
        for stream in (1, 2):
            if (rank, stream) in self._streams:
                self._keep(rank, stream, self._streams.pop((rank, stream)).end(), now)

    def finish_all(self, now: float) -> None:
        """Call ``finish`` for all ranks."""
        for rank in {rank for rank, _ in self._streams}:
            self.finish(rank, now)

    def lines(
        self, rank: int | None = None, after: int = 0, before: int | None = None, search: str = "", limit: int = 500
    ) -> list[OutputLine]:
        """Return at most ``limit`` lines in ascending order: the first ones after line number ``after``, or if that
        is 0 the last ones (before ``before``).

        Args:
            rank: the rank that wrote them; None for all ranks.
            search: text that each line must contain, in upper or lower case.
        """
        tails = [self._ranks[rank]] if rank in self._ranks else [] if rank is not None else list(self._ranks.values())
        wanted = search.casefold()

        def matching(lines: Iterable[OutputLine]) -> Iterator[OutputLine]:
            return (
                line
                for line in lines
                if (before is None or line.number < before) and (not wanted or wanted in line.text.casefold())
            )

        newest_first = heapq.merge(*(reversed(tail.lines) for tail in tails), key=_number, reverse=True)
        if after:  # usually few lines: a reader that follows the output asks each second
            found = list(matching(takewhile(lambda line: line.number > after, newest_first)))[::-1]
            return found[:limit]
        return list(islice(matching(newest_first), limit))[::-1]

    def _keep(self, rank: int, stream: int, texts: list[str], now: float) -> None:
        tail = self._ranks.setdefault(rank, _Tail())
        for text in texts:
            self.number += 1
            tail.add(OutputLine(self.number, now, rank, stream, text))
        tail.trim(
            max(_LEAST_LINES, _LINES // len(self._ranks)), max(_LEAST_CHARACTERS, _CHARACTERS // len(self._ranks))
        )


def _number(line: OutputLine) -> int:
    return line.number


class _Tail:
    """The last lines of one rank."""

    def __init__(self) -> None:
        self.lines: deque[OutputLine] = deque()
        self._characters = 0

    def add(self, line: OutputLine) -> None:
        self.lines.append(line)
        self._characters += len(line.text)

    def trim(self, lines: int, characters: int) -> None:
        while len(self.lines) > lines or (self._characters > characters and len(self.lines) > 1):
            self._characters -= len(self.lines.popleft().text)


class _Stream:
    """Bytes in, lines out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._part = ""

    def feed(self, data: bytes) -> list[str]:
        *lines, part = (self._part + self._decoder.decode(data)).split("\n")
        if len(part) > _LONGEST_PART:  # an endless line, or a progress bar
            part = part[: _LONGEST_PART // 2] if "\r" not in part else part[part.rstrip("\r").rfind("\r") + 1 :]
            part = part[:_LONGEST_PART]
        self._part = part
        return [_shown(line) for line in lines]

    def end(self) -> list[str]:
        last = self._part + self._decoder.decode(b"", final=True)
        return [_shown(last)] if last else []


def _shown(line: str) -> str:
    """Return what a terminal shows of a line in the end."""
    plain = _ESCAPES.sub("", line).rstrip("\r")
    return plain[plain.rfind("\r") + 1 :][:_LONGEST]
