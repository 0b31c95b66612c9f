"""Tables in plain text. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, with columns as wide as their longest cell, and two spaces between them.

    Args:
        rows: cells of each row; the last cells may be missing.
        right: indices of columns whose cells are aligned on the right.
    """
    count = max(map(len, rows), default=0)
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(count)]
    return [
        "  ".join(cell.rjust(widths[n]) if n in right else cell.ljust(widths[n]) for n, cell in enumerate(row)).rstrip()
        for row in rows
    ]
