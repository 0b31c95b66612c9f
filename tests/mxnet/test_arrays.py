"""Arrays of MXNet, which are computed behind the program's back, and the gradients of collectives on them."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError
from hvdgloo.mxnet._adapter import MXNetAdapter
from hvdgloo.types import ReduceOp
from tests.support.frameworks import load
from tests.support.world import MakeWorld

frontend_of = load("mxnet").frontend


def much_work() -> Any:
    """An array of zeros that takes MXNet some tenths of a second; it is asked for here and not waited for."""
    matrix = mx.nd.ones((1200, 1200)) / 1200
    for _ in range(6):
        matrix = mx.nd.dot(matrix, matrix)
    return matrix[0, :4] - matrix[0, :4]


def test_an_array_is_reduced_in_place_after_all_that_was_asked_of_it(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> tuple[list[float], list[float]]:
        x = mx.nd.zeros((4,))
        x += much_work() + context.rank + 1  # a write that is pending
        seen = x + much_work()  # a read that is pending
        result = frontend_of(context).allreduce_(x, op=ReduceOp.SUM)
        assert result is x
        x *= 10
        return x.asnumpy().tolist(), seen.asnumpy().tolist()

    for rank, (reduced, seen) in enumerate(ranks(2).run(rank_body)):
        assert reduced == [30.0] * 4
        assert seen == [rank + 1.0] * 4


def test_a_result_of_a_convolution_is_in_rows(ranks: MakeWorld) -> None:
    """oneDNN leaves it in blocks of its own."""
    images = np.random.default_rng(1).normal(size=(2, 16, 8, 8)).astype(np.float32)
    weights = np.random.default_rng(2).normal(size=(16, 16, 3, 3)).astype(np.float32)

    def convolved() -> Any:
        x = mx.nd.array(images)
        for _ in range(2):  # the second takes the first's blocks
            x = mx.nd.Convolution(x, mx.nd.array(weights), kernel=(3, 3), num_filter=16, no_bias=True, pad=(1, 1))
        return x

    expected = convolved().asnumpy()

    def rank_body(context: Context) -> Any:
        frontend, x = frontend_of(context), convolved()
        return frontend.allreduce(convolved()).asnumpy(), frontend.allreduce_(x).asnumpy(), x.asnumpy()

    for results in ranks(2).run(rank_body):
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_part_of_an_array_is_the_same_memory(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> list[float]:
        whole = mx.nd.array([1.0, 2.0, 3.0, 4.0])
        frontend_of(context).allreduce_(whole[1:3], op=ReduceOp.SUM)
        return list(whole.asnumpy())

    assert ranks(2).run(rank_body) == [[1.0, 4.0, 6.0, 4.0]] * 2


def test_the_numpy_interface(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        with mx.util.np_shape(True):
            x = mx.np.array([[1.0, 2.0]]) * (frontend.rank() + 1)
            for result in (frontend.allreduce(x), frontend.allgather(x), frontend.allreduce_(x.copy())):
                assert type(result) is mx.np.ndarray
            assert frontend.allgather(x).asnumpy().tolist() == [[1.0, 2.0], [2.0, 4.0]]
            assert frontend.allgather(x[: frontend.rank()]).shape == (1, 2)
            scalar = frontend.allreduce(mx.np.array(2.0), op=ReduceOp.SUM)
            assert (scalar.shape, scalar.item()) == ((), 4.0)
            flags = frontend.allreduce(mx.np.array([True, False], dtype="bool"), op=ReduceOp.MIN)
            assert flags.dtype == np.bool_
            x.attach_grad()
            with autograd.record():
                loss = (frontend.allreduce(x, op=ReduceOp.PRODUCT) * (frontend.rank() + 1)).sum()
            loss.backward()
            assert x.grad.asnumpy().tolist() == [[3.0 * v * (2 - frontend.rank()) for v in (1.0, 2.0)]]

    ranks(2).run(rank_body, frontend_of)


def test_another_device_gets_its_result_back(ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's arrays would, staged in the host's memory."""
    monkeypatch.setattr(MXNetAdapter, "_is_on_host", lambda self, tensor: tensor.context == mx.cpu(0))

    def rank_body(frontend: Frontend[Any]) -> None:
        x = mx.nd.array([1.0, 2.0], ctx=mx.cpu(1))
        for result in (
            frontend.allreduce(x, op=ReduceOp.SUM),
            frontend.allgather(x)[1:3],
            frontend.allreduce_(x, op=ReduceOp.SUM),
        ):
            assert result.context == mx.cpu(1)
        assert x.asnumpy().tolist() == [2.0, 4.0]
        assert frontend.broadcast_(x, 1) is x

    ranks(2).run(rank_body, frontend_of)


def test_what_cannot_be_sent_is_refused(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    sparse = mx.nd.ones((2, 2)).tostype("row_sparse")
    for call in (frontend.allreduce, frontend.allreduce_, frontend.allgather):
        with pytest.raises(InvalidArgumentError, match=r"row_sparse array cannot be sent; tostype"):
            call(sparse)
        for value in (np.array([1j]), 1j):
            with pytest.raises(InvalidArgumentError, match="MXNet has no complex numbers, but their real and"):
                call(value)

    class Block(mx.gluon.HybridBlock):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
            return frontend.allreduce(x)

    block = Block()
    assert block(mx.nd.ones((2,))).asnumpy().tolist() == [1.0, 1.0]
    block.hybridize()
    with pytest.raises(
        InvalidArgumentError, match="not Symbol; a block that calls a collective must not be hybridized"
    ):
        block(mx.nd.ones((2,)))


@pytest.mark.parametrize("wrong", [[0.5, 1.5], [float("nan"), 1.0], [float("inf"), 0.0], [2.0**24, 0.0]], ids=str)
def test_splits_may_be_whole_floats(ranks: MakeWorld, wrong: list[float]) -> None:
    """MXNet makes them of integers; none that may have been rounded in the making."""

    def rank_body(context: Context) -> None:
        frontend, x = frontend_of(context), mx.nd.array([1.0, 2.0, 3.0])
        for kind in ("float32", "float16", "int64"):
            rows, counts = frontend.alltoall(x, mx.nd.array([1, 2], dtype=kind))
            assert counts.asnumpy().tolist() == [1 + context.rank] * 2
            assert len(rows) == 2 * (1 + context.rank)
        with pytest.raises(InvalidArgumentError, match=r"whole numbers of rows; got .* dtype='int32'"):
            frontend.alltoall(x, mx.nd.array(wrong))

    ranks(2).run(rank_body)


def test_shapes_of_numpys_are_not_told_to_the_users_log(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mx.util, "_set_np_shape_logged", False)
    caplog.set_level("INFO")
    frontend = frontend_of(ranks(1).contexts[0])
    x = mx.nd.ones((2,))
    x.attach_grad()
    for active in (False, True):
        mx.util.set_np_shape(active)
        caplog.clear()
        mx.util._set_np_shape_logged = False
        try:
            with autograd.record():
                loss = frontend.allreduce(x).sum()
            loss.backward()
            mx.nd.waitall()
            assert mx.util.is_np_shape() is active
        finally:
            mx.util.set_np_shape(False)
        assert [record for record in caplog.records if record.name == "root"] == []


def test_an_array_whose_computation_failed_raises_that(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    broken = mx.nd.random.normal(0, -1, (2, 2))  # MXNet finds out later that a scale cannot be negative
    with pytest.raises(mx.base.MXNetError, match="scale"):
        frontend.allreduce(broken)


# Gradients ------------------------------------------------------------------------------------------------------------


def test_gradients_are_added_where_they_are_to_be(ranks: MakeWorld) -> None:
    """Also the gradients of a group of which only some need any: ``mx.autograd.Function`` loses both."""

    def rank_body(frontend: Frontend[Any]) -> None:
        added, plain, without = (mx.nd.ones((2,)) * (i + 1) for i in range(3))
        added.attach_grad(grad_req="add")
        plain.attach_grad()
        added.grad[:] = 10
        with autograd.record():
            group = frontend.grouped_allreduce([without, added, plain * 2, mx.nd.ones((1,), dtype="int32")])
            loss = (group[0] + group[1] + group[2]).sum() * (frontend.rank() + 1)
        loss.backward()
        assert added.grad.asnumpy().tolist() == [11.5] * 2
        assert plain.grad.asnumpy().tolist() == [3.0] * 2

    ranks(2).run(rank_body, frontend_of)


def test_gradients_of_several_collectives_find_each_other(ranks: MakeWorld) -> None:
    """MXNet runs them in several threads, in whatever order."""

    def rank_body(frontend: Frontend[Any]) -> None:
        weights = [mx.nd.ones((3,)) for _ in range(8)]
        for weight in weights:
            weight.attach_grad()
        for _ in range(5):
            with autograd.record():
                parts = [  # half of them under one name, which is free again as each returns
                    frontend.allreduce(w, name="x" if i % 2 else None, op=ReduceOp.SUM) * (i + 1)
                    for i, w in enumerate(weights)
                ]
                rows, _ = frontend.alltoall(weights[0], [1, 2])
                loss = mx.nd.add_n(*parts).sum() * (frontend.rank() + 1) + rows.sum()
            loss.backward()
            for i, weight in enumerate(weights):
                assert weight.grad.asnumpy().tolist() == [3.0 * (i + 1) + (i == 0)] * 3

    ranks(2).run(rank_body, frontend_of)


def test_a_failed_gradient_is_told_to_who_sends_it_on(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])  # of several that fail at a time, MXNet tells of one
    x = mx.nd.ones((2,))
    x.attach_grad()
    with autograd.record():
        loss = frontend.allreduce(x, op=ReduceOp.ADASUM).sum()
    loss.backward()
    with pytest.raises(InvalidArgumentError, match="has no gradient") as caught:
        frontend.allreduce(x.grad)
    assert isinstance(caught.value.__cause__, mx.base.MXNetError)
    assert frontend.allreduce(x).asnumpy().tolist() == [1.0, 1.0]


def test_a_failed_collective_leaves_recording_as_it_was(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        with autograd.record():
            with pytest.raises(HorovodInternalError, match="shape"):
                frontend.allreduce(mx.nd.ones((1 + frontend.rank(),)), name="x")
            assert autograd.is_recording()
            assert autograd.is_training()

    ranks(2).run(rank_body, frontend_of)
