"""Encoded sums: the same bits on all ranks and in every run, what crosses, and what stays exact."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends import kernels, narrow
from hvdgloo._backends.base import Encoding, Work
from hvdgloo._backends.codec import Values, codec_of
from hvdgloo._backends.cube import Cube
from hvdgloo._backends.hierarchical import HierarchicalBackend, Layout, Thresholds
from hvdgloo._backends.local import LocalBackend, LocalGroup
from hvdgloo._backends.narrow import Narrow
from hvdgloo._backends.progress_thread import ProgressThread
from hvdgloo.types import Buffer, DType, ReduceOp, WireFormat
from tests.support.backends import finish
from tests.support.lines import Lines
from tests.support.selection import extended

FORMS = [WireFormat.BF16, WireFormat.INT8, WireFormat.INT4]
ERRORS = {WireFormat.BF16: 0.006, WireFormat.INT8: 0.016, WireFormat.INT4: 0.26}
"""The greatest error of a sum of random values, relative to it."""

LAYOUTS = [(2, 2), (3, 1, 2), (2, 1, 1, 1, 1, 1), *extended((2, 1), (1, 3), (1,) * 5)]
ALWAYS, NEVER = Thresholds(1, 1), Thresholds(1 << 60, 1 << 60)

every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks in a piece, several chunks in a tensor, and pieces in more than one room, which they do not fill."""
    monkeypatch.setattr(narrow, "PIECE", 512)
    monkeypatch.setattr(narrow, "CHUNK", 24 * 256)
    monkeypatch.setattr(narrow, "_ROOM", 1500)


class Flat:
    """Ranks as threads, each with connections to all others.

    Args:
        cube: connect them as a group of many ranks does.
    """

    def __init__(self, size: int, *, cube: bool) -> None:
        self.size = size
        self.sent = [0] * size
        self._lines = Lines(size, self._count)
        self.ranks = [
            Narrow(rank, size, self._lines.wire(rank), Cube(rank, size) if cube else None) for rank in range(size)
        ]

    def _count(self, rank: int, nbytes: int) -> None:
        self.sent[rank] += nbytes

    def sum(
        self,
        arrays: list[Any],
        form: WireFormat,
        dtype: DType = DType.FLOAT32,
        residuals: list[Values] | None = None,
    ) -> list[Any]:
        """Return each rank's sum."""
        results = [array.copy() for array in arrays]
        kept = residuals or [None] * self.size
        with ThreadPoolExecutor(self.size) as pool:
            for ended in [
                pool.submit(rank.allreduce, Buffer.of_array(result, dtype), codec_of(form), residual)
                for rank, result, residual in zip(self.ranks, results, kept, strict=True)
            ]:
                ended.result(timeout=20)
        assert self._lines.are_empty
        return results


def vectors(size: int, count: int) -> list[Values]:
    return [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(size)]


def error(result: Any, exact: Any) -> float:
    return float(np.linalg.norm(result.astype(np.float64) - exact) / max(np.linalg.norm(exact), 1e-30))


GROUPS = [(2, False), (3, False), (5, False), (6, True), (8, True), (11, True)]
groups = pytest.mark.parametrize(("size", "cube"), GROUPS, ids=lambda value: str(value))


@groups
@every_form
@pytest.mark.parametrize("count", [1, 100, 4096, 13001])
def test_a_sum_has_the_same_bits_on_all_ranks_and_in_every_run(
    size: int, cube: bool, form: WireFormat, count: int
) -> None:
    arrays = vectors(size, count)
    ranks = Flat(size, cube=cube)
    first, again = ranks.sum(arrays, form), ranks.sum(arrays, form)
    assert {result.tobytes() for result in first + again} == {first[0].tobytes()}
    if count > 1000:
        assert 0 < error(first[0], np.sum(arrays, 0, np.float64)) < ERRORS[form]


@groups
def test_each_value_of_every_rank_is_added_once(size: int, cube: bool) -> None:
    """Magnitudes are the same within each block, so that no form loses more than a scale's last bits."""
    signs = np.resize(np.float32([1, -1, -1]), 12_000)
    for form in FORMS:
        for result in Flat(size, cube=cube).sum([signs * 2**rank for rank in range(size)], form):
            np.testing.assert_allclose(result, signs * (2**size - 1), rtol=1e-2 if form is WireFormat.BF16 else 1e-4)


@groups
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_an_infinity_or_a_nan_is_nan_on_all_ranks(size: int, cube: bool, odd: float) -> None:
    arrays = [np.ones(3000, np.float32) for _ in range(size)]
    arrays[size - 1][1500] = odd
    for result in Flat(size, cube=cube).sum(arrays, WireFormat.INT8):
        assert np.isnan(result[1500])
        assert np.isnan(result).sum() <= 256
        assert np.allclose(result[~np.isnan(result)], size, rtol=0.01)


@groups
@every_form
def test_a_rank_sends_as_many_bytes_as_the_form_has(size: int, cube: bool, form: WireFormat) -> None:
    count = 1 << 14
    ranks = Flat(size, cube=cube)
    ranks.sum(vectors(size, count), form)
    shares = {WireFormat.BF16: 0.5, WireFormat.INT8: 0.254, WireFormat.INT4: 0.141}
    total = 2 * (size - 1) / size * 4 * count * size
    if cube:  # what two ranks of a corner tell each other comes on top
        corners = Cube(0, size).corners
        total = 2 * (corners - 1) / corners * 4 * count * corners + 2 * 4 * count * (size - corners)
    assert sum(ranks.sent) == pytest.approx(shares[form] * total, rel=0.02)
    assert [rank.sent for rank in ranks.ranks] == ranks.sent


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("cube", [False, True])
def test_half_types_are_widened_for_it(dtype: DType, cube: bool) -> None:
    size = 6 if cube else 3
    floats = vectors(size, 9001)
    arrays = [kernels.narrow(each, dtype) for each in floats]
    results = Flat(size, cube=cube).sum(arrays, WireFormat.INT8, dtype)
    assert len({result.tobytes() for result in results}) == 1
    assert error(kernels.widen(results[0], dtype), np.sum(floats, 0, np.float64)) < 0.02


class _EncodedLocal:
    """A backend between hosts, in threads: its encoded sums go over lines that count."""

    def __init__(self, backend: LocalBackend, exchange: Narrow) -> None:
        self._backend, self._exchange = backend, exchange
        self._progress = ProgressThread("narrow", lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @property
    def rounding(self) -> tuple[float, float]:
        return self._exchange.rounding

    def allreduce_encoded(self, buffer: Buffer, form: WireFormat, residual: Values | None = None) -> Work:
        codec = codec_of(form)
        return self._progress.begin("sum", lambda: self._exchange.allreduce(buffer, codec, residual), buffer)

    def close(self) -> None:
        self._progress.close()


class Hosts:
    """All ranks of a set on several hosts, a thread for each."""

    def __init__(self, sizes: tuple[int, ...], thresholds: Thresholds = ALWAYS) -> None:
        self.sizes, self.size, self.owners = sizes, sum(sizes), min(sizes)
        self.sent = [0] * self.size
        firsts = list(accumulate(sizes[:-1], initial=0))
        flat, local = LocalGroup(self.size), [LocalGroup(count) for count in sizes]
        cross = [LocalGroup(len(sizes)) for _ in range(self.owners)]
        lines = [
            Lines(len(sizes), lambda host, nbytes, place=place: self._count(firsts[host] + place, nbytes))  # type: ignore[misc]
            for place in range(self.owners)
        ]
        self.backends: list[HierarchicalBackend] = []
        for rank in range(self.size):
            layout, across = Layout(sizes, rank), None
            if layout.place < self.owners:
                host, count = layout.host, len(sizes)
                cube = Cube(host, count) if count > 5 else None
                exchange = Narrow(host, count, lines[layout.place].wire(host), cube)
                across = _EncodedLocal(cross[layout.place].backend(host), exchange)
            here = local[layout.host].backend(layout.place) if sizes[layout.host] > 1 else None
            self.backends.append(
                HierarchicalBackend(
                    layout,
                    here,
                    across,  # type: ignore[arg-type]
                    lambda cancelled, rank=rank: flat.backend(rank),  # type: ignore[misc]
                    thresholds,
                    chunk=1 << 15,
                )
            )

    def _count(self, rank: int, nbytes: int) -> None:
        self.sent[rank] += nbytes

    def run(self, body: Callable[[int, HierarchicalBackend], None]) -> None:
        with ThreadPoolExecutor(self.size) as pool:
            for ended in [pool.submit(body, rank, backend) for rank, backend in enumerate(self.backends)]:
                ended.result(timeout=20)

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


@pytest.mark.parametrize("thresholds", [ALWAYS, NEVER], ids=["in slices", "whole"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", [WireFormat.INT8, WireFormat.INT4], ids=str)
def test_between_hosts_all_ranks_get_the_same_bits_in_every_run(
    sizes: tuple[int, ...], thresholds: Thresholds, form: WireFormat
) -> None:
    hosts = Hosts(sizes, thresholds)
    arrays, exact = vectors(hosts.size, 10_000), np.sum(vectors(hosts.size, 10_000), 0, np.float64)
    results = []

    def body(rank: int, backend: HierarchicalBackend) -> None:
        for _ in range(2):
            results.append(mine := arrays[rank].copy())
            finish(backend.allreduce_encoded(Buffer.of_array(mine), form))

    hosts.run(body)
    hosts.close()
    assert isinstance(hosts.backends[0], Encoding)
    assert {result.tobytes() for result in results} == {results[0].tobytes()}
    assert 0 < error(results[0], exact) < ERRORS[form]


@pytest.mark.parametrize("thresholds", [ALWAYS, NEVER], ids=["in slices", "whole"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_between_hosts_ranks_keep_what_is_missing_from_all_sums(sizes: tuple[int, ...], thresholds: Thresholds) -> None:
    hosts, count, rounds = Hosts(sizes, thresholds), 10_000, 5
    arrays = vectors(hosts.size, count)
    residuals = [np.zeros(count, np.float32) for _ in arrays]
    totals = [np.zeros(count) for _ in arrays]

    def body(rank: int, backend: HierarchicalBackend) -> None:
        for _ in range(rounds):
            mine = arrays[rank].copy()
            finish(backend.allreduce_encoded(Buffer.of_array(mine), WireFormat.INT4_FEEDBACK, residuals[rank]))
            totals[rank] += mine

    hosts.run(body)
    hosts.close()
    assert {total.tobytes() for total in totals} == {totals[0].tobytes()}
    missing = rounds * np.sum(arrays, 0, np.float64) - totals[0]
    np.testing.assert_allclose(np.sum(residuals, 0, np.float64), missing, atol=1e-3)
    assert 0.01 < np.abs(missing).max() < 5


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 2), (1, 1)], ids=str)
def test_between_hosts_only_encoded_bytes_cross_and_other_operations_stay_exact(sizes: tuple[int, ...]) -> None:
    hosts = Hosts(sizes)
    count = 16_000
    arrays = vectors(hosts.size, count)

    def body(rank: int, backend: HierarchicalBackend) -> None:
        finish(backend.allreduce_encoded(Buffer.of_array(arrays[rank].copy()), WireFormat.INT8))
        for op, combine in ((ReduceOp.MAX, np.max), (ReduceOp.MIN, np.min)):
            finish(backend.allreduce(Buffer.of_array(mine := arrays[rank].copy()), op))
            assert (mine == combine(arrays, 0)).all()
        finish(backend.allreduce(Buffer.of_array(mine := np.full(count, rank / 2, np.float32)), ReduceOp.SUM))
        assert (mine == sum(range(hosts.size)) / 2).all()
        finish(backend.broadcast(Buffer.of_array(mine := arrays[rank].copy()), 0))
        assert (mine == arrays[0]).all()

    hosts.run(body)
    hosts.close()
    several = len(sizes)
    of_a_host = 2 * (several - 1) / several * 4 * count
    assert sum(hosts.sent) == pytest.approx(0.254 * of_a_host * several, rel=0.06)
