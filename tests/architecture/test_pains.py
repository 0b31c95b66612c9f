"""Each numbered pain (tests/pains.md) has a test, and each number that a test names is in the list."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.architecture.source import ROOT, everything

LISTED = [int(number) for number in re.findall(r"^\| (\d+) \|", (ROOT / "tests/pains.md").read_text(), re.MULTILINE)]

_IN_PROSE = re.compile(r"\bpains? (\d+(?:(?:, | and )\d+)*)", re.IGNORECASE)
_IN_NAMES = re.compile(r"_pain_(\d+)")


def named(texts: Iterable[str]) -> set[int]:
    """Return the numbers of the pains that texts name."""
    found = [match[1] for text in texts for pattern in (_IN_PROSE, _IN_NAMES) for match in pattern.finditer(text)]
    return {int(number) for numbers in found for number in re.findall(r"\d+", numbers)}


def test_the_list_has_each_number_once() -> None:
    assert list(range(1, len(LISTED) + 1)) == LISTED
    assert len(LISTED) >= 30


def test_each_pain_has_a_test_and_each_number_is_listed() -> None:
    tests = (module.text for module in everything() if re.match(r"tests\..*\btest_", module.name))
    assert named(tests) == set(LISTED)


def test_numbers_are_found_however_they_are_written() -> None:
    assert named(["Pains 7, 8 and 9.", "(pain 22)", "def test_x_pain_14() -> None:"]) == {7, 8, 9, 14, 22}
