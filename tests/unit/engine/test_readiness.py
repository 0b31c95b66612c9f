"""Counting announcements many at a time: against a plain model that keeps a set of sources for each number."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._engine.readiness import BLOCK_BITS, Block, Ledger, bits_of, mask_of, masks_of, numbers_of


@given(st.lists(st.integers(0, 5 << BLOCK_BITS), unique=True))
def test_numbers_and_masks_say_the_same(numbers: list[int]) -> None:
    masks = masks_of(tuple(numbers))
    assert sorted(number for block, mask in masks for number in numbers_of(block, mask)) == sorted(numbers)
    assert len({block for block, _ in masks}) == len(masks)
    assert mask_of(numbers[:50]) == sum(1 << number for number in numbers[:50])
    assert bits_of(mask_of(numbers[:50])) == sorted(numbers[:50])


@given(st.integers(0, 1 << BLOCK_BITS), st.integers(1, 3 << BLOCK_BITS))
def test_a_run_of_numbers_is_as_its_numbers_one_by_one(first: int, count: int) -> None:
    numbers = tuple(range(first, first + count))
    assert sorted(masks_of(numbers)) == sorted(masks_of(numbers[::-1]))


@given(st.integers(1, 9), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_number_is_whole_when_all_sources_have_announced_it(sources: int, numbers: int, rng: random.Random) -> None:
    """Also when it is announced twice by one source, or withdrawn and opened again, and from round to round."""
    block = Block(4096, 7, range(10, 10 + sources))
    block.open = block.used = (1 << numbers) - 1
    model: dict[int, tuple[float, set[int]]] = {}
    for time in range(60):
        source, mask = rng.choice(sorted(block.sources)), rng.randrange(1 << numbers)
        expected = 0
        for bit in bits_of(mask):
            announced = model.setdefault(bit, (float(time), set()))[1]
            announced.add(source)
            if len(announced) == sources:
                expected |= 1 << bit
                del model[bit]
        assert block.announce(source, mask, float(time)) == expected
        assert block.begun == mask_of(model)
        everything = [(4096 + bit, since, announced) for bit, (since, announced) in sorted(model.items())]
        assert [(number, since, set(announced)) for number, since, announced in block.waiting()] == everything
        if rng.random() < 0.2:
            mask = rng.randrange(1 << numbers)
            taken = [(number, since, set(announced)) for number, since, announced in block.withdraw(mask)]
            assert taken == [entry for entry in everything if mask >> entry[0] - 4096 & 1]
            assert not block.open & mask
            block.open |= mask
            model = {bit: entry for bit, entry in model.items() if not mask >> bit & 1}


def test_numbers_are_issued_by_set_and_never_again() -> None:
    ledger = Ledger()
    block = 1 << BLOCK_BITS
    issued = [ledger.issue(0) for _ in range(block + 1)]
    assert issued[:3] == [0, 1, 2]
    assert issued[-2:] == [block - 1, block]
    of_a_set = [ledger.issue(3), ledger.issue(3)]
    assert of_a_set == [2 * block, 2 * block + 1]
    assert ledger.issue(0) == block + 1
    ledger.drop_set(3)
    assert ledger.issue(3) == 3 * block  # a new set under the old id


def test_a_block_goes_with_its_last_number() -> None:
    ledger = Ledger()
    for number in (0, 5000, 1):
        block, bit = ledger.learn(number, 0, (0, 1))
    assert (block, bit) == ledger.place(1)
    assert not block.announce(0, bit, 1.0)
    assert ledger.busy
    ledger.forget(1)
    assert not ledger.busy
    assert sorted(ledger.blocks) == [0, 4]
    ledger.forget(0)
    assert sorted(ledger.blocks) == [4]
    ledger.learn(2, 1, (0,))
    ledger.drop_set(1)
    assert sorted(ledger.blocks) == [4]


def test_what_was_withdrawn_is_counted_again_from_the_beginning() -> None:
    ledger = Ledger()
    block, bit = ledger.learn(0, 0, (3, 4))
    block.announce(3, bit, 1.0)
    assert block.withdraw(bit) == [(0, 1.0, [3])]
    assert not block.open
    ledger.reopen(0)
    assert block.open == bit
    assert not block.announce(4, bit, 2.0)
    assert block.announce(3, bit, 3.0) == bit
