"""Descriptors that a forked child must not keep open."""

from __future__ import annotations

import os
from collections.abc import Sequence


def bury(descriptors: Sequence[int]) -> None:
    """Close descriptors without freeing their numbers, which other code may still consider its own and close."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        if descriptor >= 0:
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)
