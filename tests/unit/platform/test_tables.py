"""Tables in plain text."""

from __future__ import annotations

from hvdgloo._platform.tables import aligned


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert aligned([("name", "size"), ("a", "1"), ("longer", "1,000")], right={1}) == [
        "name     size",
        "a           1",
        "longer  1,000",
    ]


def test_last_cells_may_be_missing_and_lines_end_without_spaces() -> None:
    assert aligned([("a", "b"), ("c",), ("", "")]) == ["a  b", "c", ""]
    assert aligned([]) == []
