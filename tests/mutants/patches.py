"""A planted fault: a patch with a header that says what is broken and which tests must fail of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")
_FIELD = re.compile(r"(Part|Caught-by|Environment): +(\S.*)")


class PatchError(ValueError):
    """A patch that is malformed, or that does not fit the source any more."""


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines of a file and what takes their place, context included."""

    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: of the patch's file, without its suffix.
        story: what is broken, and what a user would suffer.
        part: where, in a few words.
        caught_by: pytest's ids of the tests, the cheapest that fail of it.
        environment: in which these tests run; empty for this interpreter's.
        hunks: by the file's path in the checkout.
    """

    name: str
    story: str
    part: str
    caught_by: tuple[str, ...]
    environment: str
    hunks: dict[str, tuple[Hunk, ...]]

    def applied(self, root: Path) -> dict[str, str]:
        """The broken files' text by path, as it would be in the checkout at ``root``; nothing is written.

        Raises:
            PatchError: a hunk's lines are not in their file, or more than once, or make no Python.
        """
        changed = {}
        for path, hunks in self.hunks.items():
            try:
                lines = (root / path).read_text(encoding="utf-8").split("\n")
            except OSError as error:
                raise PatchError(f"{path}: {error.strerror}") from None
            for hunk in hunks:
                places = list(_places(lines, hunk.old))
                if len(places) != 1:
                    raise PatchError(f"{path}: {len(places)} places for\n" + "\n".join(hunk.old))
                lines[places[0] : places[0] + len(hunk.old)] = hunk.new
            changed[path] = "\n".join(lines)
            try:
                compile(changed[path], path, "exec")
            except SyntaxError as error:
                raise PatchError(f"{path}: {error}") from None
        return changed


def read(path: Path) -> Mutant:
    """A patch's content.

    Raises:
        PatchError: it lacks its header, or is no unified diff.
    """
    return parse(path.stem, path.read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Mutant:
    """A patch out of its text.

    Raises:
        PatchError: it lacks its header, or is no unified diff.
    """
    header, found, diff = text.partition("\n--- a/")
    if not found:
        raise PatchError(f"{name}: there is no diff")
    fields: dict[str, list[str]] = {"Part": [], "Caught-by": [], "Environment": []}
    story = []
    for line in header.splitlines():
        match = _FIELD.fullmatch(line)
        if match:
            fields[match[1]].append(match[2])
        elif line and not line.startswith("diff "):
            story.append(line)
    if not story or len(fields["Part"]) != 1 or not fields["Caught-by"] or len(fields["Environment"]) > 1:
        raise PatchError(f"{name}: the header is a sentence, 'Part: ...' and lines 'Caught-by: <test id>'")
    hunks = dict(_file(name, part) for part in diff.split("\n--- a/"))
    environment = "".join(fields["Environment"])
    return Mutant(name, " ".join(story), fields["Part"][0], tuple(fields["Caught-by"]), environment, hunks)


def everything() -> list[Mutant]:
    """All patches, by name.

    Raises:
        PatchError: one of them is malformed.
    """
    return [read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _file(name: str, text: str) -> tuple[str, tuple[Hunk, ...]]:
    """The part of a diff that is about one file; it begins with the old path."""
    path, target, *lines = text.rstrip("\n").split("\n")
    if target != f"+++ b/{path}":
        raise PatchError(f"{name}: {path} is moved or removed, which is no small fault")
    hunks: list[tuple[list[str], list[str]]] = []
    for line in lines:
        if _HUNK.match(line):
            hunks.append(([], []))
            continue
        sign, rest = line[:1], line[1:]
        if sign not in ("", " ", "-", "+") or not hunks:
            raise PatchError(f"{name}: no line of a unified diff: {line}")
        if sign != "+":
            hunks[-1][0].append(rest)
        if sign != "-":
            hunks[-1][1].append(rest)
    if any(old == new for old, new in hunks):
        raise PatchError(f"{name}: a hunk changes nothing")
    return path, tuple(Hunk(tuple(old), tuple(new)) for old, new in hunks)


def _places(lines: Sequence[str], wanted: Sequence[str]) -> Iterator[int]:
    return (at for at in range(len(lines) - len(wanted) + 1) if tuple(lines[at : at + len(wanted)]) == tuple(wanted))
