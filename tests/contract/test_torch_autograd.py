"""Collectives as nodes of torch's graph."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import InvalidArgumentError  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.frameworks import load  # noqa: E402
from tests.support.world import MakeWorld  # noqa: E402

frontend_of = load("torch").frontend


def test_gradients_flow_through_a_chain_of_collectives(world: MakeWorld) -> None:
    """loss of rank r = (r + 1) * sum(allgather(sum over ranks of x^2)); the factors compose."""

    def rank_body(context: Context) -> None:
        frontend, weight = frontend_of(context), context.rank + 1.0
        x = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
        total = frontend.allreduce(x.square(), op=ReduceOp.SUM)
        loss = weight * frontend.allgather(total).sum()
        loss.backward()
        # allgather: mean of the weights 1, 2 on own rows; allreduce: summed over two ranks; square: 2x.
        assert x.grad is not None
        assert x.grad.tolist() == [[2 * 1.5 * 2 * 1.0, 2 * 1.5 * 2 * 2.0]]

    world(2).run(rank_body)


def test_second_derivatives(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
        y = frontend_of(context).allreduce(x.pow(3), op=ReduceOp.SUM)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert first.item() == 2 * 3 * 9  # both ranks' gradients, 1 each, times 3 x^2
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.item() == 2 * 6 * 3

    world(2).run(rank_body)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name.lower())
def test_second_derivatives_that_would_be_wrong_are_refused(world: MakeWorld, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        x = torch.tensor([1.0 + context.rank], requires_grad=True)
        y = frontend_of(context).allreduce(x, op=op)
        with pytest.raises(InvalidArgumentError, match="differentiated again"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    world(2).run(rank_body)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX], ids=lambda op: op.name.lower())
def test_outputs_of_a_group_are_differentiated_one_by_one(world: MakeWorld, op: ReduceOp) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        xs = [torch.tensor([1.0 + frontend.rank(), 5.0 - frontend.rank()], requires_grad=True) for _ in range(3)]
        for call in (
            lambda: frontend.grouped_allreduce(xs, op=op),
            lambda: frontend.grouped_allgather(xs),
            lambda: frontend.grouped_reducescatter(xs, op=ReduceOp.SUM),
        ):
            for x in xs:
                x.grad = None
            outputs = call()
            for number, output in enumerate(outputs):
                (output.sum() * (number + 1)).backward()  # nothing is retained
            single = [torch.autograd.grad(output.sum(), x)[0] for x, output in zip(xs, call(), strict=True)]
            for number, (x, gradient) in enumerate(zip(xs, single, strict=True)):
                assert x.grad is not None
                assert x.grad.tolist() == (gradient * (number + 1)).tolist()

    world(2).run(rank_body, frontend_of)


def test_a_change_in_place_of_what_a_groups_gradient_needs_is_noticed(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        x, y = (torch.tensor([1.0 + context.rank], requires_grad=True) for _ in range(2))
        first, second = frontend_of(context).grouped_allreduce([x * 1, y * 1], op=ReduceOp.MAX)
        with torch.no_grad():
            second.zero_()
        with pytest.raises(InvalidArgumentError, match="changed in place"):
            first.sum().backward()

    world(2).run(rank_body)


def test_compression_is_differentiable(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        frontend_of(context).allreduce(x, op=ReduceOp.SUM, compression=Compression.fp16).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]
        assert x.grad.dtype is torch.float32

    world(2).run(rank_body)


def test_groups_with_integers_and_unused_members(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        a = torch.tensor([1.0], requires_grad=True)
        b = torch.tensor([2.0], requires_grad=True)
        counts = torch.tensor([3])
        first, whole, unused = frontend_of(context).grouped_allreduce([a, counts, b], op=ReduceOp.SUM)
        assert not whole.requires_grad
        assert unused.requires_grad
        (first * whole).sum().backward()
        assert a.grad is not None
        assert a.grad.tolist() == [12.0]
        assert b.grad is not None
        assert b.grad.tolist() == [0.0]

    world(2).run(rank_body)


def test_nothing_is_recorded_where_it_is_not_asked_for(world: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not frontend.allreduce(x).requires_grad
        with torch.inference_mode():
            inferred = torch.ones(2)
            assert frontend.allreduce_(inferred, op=ReduceOp.SUM).tolist() == [2.0, 2.0]
            assert frontend.allreduce(inferred[::1].t(), op=ReduceOp.SUM).tolist() == [4.0, 4.0]
        assert not frontend.synchronize(frontend.allreduce_async(x)).requires_grad
        assert frontend.allreduce(x).requires_grad

    world(2).run(rank_body, frontend_of)


def test_leaves_can_be_written_in_place(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        leaf = torch.full((2, 3), float(context.rank), requires_grad=True)
        result = frontend_of(context).broadcast_(leaf, 1)
        assert result is leaf
        assert leaf.is_leaf
        assert leaf.tolist() == [[1.0] * 3] * 2
        strided = torch.full((2, 3), float(context.rank)).t().requires_grad_()
        frontend_of(context).broadcast_(strided, 1)
        assert strided.is_leaf
        assert strided.sum().item() == 6

    world(2).run(rank_body)


@pytest.mark.parametrize("strided", [False, True], ids=["shared", "staged"])
def test_autograd_notices_what_was_overwritten(world: MakeWorld, strided: bool) -> None:
    """A backward pass that needs the old values must fail rather than use the new ones."""

    def rank_body(context: Context) -> None:
        x = torch.ones(2, 2, requires_grad=True)
        saved = torch.ones(2, 2).t() if strided else torch.ones(2, 2)
        y = x * saved
        frontend_of(context).allreduce_(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    world(2).run(rank_body)


def test_the_gradient_of_an_alltoall_goes_back_the_way_it_came(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
        received, _ = frontend_of(context).alltoall(x, splits=[1, context.rank + 1])
        ((context.rank + 1.0) * received * received).sum().backward()
        # Rows for rank r come back with weight r + 1; what was not sent has none.
        sent = torch.zeros(4, dtype=torch.float64)
        sent[0] = 1.0
        sent[1 : context.rank + 2] = 2.0
        assert x.grad is not None
        assert x.grad.tolist() == (sent * 2 * torch.arange(4.0)).tolist()

    world(2).run(rank_body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE], ids=lambda op: op.name.lower())
def test_the_gradient_of_a_reducescatter(world: MakeWorld, size: int, op: ReduceOp) -> None:
    """Horovod's factors: the gathered gradients, times size for a sum, times the scale factors."""

    def rank_body(context: Context) -> None:
        x = torch.ones(5, 1, dtype=torch.float64, requires_grad=True)
        mine = frontend_of(context).reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=0.25)
        ((context.rank + 1.0) * mine).sum().backward()
        weights = [r + 1.0 for r in range(size) for _ in range(5 // size + (r < 5 % size))]
        factor = 0.5 * (size if op is ReduceOp.SUM else 1)
        assert x.grad is not None
        assert x.grad.flatten().tolist() == [weight * factor for weight in weights]

    world(size).run(rank_body)


def test_adasum_is_not_differentiated(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(InvalidArgumentError, match="has no gradient"):
            frontend_of(context).allreduce(x, op=ReduceOp.ADASUM).sum().backward()

    world(2).run(rank_body)
