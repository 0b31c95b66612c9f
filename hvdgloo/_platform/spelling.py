"""Pieces of messages: what a mistyped word was probably meant to be, and how to show others' texts in ours. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_LONE = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """Return the text with each byte that is not UTF-8 spelled out (``\\xff``), so that any encoder takes it.

    Python keeps such bytes of arguments, paths and variables as lone surrogates, which JSON and HTML cannot have.
    """
    return text if text.isascii() else _LONE.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def in_one_line(text: str) -> str:
    """Return a text as it can be shown within a line: what is not printable is escaped as in Python."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in encodable(text))


def followed_by(text: object, clause: str) -> str:
    """Continue another text, such as an error's, in the same message.

    Args:
        text: may end in a mark of its own, as a question does; then the clause becomes a sentence after it.
        clause: begins with a small letter, unless its first word is a name.
    """
    shown = str(text).rstrip()
    if shown.endswith((".", "?", "!")):
        return f"{shown} {clause[0].upper()}{clause[1:]}"
    return f"{shown}; {clause}"


def suggestions(word: str, known: Iterable[str], limit: int = 2) -> list[str]:
    """Return the known words that ``word`` is probably meant to be, most probable first.

    Words are compared by the number of typing slips: a letter too many, missing or wrong, or two letters swapped.
    Dashes and underscores do not count as letters; a known word that merely begins like this one comes after those.
    """
    bare = _bare(word)
    ranked = []
    for candidate in known:
        target = _bare(candidate)
        distance = float(slips(bare, target))
        if distance >= len(bare) or distance > max(1, len(bare) // 3):
            if len(bare) < 3 or not target.startswith(bare):
                continue
            distance = math.inf
        same_dashes = _dashes(word) == _dashes(candidate)
        ranked.append((distance, not same_dashes, abs(len(target) - len(bare)), candidate))
    ranked.sort()
    best = ranked[:1]
    return [entry[-1] for entry in ranked if entry[:2] == best[0][:2]][:limit]


def _bare(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def _dashes(flag: str) -> int:
    return len(flag) - len(flag.lstrip("-"))


def slips(one: str, other: str, most: float = math.inf) -> int:
    """Return the number of insertions, deletions, substitutions and swaps of neighbours that lead from one word to
    another.

    Args:
        most: the result is of no interest where it is greater, and may then be any greater number.
    """
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return min(row)
        before, last = last, row
    return last[-1]
