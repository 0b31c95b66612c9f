"""The selection of tests: those with the mark ``extended`` are left to ``make test-extended``.

They repeat, by more planes, more hosts, more accidents or more input, what others show once; or they take as much
processor time as a hundred others. What they test, ``make test`` tests as well, though less of it.
"""

from __future__ import annotations

from typing import Any

import pytest


def extended(*values: Any) -> list[Any]:
    """Values of a parameter whose tests have the mark: ``parametrize("seed", [0, *extended(1, 2)])``."""
    return [pytest.param(value, marks=pytest.mark.extended) for value in values]
