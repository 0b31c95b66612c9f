"""Run-length encoding of ranks and numbers in messages: the start and the length of each run of consecutive ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from hvdgloo._engine.readiness import BLOCK_BITS, Masks

_MAX_MEMBERS = 1 << 20
"""The largest number of ranks or numbers in a set. A run is a few bytes that stand for any number of them."""

T = TypeVar("T")

_BLOCK = 1 << BLOCK_BITS


def runs_of_mask(mask: int, first: int = 0) -> tuple[int, ...]:
    """The runs of a mask's bits, the lowest of which stands for ``first``."""
    runs: list[int] = []
    while mask:
        low = mask & -mask
        start = low.bit_length() - 1
        ones = mask >> start
        length = (~ones & (ones + 1)).bit_length() - 1  # the position of the lowest zero
        runs += (first + start, length)
        mask = ones >> length << start + length
    return tuple(runs)


def mask_of_runs(runs: Sequence[int]) -> int:
    """The inverse of ``runs_of_mask``.

    Raises:
        ValueError: a run has no length or does not lie after the one before, or there are too many members.
    """
    mask = end = 0
    for start, length in _pairs(runs):
        if start + length > _MAX_MEMBERS:
            raise ValueError("not a control message: there are not so many ranks")
        if start < end or not length:
            raise ValueError("not a control message: runs of ranks that do not follow each other")
        end = start + length
        mask |= ((1 << length) - 1) << start
    return mask


def runs_of_masks(masks: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The runs of numbers that are given as blocks and masks."""
    runs: tuple[int, ...] = ()
    for block, mask in masks:
        runs += runs_of_mask(mask, block * _BLOCK)
    return runs


def masks_of_runs(runs: Sequence[int]) -> Masks:
    """The inverse of ``runs_of_masks``.

    Raises:
        ValueError: a run has no length, or there are too many members.
    """
    masks: dict[int, int] = {}
    total = 0
    for start, length in _pairs(runs):
        if not length:
            raise ValueError("not a control message: an empty run of numbers")
        total += length
        if total > _MAX_MEMBERS:
            raise ValueError("not a control message: runs of too many numbers")
        while length:
            block, bit = divmod(start, _BLOCK)
            here = min(length, _BLOCK - bit)
            masks[block] = masks.get(block, 0) | ((1 << here) - 1) << bit
            start, length = start + here, length - here
    return tuple(masks.items())


def runs_of_items(items: tuple[int | T, ...]) -> tuple[int | T, ...]:
    """Consecutive numbers of a list as start and length, in its order, and everything else in it as it is."""
    if items and isinstance(items[0], int):
        start, count = items[0], len(items)
        if items == tuple(range(start, start + count)):  # usually a steady step
            return start, count
    runs: list[int | T] = []
    length = expected = -1
    for item in items:
        if item == expected:
            length += 1
            expected += 1
            continue
        if length > 0:
            runs.append(length)
        runs.append(item)
        if isinstance(item, int):
            length, expected = 1, item + 1
        else:
            length = expected = -1
    if length > 0:
        runs.append(length)
    return tuple(runs)


def items_of_runs(runs: tuple[int | T, ...]) -> tuple[int | T, ...]:
    """The inverse of ``runs_of_items``. A run is a few bytes that may stand for any number of integers, so their total
    is limited.

    Raises:
        ValueError: a run has no length, or there are too many numbers.
    """
    items: list[int | T] = []
    parts = iter(runs)
    for part in parts:
        if not isinstance(part, int):
            items.append(part)
            continue
        length = next(parts, None)
        if not isinstance(length, int):
            raise ValueError("not a control message: a run without a length")
        if len(items) + length > _MAX_MEMBERS:
            raise ValueError("not a control message: runs of too many numbers")
        items.extend(range(part, part + length))
    return tuple(items)


def _pairs(runs: Sequence[int]) -> Iterable[tuple[int, int]]:
    if len(runs) % 2:
        raise ValueError("not a control message: a run without a length")
    return zip(runs[::2], runs[1::2], strict=True)
