"""Reports that ranks of several hosts exchange once an operation has failed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvdgloo._backends.shm.calls import Call
from hvdgloo.types import DType

torch = pytest.importorskip("torch")
from hvdgloo.torch.distributed._failures import ALL_ALIKE, Failures  # noqa: E402
from hvdgloo.torch.distributed._store import TorchStore  # noqa: E402

SUM = Call("all_reduce", DType.FLOAT32, "SUM", count=4)


def describe(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} (host h{rank})" for rank in ranks)


def ranks(size: int) -> list[Failures]:
    store: Any = torch.distributed.HashStore()
    return [Failures(TorchStore(store), rank, size, describe) for rank in range(size)]


def explained(*asked: tuple[Failures, str, Sequence[int]]) -> list[str]:
    """Explain failures on several ranks at the same time."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda each: each[0].explain(each[1], each[2]), asked))


def test_every_rank_learns_of_calls_that_differ() -> None:
    group = ranks(3)
    for number in range(100):
        for rank in group:
            rank.begin(Call("barrier") if rank is group[2] and number == 97 else SUM)
    group[0].begin(SUM)  # which is ahead
    found = explained(*((rank, "Gloo: connection closed", ()) for rank in group))
    for text in found:
        assert "called all_reduce(SUM, 4 x float32)" in text, found
        assert "rank 2 called barrier" in text, found
        assert text.endswith(ALL_ALIKE), found


def test_every_rank_learns_of_a_process_that_only_its_own_host_sees() -> None:
    group = ranks(4)
    found = explained(
        (group[0], "closed by peer", ()),
        (group[1], "closed by peer", ()),
        (group[2], "rank 3 has ended, as seen here", (3,)),
    )
    assert found == 2 * ["rank 3 (host h3) has ended"] + ["rank 3 has ended, as seen here"]


def test_a_process_that_ended_once_it_had_reported_its_failure_is_not_the_cause() -> None:
    group = ranks(3)
    for rank in group:
        rank.begin(Call("barrier") if rank is group[2] else SUM)
    (early,) = explained((group[2], f"rank 2 called barrier; {ALL_ALIKE}", ()))
    late = explained((group[0], "closed by peer", (2,)), (group[1], "rank 2 has ended", (2,)))
    for text in (early, *late):
        assert "rank 2 called barrier" in text, text


def test_ranks_that_do_not_answer_are_named() -> None:
    first, second, _ = ranks(3)
    found = explained((first, "closed by peer", ()), (second, "timed out", ()))
    said = "; no answer from rank 2 (host h2): ended, unreachable, or busy with something else"
    assert found == ["closed by peer" + said, "timed out" + said]


def test_a_store_that_has_ended_leaves_what_the_rank_knows_itself() -> None:
    class Broken:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Connection reset by peer")

    store: Any = Broken()
    assert Failures(TorchStore(store), 0, 2, describe).explain("closed by peer", ()) == "closed by peer"
