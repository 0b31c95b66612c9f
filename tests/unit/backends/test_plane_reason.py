"""The reasons for the ranks' way of exchanging tensors, in words that name hosts."""

from __future__ import annotations

import pytest

from hvdgloo._backends.plane_reason import why
from tests.support.topologies import on_hosts


@pytest.mark.parametrize(
    ("name", "slots", "device", "reason"),
    [
        ("local", (1,), "cpu", "a single rank"),
        ("shm", (3,), "cpu", "all ranks are on host h1"),
        ("gloo", (2,), "cpu", "memory is not shared on host h1"),
        ("gloo", (1, 1), "cpu", "hosts h1 and h2"),
        ("gloo", (1, 1, 1, 1), "cpu", "hosts h1, h2, h3 and h4"),
        ("gloo", (1, 1, 1, 1, 1, 1), "cpu", "hosts h1, h2, h3 and 3 more"),
        ("hierarchical", (2, 2), "cpu", "hosts h1 and h2, with several ranks each"),
        ("nccl", (2, 2), "cuda", "every rank has a GPU of its own"),
        ("shm", (2,), "cuda", "CUDA tensors go through host memory; host h1"),
        ("gloo", (1, 1), "cuda", "CUDA tensors go through host memory; hosts h1 and h2"),
    ],
)
def test_the_reason_names_what_decided(name: str, slots: tuple[int, ...], device: str, reason: str) -> None:
    assert why(name, on_hosts(*slots, first=1), range(sum(slots)), device) == reason
