"""LocalSGD and DiLoCo: ranks step on their own, and have the same parameters after every outer step."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._backends.select import gloo_provider  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo._training.outer import OuterOptions  # noqa: E402
from hvdgloo.errors import InvalidArgumentError, MismatchError, OptimizerCallError  # noqa: E402
from hvdgloo.torch import optimizer as public  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._local import LocalTorchOptimizer, wrap_local  # noqa: E402
from hvdgloo.torch._state import broadcast_parameters  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from tests.support.lives import Life, Lives  # noqa: E402
from tests.support.small_model import Noting, alike, loss_of, make_model, part_of, values  # noqa: E402
from tests.support.topologies import on_hosts  # noqa: E402
from tests.support.world import MakeWorld, World  # noqa: E402

USED_AGAIN = True

pytestmark = pytest.mark.usefixtures("one_thread")


def local(
    context: Context,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    sync_every: int,
    *,
    inner: str = "rank",
    adapter: TorchAdapter | None = None,
    **options: Any,
) -> LocalTorchOptimizer:
    frontend = Frontend(adapter or TorchAdapter(), lambda: context)
    return wrap_local(frontend, optimizer, model, inner, OuterOptions(sync_every, **options))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def step(optimizer: torch.optim.Optimizer, model: nn.Module, part: slice = slice(None)) -> None:
    optimizer.zero_grad()
    loss_of(model, part).backward()
    optimizer.step()


def all_the_same(results: list[list[np.ndarray]]) -> None:
    for result in results:
        alike(result, results[0], rtol=0)


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_meeting_after_every_step_with_sgd_equals_averaging_every_gradient(world: MakeWorld, size: int) -> None:
    expected = make_model()
    plain = sgd(expected)
    for _ in range(5):
        step(plain, expected)

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 1)
        for _ in range(5):
            step(optimizer, model, part_of(context))
        return values(model)

    results = world(size).run(rank_body)
    alike(results[0], values(expected))
    all_the_same(results)


def by_hand(size: int, steps: int, every: int, start: int, lr: float, momentum: float, clip: float | None) -> list[Any]:
    """Return the parameters of each rank after some steps, computed in one process."""
    models = [make_model() for _ in range(size)]
    optimizers = [sgd(model, momentum=0.9) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    moments = [torch.zeros_like(p) for p in anchor]
    for done in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(optimizer, model, slice(rank * (12 // size), (rank + 1) * (12 // size)))
        is_plain = done <= start
        if not is_plain and (done - start) % every:
            continue
        with torch.no_grad():
            change = [a - sum(list(model.parameters())[i] for model in models) / size for i, a in enumerate(anchor)]
            norm = torch.cat([c.flatten() for c in change]).norm()
            if clip is not None and norm > clip:
                change = [c * (clip / norm) for c in change]
            if not is_plain:
                for m, c in zip(moments, change, strict=True):
                    m.mul_(momentum).add_(c)
                change = [lr * (c + momentum * m) for c, m in zip(change, moments, strict=True)]
            anchor = [a - c for a, c in zip(anchor, change, strict=True)]
            for model in models:
                for p, a in zip(model.parameters(), anchor, strict=True):
                    p.copy_(a)
    return [values(model) for model in models]


@pytest.mark.parametrize(
    "options",
    [{}, {"lr": 0.7, "momentum": 0.9}, {"start": 4}, {"lr": 0.7, "momentum": 0.9, "start": 2, "clip": 0.05}],
    ids=str,
)
def test_ranks_step_alone_and_then_together(world: MakeWorld, options: dict[str, Any]) -> None:
    steps = 8

    def rank_body(context: Context) -> list[list[np.ndarray]]:
        model = make_model()
        optimizer = local(context, sgd(model, momentum=0.9), model, 3, **options)
        seen = []
        for _ in range(steps):
            step(optimizer, model, part_of(context))
            seen.append(values(model))
        return seen

    results = world(2).run(rank_body)
    full = {"start": 0, "lr": 1.0, "momentum": 0.0, "clip": None, **options}
    for done in range(1, steps + 1):
        expected = by_hand(2, done, 3, **full)
        for rank in range(2):
            alike(results[rank][done - 1], expected[rank], rtol=1e-9)
        if done <= full["start"] or (done - full["start"]) % 3 == 0:
            all_the_same([result[done - 1] for result in results])


def test_between_two_outer_steps_nothing_is_sent(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[int]:
        model, adapter = make_model(), Noting()
        optimizer = local(context, sgd(model), model, 3, adapter=adapter)
        counts = []
        for _ in range(6):
            before, operations = len(adapter.sent), context.engine.counters.operations
            step(optimizer, model, part_of(context))
            counts.append((len(adapter.sent) - before, context.engine.counters.operations - operations))
        return counts

    for first, second, third, fourth, fifth, sixth in world(2, fresh=True).run(rank_body):
        assert first == (0, 1)  # ranks compare their settings
        assert second == fourth == fifth == (0, 0)
        assert third[0] == sixth[0] == 4


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_where_ranks_never_share_gradients_no_hook_runs_in_a_backward_pass(world: MakeWorld, elastic: bool) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = local(context, sgd(model), model, 3)
        for _ in range(3):
            step(optimizer, model, part_of(context))
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    world(2, elastic=elastic).run(rank_body)


def test_a_model_in_half_precision_keeps_small_changes(world: MakeWorld) -> None:
    """A change of less than half a unit in the last place of bfloat16 in each outer step adds up."""

    def rank_body(context: Context) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        optimizer = local(context, torch.optim.SGD(model.parameters(), lr=1.0), model, 1, lr=0.25)
        for _ in range(8):
            model.weight.grad = torch.full_like(model.weight, 2.0**-8)
            optimizer.step()
        return model.weight.item()

    assert world(2).run(rank_body) == [1 - 8 * 0.25 * 2.0**-8] * 2


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16], ids=["fp16", "bf16"])
def test_changes_travel_compressed_and_ranks_still_agree(world: MakeWorld, compression: Any) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 2, compression=compression, momentum=0.5)
        for _ in range(4):
            step(optimizer, model, part_of(context))
        return values(model)

    results = world(3).run(rank_body)
    all_the_same(results)
    alike(results[0], world(3).run(lambda c: _trained(c, momentum=0.5))[0], rtol=0.05)


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
@pytest.mark.parametrize("settings", [{}, {"wire": "int8"}], ids=["the program", "the job"])
def test_changes_cross_between_hosts_encoded_and_buffers_do_not(settings: dict[str, Any]) -> None:
    compression = Compression.none if settings else Compression.int8

    def rank_body(context: Context) -> list[bytes]:
        random = torch.Generator().manual_seed(context.rank)
        model = nn.BatchNorm1d(3000)
        optimizer = local(context, torch.optim.SGD(model.parameters(), lr=1.0), model, 1, compression=compression)
        model.weight.grad = torch.randn(3000, generator=random)
        model.running_mean.copy_(torch.randn(3000, generator=random))
        own = [model.running_mean.clone(), 1 - model.weight.grad]
        optimizer.step()
        frontend = Frontend(TorchAdapter(), lambda: context)
        exact = [frontend.allreduce(value) for value in own]
        torch.testing.assert_close(model.running_mean, exact[0])
        error = float((model.weight - exact[1]).detach().norm() / (1 - exact[1]).norm())
        assert 1e-3 < error < 2e-2
        return [value.detach().numpy().tobytes() for value in model.state_dict().values()]

    with World(4, "hierarchical", wire_threshold=0, **settings) as made:
        results = made.run(rank_body)
    assert all(result == results[0] for result in results)


def _trained(context: Context, steps: int = 4, every: int = 2, **options: Any) -> list[np.ndarray]:
    model = make_model()
    optimizer = local(context, sgd(model), model, every, **options)
    for _ in range(steps):
        step(optimizer, model, part_of(context))
    return values(model)


def test_a_process_set_meets_apart_from_the_others(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        frontend = Frontend(TorchAdapter(), lambda: context)
        pair = frontend.add_process_set([0, 2])
        return _trained(context, process_set=pair)

    first, second, third = world(3, fresh=True).run(rank_body)
    alike(first, third, rtol=0)
    alone = make_model()
    plain = sgd(alone)
    for _ in range(4):
        step(plain, alone, slice(4, 8))
    alike(second, values(alone), rtol=0)


# Fragments and overlap ------------------------------------------------------------------------------------------------


def streamed_by_hand(
    size: int, steps: int, every: int, fragments: list[list[int]], overlap: int, lr: float, momentum: float, start: int
) -> tuple[list[Any], list[Any]]:
    """Return the parameters of each rank after some steps, and the anchor, computed in one process."""
    models = [make_model() for _ in range(size)]
    optimizers = [sgd(model, momentum=0.9) for model in models]
    own = [list(model.parameters()) for model in models]
    anchor = [p.detach().clone() for p in own[0]]
    moments = [torch.zeros_like(p) for p in anchor]
    under_way: list[tuple[int, list[int], list[list[Tensor]]]] = []
    for done in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(optimizer, model, slice(rank * (12 // size), (rank + 1) * (12 // size)))
        plain = done <= start
        for number, fragment in enumerate(fragments):
            if plain or (done - start) % every == (number + 1) * every // len(fragments) % every:
                then = [[p.detach().clone() for p in parameters] for parameters in own]
                under_way.append((done if plain else done + overlap, fragment, then))
        for _, fragment, then in [each for each in under_way if each[0] == done]:
            for i in fragment:
                change = anchor[i] - sum(values[i] for values in then) / size
                if not plain:
                    moments[i] = momentum * moments[i] + change
                    change = lr * (change + momentum * moments[i])
                anchor[i] = anchor[i] - change
                with torch.no_grad():
                    for parameters, before in zip(own, then, strict=True):
                        parameters[i].copy_(anchor[i] + (parameters[i] - before[i]))
        under_way = [each for each in under_way if each[0] > done]
    return [values(model) for model in models], [a.numpy() for a in anchor]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("count", "overlap", "start"), [(2, 0, 0), (1, 3, 0), (2, 2, 2)], ids=["fragments", "overlap", "both"]
)
def test_fragments_meet_one_after_another_while_inner_steps_go_on(
    world: MakeWorld, size: int, count: int, overlap: int, start: int
) -> None:
    # Of 48, 8, 24 and 3 elements.
    fragments = [[0, 1, 2, 3]] if count == 1 else [[0], [1, 2, 3]]
    steps, every, lr, momentum = 12, 6, 0.7, 0.5
    assert [p.numel() for p in make_model().parameters()] == [48, 8, 24, 3]

    def rank_body(context: Context) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]], list[np.ndarray]]:
        model = make_model()
        options = {"lr": lr, "momentum": momentum, "start": start, "fragments": count, "overlap": overlap}
        optimizer = local(context, sgd(model, momentum=0.9), model, every, **options)
        seen, anchors = [], []
        for _ in range(steps):
            step(optimizer, model, part_of(context))
            seen.append(values(model))
            anchors.append([value.numpy() for value in optimizer.outer_state_dict()["anchor"].values()])
        optimizer.finish()
        return seen, anchors, values(model)

    results = world(size).run(rank_body)
    for done in range(1, steps + 1):
        expected, anchor = streamed_by_hand(size, done, every, fragments, overlap, lr, momentum, start)
        all_the_same([anchors[done - 1] for _, anchors, _ in results])
        alike(results[0][1][done - 1], anchor, rtol=1e-9)
        for rank in range(size):
            alike(results[rank][0][done - 1], expected[rank], rtol=1e-9)
    all_the_same([end for _, _, end in results])


def test_an_overlapped_outer_step_is_sent_when_it_begins_and_not_waited_for(world: MakeWorld) -> None:
    """Rank 1 makes its inner steps only when rank 0 has made all of its own that overlap."""
    ahead = threading.Event()

    def rank_body(context: Context) -> list[int]:
        model, adapter = make_model(), Noting()
        optimizer = local(context, sgd(model), model, 4, overlap=2, adapter=adapter)
        counts = []
        for done in range(1, 7):
            if done == 4 and context.rank == 1:
                assert ahead.wait(30)
            before = len(adapter.sent)
            step(optimizer, model, part_of(context))
            counts.append(len(adapter.sent) - before)
            if done == 5 and context.rank == 0:
                ahead.set()
        return counts

    assert world(2).run(rank_body) == [[0, 0, 0, 4, 0, 0]] * 2


def test_an_average_that_is_not_finite_takes_all_fragments_back(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[list[np.ndarray]]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 4, fragments=2, overlap=1)
        seen = []
        for done in range(1, 12):
            if done == 6 and context.rank == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            step(optimizer, model, part_of(context))
            if done == 7:
                assert optimizer.outer_state_dict()["refused"] == 1
                seen.append(values(model))
        optimizer.finish()
        assert optimizer.outer_state_dict()["refused"] == 1
        return [*seen, values(model)]

    results = world(2).run(rank_body)
    for each in zip(*results, strict=True):
        all_the_same(list(each))
        assert all(np.isfinite(value).all() for value in each[0])


@pytest.mark.parametrize("at", [4, 5, 7, 8])
def test_what_overlaps_is_part_of_a_checkpoint(world: MakeWorld, at: int) -> None:
    options: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "fragments": 2, "overlap": 2}

    def make(context: Context) -> tuple[nn.Module, LocalTorchOptimizer]:
        model = make_model()
        return model, local(context, sgd(model, momentum=0.9), model, 6, **options)

    def rank_body(context: Context) -> None:
        model, optimizer = make(context)
        saved: Any = None
        for done in range(16):
            if done == at:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), optimizer.outer_state_dict()])
            step(optimizer, model, part_of(context))
        again, resumed = make(context)
        loads = [again.load_state_dict, resumed.load_state_dict, resumed.load_outer_state_dict]
        for thing, load in zip(saved, loads, strict=True):
            load(thing)
        assert (saved[2]["under_way"] is None) == (at in (5, 8))
        for _ in range(at, 16):
            step(resumed, again, part_of(context))
        alike(values(again), values(model), rtol=0)

    world(2).run(rank_body)


def test_an_interrupted_wait_for_an_overlapped_outer_step_is_made_up_for(world: MakeWorld) -> None:
    def rank_body(context: Context) -> tuple[list[np.ndarray], list[np.ndarray]]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 4, overlap=1)
        for _ in range(4):
            step(optimizer, model, part_of(context))
        changes = optimizer._hvd.outer._changes
        rest, calls = changes.rest, iter([True])

        def interrupted() -> Exception | None:
            if next(calls, False):
                raise KeyboardInterrupt
            return rest()

        if context.rank == 1:
            changes.rest = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt) if context.rank == 1 else nullcontext():
            step(optimizer, model, part_of(context))
        for _ in range(4):
            step(optimizer, model, part_of(context))
        anchor = [value.numpy() for value in optimizer.outer_state_dict()["anchor"].values()]
        optimizer.finish()
        return anchor, values(model)

    results = world(2).run(rank_body)
    all_the_same([anchor for anchor, _ in results])
    all_the_same([end for _, end in results])


def test_counters_of_the_first_rank_wait_for_finish_if_steps_overlap(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = WithBuffers(context.rank)
        optimizer = local(context, torch.optim.SGD(model.parameters(), lr=0.1), model, 4, fragments=2, overlap=1)
        for _ in range(5):
            model.weight.grad = torch.ones(2)
            model.mean += context.rank + 1
            model.count += 5 - context.rank
            optimizer.step()
        assert model.mean.tolist() == pytest.approx([4 * 1.5 + context.rank + 1] * 3)
        assert model.count.item() == 5 * (5 - context.rank)
        optimizer.finish()
        assert model.mean.tolist() == pytest.approx([5 * 1.5] * 3)
        assert model.count.item() == 25
        assert model.mask.tolist() == [0.0, float("-inf")]

    world(2).run(rank_body)


def test_counters_wait_for_finish_also_if_the_last_fragment_has_no_variables(world: MakeWorld) -> None:
    """More than half of the elements are in the last variable, which is the middle of the model."""

    def rank_body(context: Context) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(count)) for count in (2, 30)])
        model.register_buffer("count", torch.tensor(0))
        optimizer = local(context, torch.optim.SGD(model.parameters(), lr=0.1), model, 8, fragments=4, overlap=1)
        for done in range(1, 17):
            for parameter in model:
                parameter.grad = torch.full_like(parameter, context.rank + 1.0)
            model.count += context.rank + 1
            optimizer.step()
            assert model.count.item() == done * (context.rank + 1)
        optimizer.finish()
        assert model.count.item() == 16
        for parameter in model:
            assert parameter.tolist() == pytest.approx([-0.1 * 16 * (context.size + 1) / 2] * parameter.numel())

    world(2).run(rank_body)


def test_small_variables_travel_in_one_operation(world: MakeWorld) -> None:
    def rank_body(context: Context) -> int:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
        optimizer = local(context, torch.optim.SGD(model.parameters(), lr=0.1), model, 2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.step()
        changes = optimizer._hvd.outer._changes
        return len({id(reduction) for reduction in changes._reductions.values()})

    assert world(2).run(rank_body) == [1, 1]


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
def test_the_least_size_of_what_is_encoded_is_that_of_all_small_variables_together() -> None:
    def rank_body(context: Context) -> float:
        random = torch.Generator().manual_seed(context.rank)
        model = nn.ParameterList([nn.Parameter(torch.zeros(1024)) for _ in range(8)])
        optimizer = local(context, torch.optim.SGD(model, lr=1.0), model, 1, compression=Compression.int8)
        before = context.metrics()
        for parameter in model:
            parameter.grad = torch.randn(1024, generator=random)
        optimizer.step()
        return (context.metrics() - before).planes["hierarchical"].wire_error

    with World(4, "hierarchical", wire_threshold=8 * 4096) as made:
        assert all(0 < error < 0.02 for error in made.run(rank_body))


# Buffers --------------------------------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("table", torch.tensor([0.1, 0.3, 0.7]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("own", torch.full((1,), float(rank)), persistent=False)


def test_large_changes_are_applied_though_their_sum_is_infinite(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = nn.Linear(8, 8, bias=False)
        optimizer = local(context, sgd(model), model, 1)
        for parameter in model.parameters():
            parameter.data.fill_(0.0)
            parameter.grad = torch.full_like(parameter, -2e38)
        optimizer.step()
        assert all(value.unique().tolist() == pytest.approx([2e37]) for value in model.parameters())

    world(1).run(rank_body)


def test_floating_buffers_are_averaged_and_others_are_the_first_rank_s(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = WithBuffers(context.rank)
        optimizer = local(context, torch.optim.SGD(model.parameters(), lr=0.1), model, 2, lr=0.5, momentum=0.9)
        for _ in range(2):
            model.weight.grad = torch.ones(2)
            model.mean += context.rank + 1
            model.count += 5 - context.rank
            optimizer.step()
        assert model.mean.tolist() == [4.0] * 3  # neither outer rate nor momentum applies
        assert model.count.item() == 10
        assert model.mask.tolist() == [0.0, float("-inf")]
        assert torch.equal(model.table, torch.tensor([0.1, 0.3, 0.7]))  # to the last bit
        assert model.own.item() == context.rank

    world(3).run(rank_body)


# Averages that are not finite, GradScaler -----------------------------------------------------------------------------


def test_an_average_that_is_not_finite_is_refused_on_all_ranks(
    world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 2, momentum=0.9)
        step(optimizer, model, part_of(context))
        step(optimizer, model, part_of(context))
        before = values(model)
        step(optimizer, model, part_of(context))
        if context.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] = float("nan")
        step(optimizer, model, part_of(context))
        alike(values(model), before, rtol=0)
        assert optimizer.outer_state_dict()["refused"] == 1
        step(optimizer, model, part_of(context))
        step(optimizer, model, part_of(context))
        return values(model)

    with caplog.at_level(logging.WARNING, "hvdgloo"):
        results = world(2).run(rank_body)
    all_the_same(results)
    assert all(np.isfinite(value).all() for value in results[0])
    assert [record for record in caplog.records if "inf or a NaN" in record.message].__len__() == 1


@pytest.mark.parametrize("skipped", [1, 2, 4])
def test_a_step_that_a_grad_scaler_skips_on_one_rank_counts(world: MakeWorld, skipped: int) -> None:
    def rank_body(context: Context) -> tuple[int, list[np.ndarray]]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for done in range(1, 5):
            optimizer.zero_grad()
            factor = float("inf") if done == skipped and context.rank == 1 else 1.0
            scaler.scale(loss_of(model, part_of(context)) * factor).backward()
            if done % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        state = optimizer.outer_state_dict()
        assert (state["iterations"], state["steps"]) == (4, 2)
        return values(model)

    all_the_same(world(2).run(rank_body))


# Checkpoints, and the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4, 6])
def test_resumed_training_equals_uninterrupted_training_bit_by_bit(world: MakeWorld, at: int) -> None:
    options: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "start": 1}

    def make(context: Context) -> tuple[nn.Module, LocalTorchOptimizer]:
        model = make_model()
        adam = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, local(context, adam, model, 3, **options)

    def rank_body(context: Context) -> None:
        model, optimizer = make(context)
        saved: Any = None
        for done in range(10):
            if done == at:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), optimizer.outer_state_dict()])
            step(optimizer, model, part_of(context))
        again, resumed = make(context)
        for thing, load in zip(
            saved, [again.load_state_dict, resumed.load_state_dict, resumed.load_outer_state_dict], strict=True
        ):
            load(thing)
        for _ in range(at, 10):
            step(resumed, again, part_of(context))
        alike(values(again), values(model), rtol=0)

    world(2).run(rank_body)


def test_the_state_dict_is_the_plain_optimizer_s(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        plain = sgd(model, momentum=0.9)
        optimizer = local(context, plain, model, 2)
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        step(optimizer, model)
        assert optimizer.state_dict().keys() == plain.state_dict().keys()
        assert plain.state[model[0].weight] is optimizer.state[model[0].weight]
        other = sgd(make_model(), momentum=0.9)
        other.load_state_dict(optimizer.state_dict())

    world(2).run(rank_body)


def test_outer_steps_are_counted(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = local(context, sgd(model), model, 4, fragments=2, overlap=1)
        before = context.metrics()
        for _ in range(8):
            step(optimizer, model, part_of(context))
        change = context.metrics() - before
        nbytes = 8 * sum(parameter.numel() for parameter in model.parameters())
        assert (change.steps, change.outer_steps) == (8, 3)  # the fourth is under way
        assert nbytes < change.outer_bytes < 2 * nbytes
        assert 0 < change.outer_seconds < 60
        assert 0 < change.since_outer_step < 60
        optimizer.finish()
        change = context.metrics() - before
        assert (change.outer_steps, change.outer_bytes) == (5, 3 * nbytes)

    world(2).run(rank_body)


def test_finish_gives_all_ranks_the_same_parameters(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 100)
        for _ in range(3):
            step(optimizer, model, part_of(context))
        optimizer.finish()
        optimizer.finish()  # nothing to do
        assert optimizer.outer_state_dict()["steps"] == 1
        return values(model)

    all_the_same(world(2).run(rank_body))


@pytest.mark.parametrize("goes_on", ["finish", "step"])
def test_an_outer_step_that_was_interrupted_is_completed_by_the_next_call(world: MakeWorld, goes_on: str) -> None:
    def rank_body(context: Context) -> tuple[list[np.ndarray], list[np.ndarray]]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 2, momentum=0.5, clip=0.01)
        step(optimizer, model, part_of(context))
        changes = optimizer._hvd.outer._changes
        if context.rank == 1:
            rest, calls = changes.rest, iter([True])

            def interrupted() -> Exception | None:
                if changes.open and next(calls, False):  # all has been sent
                    raise KeyboardInterrupt
                return rest()

            changes.rest = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt) if context.rank == 1 else nullcontext():
            step(optimizer, model, part_of(context))
        optimizer._hvd.outer.begin() if goes_on == "step" else optimizer.finish()
        met = values(model)
        for _ in range(2):
            step(optimizer, model, part_of(context))
        assert optimizer.outer_state_dict()["steps"] == 2
        return met, values(model)

    results = world(2).run(rank_body)
    all_the_same([met for met, _ in results])
    all_the_same([end for _, end in results])


def test_an_outer_step_that_an_interrupt_kept_from_beginning_is_made_before_the_next_inner_step(
    world: MakeWorld,
) -> None:
    def rank_body(context: Context) -> tuple[list[np.ndarray], int]:
        model = make_model()
        optimizer = local(context, sgd(model), model, 2)
        step(optimizer, model, part_of(context))
        outer = optimizer._hvd.outer
        if context.rank == 1:
            sync = outer.sync

            def interrupted() -> None:
                outer.sync = sync  # type: ignore[method-assign]
                raise KeyboardInterrupt

            outer.sync = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt) if context.rank == 1 else nullcontext():
            step(optimizer, model, part_of(context))
        for _ in range(2):
            step(optimizer, model, part_of(context))
        return values(model), outer.steps

    results = world(2).run(rank_body)
    all_the_same([end for end, _ in results])
    assert [steps for _, steps in results] == [2, 2]


def test_a_program_that_forgets_finish_is_warned_once(world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    made = world(2, fresh=True)
    kept: list[Any] = []

    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = local(context, sgd(model), model, 100)
        for _ in range(3):
            step(optimizer, model, part_of(context))
        kept.append(optimizer)

    with caplog.at_level(logging.WARNING, "hvdgloo"):
        made.run(rank_body)
        made.close()
    (warning,) = [record.getMessage() for record in caplog.records if "finish()" in record.message]
    assert "3 steps after" in warning


# One host -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(2, 2), (1, 3), (1, 1), (2,)])
def test_ranks_of_a_host_share_gradients_in_every_step(world: MakeWorld, slots: tuple[int, ...]) -> None:
    def rank_body(context: Context) -> tuple[list[np.ndarray], list[np.ndarray]]:
        context.topology = on_hosts(*slots)
        model = make_model()
        optimizer = local(context, sgd(model), model, 4, inner="host")
        part = slice(context.rank * 3, context.rank * 3 + 3)
        for _ in range(3):
            step(optimizer, model, part)
        between = values(model)
        step(optimizer, model, part)
        return between, values(model)

    results = world(sum(slots), fresh=True).run(rank_body)
    all_the_same([end for _, end in results])
    first = 0
    for count in slots:
        expected = make_model()
        plain = sgd(expected)
        for _ in range(3):
            step(plain, expected, slice(first * 3, (first + count) * 3))
        for between, _ in results[first : first + count]:
            alike(between, values(expected), rtol=1e-9)
            alike(between, results[first][0], rtol=0)
        first += count


def test_the_ranks_of_a_host_are_others_in_another_epoch() -> None:
    def make(life: Life) -> None:
        model = make_model()
        frontend = Frontend(TorchAdapter(), lambda: life.context)
        options = OuterOptions(2, lr=0.7, momentum=0.9)
        life.kept.update(model=model, optimizer=wrap_local(frontend, sgd(model), model, "host", options))

    def body(life: Life, slots: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray], int]:
        life.context.topology = on_hosts(*slots)
        model, optimizer = life.kept["model"], life.kept["optimizer"]
        frontend = optimizer._hvd.frontend
        optimizer._hvd.outer.receive(0)
        broadcast_parameters(frontend, model.state_dict(), 0)
        step(optimizer, model, part_of(life.context))
        between = values(model)
        step(optimizer, model, part_of(life.context))
        return between, values(model), optimizer.outer_state_dict()["steps"]

    steps = 0
    with Lives(make) as lives:
        for names, slots in [("ab", (2,)), ("abc", (2, 1)), ("bcd", (1, 2)), ("d", (1,)), ("de", (1, 1))]:
            results = lives.epoch(names, lambda life, slots=slots: body(life, slots))
            steps += 1
            assert [count for _, _, count in results] == [steps] * len(names)
            all_the_same([end for _, end, _ in results])
            hosts = [host for host, count in enumerate(slots) for _ in range(count)]
            for rank, host in enumerate(hosts):
                for other, its in enumerate(hosts):
                    same = all(map(np.array_equal, results[rank][0], results[other][0]))
                    assert same == (host == its)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": 2.0}, "sync_every"),
        ({"sync_every": 2, "lr": 0}, "outer_lr"),
        ({"sync_every": 2, "momentum": 1.0}, "outer_momentum"),
        ({"sync_every": 2, "clip": -1.0}, "outer_clip"),
        ({"sync_every": 2, "start": -1}, "start"),
        ({"sync_every": 2, "compression": Compression.powersgd(rank=2)}, "PowerSGD"),
        ({"sync_every": 2, "fragments": 0}, "fragments"),
        ({"sync_every": 2, "fragments": 3}, "sync_every must be at least"),
        ({"sync_every": 7, "fragments": 2, "overlap": 3}, "overlap=3 must be less than .* here 3"),
        ({"sync_every": 7, "overlap": -1}, "overlap"),
    ],
    ids=[
        "never",
        "not a number",
        "no rate",
        "no end",
        "negative",
        "before the start",
        "PowerSGD",
        "no fragments",
        "too many fragments",
        "too long an overlap",
        "a negative overlap",
    ],
)
def test_settings_that_cannot_be_used_are_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(InvalidArgumentError, match=fact):
        OuterOptions(**options)


def test_arguments_that_cannot_be_used_are_refused(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model, stranger = make_model(), make_model()
        with pytest.raises(InvalidArgumentError, match="not the model's"):
            local(context, sgd(stranger), model, 2)
        with pytest.raises(InvalidArgumentError, match="already distributed"):
            local(context, local(context, sgd(model), model, 2), model, 2)
        with pytest.raises(InvalidArgumentError, match="inner"):
            local(context, sgd(model), model, 2, inner="gpu")
        optimizer = local(context, sgd(model), model, 2)
        with pytest.raises(OptimizerCallError, match="closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(InvalidArgumentError, match="backward_passes_per_step"):
            optimizer.set_backward_passes_per_step(2)
        with pytest.raises(OptimizerCallError, match="finish"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(OptimizerCallError, match="copied"):
            copy.deepcopy(optimizer)
        with pytest.raises(InvalidArgumentError, match="outer_state_dict"):
            optimizer.load_outer_state_dict(optimizer.state_dict())
        step(optimizer, model)
        other = nn.Linear(2, 2)
        another = local(context, sgd(other), other, 2)
        with pytest.raises(InvalidArgumentError, match="which this model lacks"):
            another.load_outer_state_dict(optimizer.outer_state_dict())

    world(2).run(rank_body)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"sync_every": 3}, "sync_every: 2 on rank 0, 3 on rank 1"),
        ({"momentum": 0.5}, "outer_momentum: 0.0 on rank 0, 0.5 on rank 1"),
        ({"overlap": 1}, "overlap: 0 on rank 0, 1 on rank 1"),
        ({"compression": Compression.fp16}, "compression: NoneCompressor on rank 0, FP16Compressor on rank 1"),
        ({"frozen": True}, r"the trained variables: 0.weight: float64\[8, 6\] on rank 0, absent on rank 1"),
    ],
    ids=["sync_every", "momentum", "overlap", "compression", "variables"],
)
def test_ranks_with_different_settings_are_refused_alike(world: MakeWorld, options: dict[str, Any], facts: str) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        given = {"sync_every": 2, **(options if context.rank == 1 else {})}
        if given.pop("frozen", False):
            model[0].weight.requires_grad_(False)
        optimizer = local(context, sgd(model), model, **given)
        before = values(model)
        optimizer.zero_grad()
        loss_of(model).backward()
        for _ in range(2):  # again, until the program is mended
            with pytest.raises(MismatchError, match=facts):
                optimizer.step()
        alike(values(model), before, rtol=0)

    world(3).run(rank_body)


def test_different_weights_at_the_start_are_told(world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        with torch.no_grad():
            model[0].weight += context.rank
        optimizer = local(context, sgd(model), model, 2)
        step(optimizer, model)

    with caplog.at_level(logging.WARNING, "hvdgloo"):
        world(2, check_weights=True).run(rank_body)
    assert any("rank 1" in (text := record.message) and "weights as rank 0" in text for record in caplog.records)


def test_a_parameter_that_is_unfrozen_later_takes_part_from_then_on(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        model[0].weight.requires_grad_(False)
        optimizer = local(context, sgd(model), model, 2)
        for done in range(6):
            if done == 3:
                model[0].weight.requires_grad_(True)
            step(optimizer, model, part_of(context))
        return values(model)

    results = world(2).run(rank_body)
    all_the_same(results)
    assert not np.array_equal(results[0][0], values(make_model())[0])


# Two names ------------------------------------------------------------------------------------------------------------


def test_diloco_takes_the_arguments_of_local_sgd_and_passes_all_of_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    local_sgd, diloco = (inspect.signature(each).parameters for each in (public.LocalSGD, public.DiLoCo))
    assert list(diloco) == list(local_sgd)
    others = {name for name in diloco if diloco[name] != local_sgd[name]}
    assert others == {"outer_lr", "outer_momentum"}
    passed: dict[str, Any] = {}

    def record(*args: Any, **kwargs: Any) -> None:
        passed.update(zip(local_sgd, args, strict=False), **kwargs)

    monkeypatch.setattr(public, "LocalSGD", record)
    given: dict[str, Any] = {name: object() for name in diloco}
    public.DiLoCo(**given)
    assert passed == given
