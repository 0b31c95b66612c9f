"""DistributedOptimizer: N ranks on N parts of a batch train exactly as one process does on the whole."""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import GradientsInFlightError, HorovodInternalError, InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.arrays import adasum  # noqa: E402
from tests.support.small_model import (  # noqa: E402
    BATCH,
    INPUTS,
    TARGETS,
    WEIGHTS,
    Noting,
    alike,
    loss_of,
    make_model,
    part_of,
    values,
)
from tests.support.world import MakeWorld  # noqa: E402

STEPS = 5

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def distribute(
    context: Context,
    optimizer: torch.optim.Optimizer,
    named: Any = None,
    groups: Any = None,
    **options: Any,
) -> DistributedTorchOptimizer:
    return wrap(Frontend(TorchAdapter(), lambda: context), optimizer, named, groups, ReductionOptions(**options))


def in_flight(optimizer: DistributedTorchOptimizer) -> set[str]:
    """The names of gradients that have been handed over and not been waited for, by attributes that programs read."""
    return {optimizer._parameter_names[parameter] for parameter in optimizer._handles}


def single_process(make: Callable[[Any], Any], steps: int = STEPS) -> list[np.ndarray]:
    model = make_model()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return values(model)


def train(context: Context, make: Callable[[Any], Any], steps: int = STEPS, **options: Any) -> list[np.ndarray]:
    model = make_model()
    groups = options.pop("groups", None)
    optimizer = distribute(context, make(model.parameters()), model.named_parameters(), groups, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, part_of(context)).backward()
        optimizer.step()
    return values(model)


# Equality with one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_equals_one_process(world: MakeWorld, size: int, name: str) -> None:
    make = OPTIMIZERS[name]
    expected = single_process(make)
    results = world(size).run(lambda context: train(context, make))
    for result in results:
        alike(result, expected)
        alike(result, results[0], rtol=0)  # bit by bit the same on every rank


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 2},
        {"groups": 100},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 2.0, "groups": 2},
        {"groups": 0},
    ],
    ids=str,
)
def test_options_do_not_change_the_result(world: MakeWorld, options: dict[str, Any]) -> None:
    expected = single_process(OPTIMIZERS["sgd"])
    for result in world(2).run(lambda context: train(context, OPTIMIZERS["sgd"], **options)):
        alike(result, expected)


def test_groups_of_chosen_parameters(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        first, second = model[0], model[2]
        optimizer = distribute(
            context, OPTIMIZERS["sgd"](model.parameters()), groups=[[first.weight, second.bias], [first.bias]]
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, part_of(context)).backward()
            optimizer.step()
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, single_process(OPTIMIZERS["sgd"]))


def test_sum_is_size_times_the_average(world: MakeWorld) -> None:
    expected = single_process(lambda p: torch.optim.SGD(p, lr=0.06))
    for result in world(3).run(lambda c: train(c, lambda p: torch.optim.SGD(p, lr=0.02), op=ReduceOp.SUM)):
        alike(result, expected)


def test_fp16_compression_is_near_and_the_same_everywhere(world: MakeWorld) -> None:
    expected = single_process(OPTIMIZERS["sgd"])
    results = world(2).run(lambda context: train(context, OPTIMIZERS["sgd"], compression=Compression.fp16))
    alike(results[0], results[1], rtol=0)
    difference = max(float(abs(a - e).max()) for a, e in zip(results[0], expected, strict=True))
    assert 1e-9 < difference < 1e-2


def test_several_backward_passes_add_up_before_one_step(world: MakeWorld) -> None:
    expected = single_process(lambda p: torch.optim.SGD(p, lr=0.2))

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            whole = part_of(context)
            middle = (whole.start + whole.stop) // 2
            loss_of(model, slice(whole.start, middle)).backward()
            assert not in_flight(optimizer)
            loss_of(model, slice(middle, whole.stop)).backward()
            assert len(in_flight(optimizer)) == 4
            optimizer.step()  # torch adds gradients of passes up, hence twice the rate above
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, expected)


def test_changing_the_number_of_passes(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        optimizer.set_backward_passes_per_step(2)
        loss_of(model).backward()
        assert not in_flight(optimizer)
        loss_of(model).backward()
        assert len(in_flight(optimizer)) == 4
        optimizer.step()
        for wrong in (0, -1, 1.5):
            with pytest.raises(ValueError, match="backward_passes_per_step"):
                optimizer.set_backward_passes_per_step(wrong)  # type: ignore[arg-type]

    world(2).run(rank_body)


# Overlap -------------------------------------------------------------------------------------------------------------


def test_gradients_leave_before_the_backward_pass_ends(world: MakeWorld) -> None:
    """The last layer's gradient is reduced while the first layer's backward still waits for it."""

    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
        reduced_meanwhile: list[list[np.ndarray]] = []

        def hold_back(gradient: Tensor) -> None:
            # Runs in the middle of backward, when the second layer's gradients have been handed over.
            assert in_flight(optimizer) == {"2.weight", "2.bias"}
            # What is submitted later ends later.
            Frontend(TorchAdapter(), lambda: context).allreduce(torch.ones(1), name="later")
            reduced_meanwhile.append([p.grad.numpy().copy() for p in model[2].parameters() if p.grad is not None])

        part = part_of(context)
        hidden = torch.tanh(model[0](INPUTS[part]))
        hidden.register_hook(hold_back)
        ((model[2](hidden) - TARGETS[part]) ** 2).mean().backward()
        optimizer.step()
        (gradients,) = reduced_meanwhile
        alike(gradients, expected)

    whole = make_model()
    loss_of(whole).backward()
    expected = [p.grad.numpy() for p in whole[2].parameters() if p.grad is not None]

    world(2).run(rank_body)


def test_hooks_do_not_block(world: MakeWorld) -> None:
    """backward() returns on a rank although no other rank has begun."""
    done = threading.Event()

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1))
        if context.rank:
            assert done.wait(10)
        loss_of(model, part_of(context)).backward()
        done.set()
        optimizer.step()
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, single_process(lambda p: torch.optim.SGD(p, lr=0.1), steps=1))


# synchronize and skip_synchronize -------------------------------------------------------------------------------------


def test_clipping_between_synchronize_and_step(world: MakeWorld) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    plain.step()
    expected = values(model)

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, part_of(context)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        return values(model)

    for result in world(3).run(rank_body):
        alike(result, expected)


def test_step_after_synchronize_warns_once_a_call_and_reduces_once(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        # With Sum, reducing twice would show.
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1), op=ReduceOp.SUM)
        loss_of(model, part_of(context)).backward()
        optimizer.synchronize()
        warned.append(optimizer)
        optimizer.step()
        return values(model)

    warned: list[Any] = []
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)") as record:
        results = world(2).run(rank_body)
    assert len([w for w in record if "skip_synchronize" in str(w.message)]) == len(warned)
    for result in results:
        alike(result, single_process(lambda p: torch.optim.SGD(p, lr=0.2), steps=1))


def test_skipping_without_synchronize_is_an_error(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        loss_of(model).backward()
        with optimizer.skip_synchronize(), pytest.raises(AssertionError, match="synchronize"):
            optimizer.step()
        optimizer.step()

    world(2).run(rank_body)


def test_zero_grad_while_gradients_are_in_flight(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
        loss_of(model).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) while 4 gradients \(0\.bias"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    world(2).run(rank_body)


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"op": ReduceOp.ADASUM}], ids=str)
@pytest.mark.parametrize("check", [True, False])
def test_ranks_that_start_from_different_weights_are_told(
    world: MakeWorld, caplog: pytest.LogCaptureFixture, options: dict[str, Any], check: bool
) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        with torch.no_grad():
            model[2].bias += float(context.rank == 1)
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()), **options)
        for _ in range(2):
            loss_of(model, part_of(context)).backward()
            optimizer.step()
            optimizer.zero_grad()

    world(3, check_weights=check).run(rank_body)
    told = [record.getMessage() for record in caplog.records if "weights" in record.getMessage()]
    assert len(told) == int(check)  # once, by one rank
    if check:
        assert re.search(r"^rank 1 .* rank 0, .* hvd\.broadcast_parameters\(", told[0])


def test_ranks_that_start_from_the_same_weights_are_not_told_anything(
    world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def rank_body(context: Context) -> None:
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2).bfloat16())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
        if context.rank:  # memory in another order
            model.to(memory_format=torch.channels_last)
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(context.rank))
        optimizer.step()

    world(2).run(rank_body)
    assert not [record for record in caplog.records if "weights" in record.getMessage()]


def test_a_state_that_one_rank_alone_asks_for_is_made_without_the_others(world: MakeWorld) -> None:
    """torch steps on zeros to make it; as a step of all it would be averaged with the others' next one."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if context.rank == 0:
            state = get_optimizer_state_dict(model, optimizer)
            assert set(state["state"]) == {name for name, _ in model.named_parameters()}
        for _ in range(3):
            loss_of(model, part_of(context)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(alone).backward()
        optimizer.step()
    for trained in world(2).run(rank_body):
        alike(trained, values(alone))


@pytest.fixture
def swapping() -> Iterator[None]:
    """Models are loaded and converted by swapping their parameters' contents."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("convert", ["load", "float"])
def test_parameters_whose_contents_are_swapped_stay_distributed(world: MakeWorld, convert: str) -> None:
    def converted(model: nn.Module) -> None:
        if convert == "load":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        else:
            model.float().double()

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        for step in range(5):
            if step == 2:
                converted(model)
            loss_of(model, part_of(context)).backward()
            assert in_flight(optimizer) if step != 2 else not in_flight(optimizer)  # hooks are back in the step after
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    alone = make_model()
    optimizer = OPTIMIZERS["sgd"](alone.parameters())
    for step in range(5):
        if step == 2:
            converted(alone)
        loss_of(alone).backward()
        optimizer.step()
        optimizer.zero_grad()
    for trained in world(2).run(rank_body):
        alike(trained, values(alone), 1e-5)


@pytest.mark.usefixtures("swapping")
def test_a_grad_scaler_sees_reduced_gradients_of_swapped_parameters(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(3):
            if step == 1:
                model.load_state_dict({"weight": torch.ones(1, 1)})
            scaler.scale(model(torch.tensor([[float(context.rank)]])).sum()).backward()
            scaler.unscale_(optimizer)
            assert model.weight.grad is not None
            assert model.weight.grad.item() == 0.5, step
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    world(2).run(rank_body)


@pytest.mark.parametrize("bucket", [0, 1 << 20])
def test_a_gradient_that_shares_memory_with_itself(world: MakeWorld, bucket: int) -> None:
    """A plain optimizer steps on it."""

    def rank_body(context: Context) -> None:
        weight = nn.Parameter(torch.zeros(2, 3))
        optimizer = distribute(context, torch.optim.SGD([weight], lr=1.0))
        for step in range(1, 4):
            held = torch.tensor([[float(context.rank)], [2.0]]).expand(2, 3)
            weight.grad = held
            optimizer.step()
            assert weight.tolist() == [[-0.5 * step] * 3, [-2.0 * step] * 3]
            assert weight.grad is not held
            weight.grad = torch.arange(4.0).as_strided((2, 3), (1, 1))  # rows overlap
            optimizer.synchronize()
            assert weight.grad.tolist() == [[0, 1, 2], [1, 2, 3]]
            optimizer.zero_grad()
            with optimizer.skip_synchronize():
                optimizer.step()

    world(2, gradient_bucket=bucket).run(rank_body)


@pytest.mark.parametrize("outside", ["neither", "first", "second"])
def test_a_layer_that_reentrant_checkpoints_share(world: MakeWorld, outside: str) -> None:
    """Its gradient becomes ready twice in one backward pass; not so without reentrance."""

    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))

        def loss(*, reentrant: bool) -> Tensor:
            layer, inputs = model[0], INPUTS.clone().requires_grad_()
            first, second = (
                layer(inputs) if outside == place else checkpoint(layer, inputs, use_reentrant=reentrant)
                for place in ("first", "second")
            )
            return model[2](torch.tanh(first + second)).square().mean()

        with pytest.raises(GradientsInFlightError, match=r"0\.\d.*use_reentrant=False"):
            loss(reentrant=True).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss(reentrant=False).backward()
        optimizer.step()

    world(2).run(rank_body)


def test_one_backward_pass_too_many(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        loss_of(model).backward()
        with pytest.raises(AssertionError, match="more backward passes than backward_passes_per_step"):
            loss_of(model).backward()
        optimizer.step()

    world(2).run(rank_body)


# Closures ------------------------------------------------------------------------------------------------------------


def closure_of(model: nn.Module, optimizer: Any, part: slice) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, part)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(list(p), max_iter=8, line_search_fn="strong_wolfe"),
    ],
    ids=["sgd", "lbfgs"],
)
def test_closures_see_the_whole_batch(world: MakeWorld, make: Callable[[Any], Any]) -> None:
    """LBFGS evaluates its closure as often as the loss suggests: ranks stay together only if they see one loss."""
    model = make_model()
    plain = make(model.parameters())
    losses = [plain.step(closure_of(model, plain, slice(None))).item() for _ in range(3)]
    expected = values(model)

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, make(model.parameters()))
        closure = closure_of(model, optimizer, part_of(context))
        assert [optimizer.step(closure).item() for _ in range(3)] == pytest.approx(losses, rel=1e-6)
        return values(model)

    for result in world(3).run(rank_body):
        alike(result, expected)


def test_closures_may_return_a_number_or_nothing(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))

        def number() -> float:
            loss_of(model).backward()
            return float(context.rank)

        assert optimizer.step(number) == 0.5
        optimizer.zero_grad()
        assert optimizer.step(lambda: loss_of(model).backward()) is None

    world(2).run(rank_body)


# Parameters ----------------------------------------------------------------------------------------------------------


def test_a_parameter_without_gradient_counts_as_zeros(world: MakeWorld) -> None:
    """A branch that only one rank takes: the others send zeros, so no rank waits."""

    def rank_body(context: Context) -> None:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        optimizer = distribute(context, torch.optim.SGD([used, unused], lr=1.0), [("used", used), ("unused", unused)])
        loss = used.sum() + (unused.sum() if context.rank == 0 else 0)
        loss.backward()
        optimizer.step()
        assert used.tolist() == [0.0, 0.0]
        assert unused.tolist() == [0.5] * 3
        assert unused.grad is not None

    world(2).run(rank_body)


def test_frozen_parameters_stay_out_and_may_thaw(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        model[0].weight.requires_grad_(False)
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        history = []
        for step in range(3):
            optimizer.zero_grad()
            model[0].weight.requires_grad_(step > 0)
            loss_of(model, part_of(context)).backward()
            optimizer.step()
            history.append(model[0].weight.detach().clone())
        assert torch.equal(history[0], WEIGHTS[0])
        assert not torch.equal(history[1], history[0])
        return values(model)

    first, second = world(2).run(rank_body)
    alike(first, second, rtol=0)


@pytest.mark.parametrize(
    ("groups", "bucket", "count"), [(None, 0, 3), (1, 0, 4), (None, 1 << 20, 1)], ids=["alone", "group", "bucket"]
)
def test_a_parameter_frozen_later_is_left_alone(world: MakeWorld, groups: int | None, bucket: int, count: int) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        adapter = Noting()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        optimizer = wrap(Frontend(adapter, lambda: context), plain, None, groups, ReductionOptions())
        loss_of(model, part_of(context)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        adapter.sent.clear()
        loss_of(model, part_of(context)).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, frozen)  # no zero gradient, so no weight decay either
        assert len(adapter.sent) == count  # sent only if the rest of its group, or bucket, waits for it

    world(2, gradient_bucket=bucket).run(rank_body)


def test_a_group_of_parameters_added_later_is_reduced(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model[0].parameters(), lr=0.1))
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        loss_of(model, part_of(context)).backward()
        assert len(in_flight(optimizer)) == 4
        optimizer.step()
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, single_process(lambda p: torch.optim.SGD(p, lr=0.1), steps=1))


def test_channels_last_gradients_keep_their_format(world: MakeWorld) -> None:
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)

    def rank_body(context: Context) -> np.ndarray:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            conv.weight.fill_(0.5)
        optimizer = distribute(context, torch.optim.SGD(conv.parameters(), lr=0.1))
        conv(images * (context.rank + 1)).square().mean().backward()
        optimizer.step()
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        return conv.weight.detach().contiguous().numpy()

    first, second = world(2).run(rank_body)
    np.testing.assert_array_equal(first, second)


# Several optimizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["same names", "automatic names"])
def test_two_optimizers_with_gradients_in_flight_at_once(world: MakeWorld, named: bool) -> None:
    def rank_body(context: Context) -> tuple[list[np.ndarray], list[np.ndarray]]:
        models = make_model(), make_model()
        optimizers = [
            distribute(context, torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters() if named else None)
            for m in models
        ]
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for model in models:
                loss_of(model, part_of(context)).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
        return values(models[0]), values(models[1])

    expected = single_process(lambda p: torch.optim.SGD(p, lr=0.1))
    for first, second in world(2).run(rank_body):
        alike(first, expected)
        alike(second, expected)


def test_a_later_optimizer_takes_the_parameters_over(world: MakeWorld) -> None:
    """Another optimizer is made on the same model, while the old one is still referred to somewhere."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        old = distribute(context, torch.optim.SGD(model.parameters(), lr=5.0), model.named_parameters())
        new = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        loss_of(model, part_of(context)).backward()
        assert not in_flight(old)
        with pytest.raises(InvalidArgumentError, match="later DistributedOptimizer"):
            old.step()
        new.step()
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, single_process(lambda p: torch.optim.SGD(p, lr=0.1), steps=1))


# What other code sees ------------------------------------------------------------------------------------------------


def test_it_is_an_instance_of_the_wrapped_class(world: MakeWorld) -> None:
    context = world(1).contexts[0]
    plain = OPTIMIZERS["sgd"](make_model().parameters())
    optimizer = distribute(context, plain)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer) is type(distribute(context, OPTIMIZERS["sgd"](make_model().parameters())))
    assert repr(optimizer).startswith("SGD (")
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert optimizer.defaults["momentum"] == 0.9
    optimizer.note = "kept"
    assert plain.note == "kept"
    del optimizer.note
    assert not hasattr(plain, "note")
    with pytest.raises(InvalidArgumentError, match="wrap it only once"):
        distribute(context, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"torch\.optim\.Optimizer"):
        distribute(context, "sgd")  # type: ignore[arg-type]


@pytest.mark.parametrize("of_plain", [True, False], ids=["made before wrapping", "made after"])
def test_learning_rate_schedulers(world: MakeWorld, of_plain: bool) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            ],
            milestones=[2],
        )

    def steps(model: nn.Module, optimizer: Any, scheduler: Any, part: slice) -> list[np.ndarray]:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, part).backward()
            optimizer.step()
            scheduler.step()
        return values(model)

    model = make_model()
    plain = OPTIMIZERS["sgd"](model.parameters())
    expected = steps(model, plain, schedule(plain), slice(None))

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        plain = OPTIMIZERS["sgd"](model.parameters())
        scheduler = schedule(plain) if of_plain else None
        optimizer = distribute(context, plain)
        return steps(model, optimizer, scheduler or schedule(optimizer), part_of(context))

    for result in world(2).run(rank_body):
        alike(result, expected)


@pytest.mark.parametrize("explicitly", [True, False], ids=["synchronize and unscale", "step alone"])
def test_grad_scaler(world: MakeWorld, explicitly: bool) -> None:
    """A scaler reads gradients before it calls step(); it must read the reduced ones."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, part_of(context))).backward()
            if explicitly:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, single_process(lambda p: torch.optim.SGD(p, lr=0.1)))


def test_all_ranks_skip_a_step_when_one_overflows(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = loss_of(model) * (float("inf") if context.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        alike(values(model), [w.numpy() for w in WEIGHTS], rtol=0)
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        assert not torch.equal(model[0].weight, WEIGHTS[0])

    world(2).run(rank_body)


def test_checkpoints_load_into_the_plain_optimizer_and_back(world: MakeWorld) -> None:
    make = OPTIMIZERS["adamw"]

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, make(model.parameters()), model.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, part_of(context)).backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)

        # One step alone, without us ...
        plain_model = make_model()
        plain_model.load_state_dict(saved["model"])
        plain = make(plain_model.parameters())
        plain.load_state_dict(saved["optimizer"])
        plain.zero_grad()
        loss_of(plain_model).backward()
        plain.step()

        # ... and the rest distributed again.
        resumed = distribute(context, make(plain_model.parameters()), plain_model.named_parameters())
        resumed.load_state_dict(plain.state_dict())
        for _ in range(STEPS - 3):
            resumed.zero_grad()
            loss_of(plain_model, part_of(context)).backward()
            resumed.step()
        return values(plain_model)

    for result in world(2).run(rank_body):
        alike(result, single_process(make))


def test_loading_a_state_counts_passes_again(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()), backward_passes_per_step=2)
        loss_of(model).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        loss_of(model).backward()
        assert not in_flight(optimizer)
        loss_of(model).backward()
        assert len(in_flight(optimizer)) == 4
        optimizer.step()

    world(2).run(rank_body)


def test_a_pickle_is_the_plain_optimizer(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        loss_of(model).backward()
        optimizer.step()
        loaded = pickle.loads(pickle.dumps(optimizer))
        assert type(loaded) is torch.optim.SGD
        assert len(loaded.state) == 4
        # Models with our hooks can be saved and copied too.
        torch.save(model, io.BytesIO())
        assert copy.deepcopy(model)[0].weight.tolist() == model[0].weight.tolist()

    world(2).run(rank_body)


def test_a_deep_copy_is_distributed_too(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(
            context, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
        )
        optimizer.set_backward_passes_per_step(1)
        model_copy, copied = copy.deepcopy((model, optimizer))
        loss_of(model_copy, part_of(context)).backward()
        copied.step()
        alike(values(model), [w.numpy() for w in WEIGHTS], rtol=0)
        return values(model_copy)

    for result in world(2).run(rank_body):
        alike(result, single_process(lambda p: torch.optim.SGD(p, lr=0.1), steps=1))


def test_step_hooks_run_once_a_step(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()))
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        loss_of(model).backward()
        optimizer.step()
        assert calls == ["before", "after"]

    world(2).run(rank_body)


# Errors --------------------------------------------------------------------------------------------------------------


def test_a_lost_job_is_an_error_in_step_and_gradients_come_to_rest(world: MakeWorld) -> None:
    two = world(2)
    model = make_model()
    optimizer = distribute(two.contexts[0], OPTIMIZERS["sgd"](model.parameters()))
    loss_of(model).backward()
    two.contexts[1].close()
    with pytest.raises(HorovodInternalError):
        optimizer.step()
    assert not in_flight(optimizer)
    optimizer.zero_grad()
    with pytest.raises(HorovodInternalError):
        loss_of(model).backward()


@pytest.mark.parametrize(
    ("named", "groups", "options", "text"),
    [
        (lambda m: list(m.parameters()), None, {}, r"\(name, parameter\) tuples"),
        (lambda m: [(1, p) for p in m.parameters()], None, {}, r"\(name, parameter\) tuples"),
        (lambda m: [("same", p) for p in m.parameters()], None, {}, "more than once: same"),
        (lambda m: list(m.named_parameters())[1:], None, {}, "1 of the optimizer's parameters are not"),
        (lambda m: None, -1, {}, "groups must be"),
        (lambda m: None, 1.5, {}, "groups must be"),
        (lambda m: None, "all", {}, "groups must be"),
        (lambda m: None, lambda m: list(m.parameters()), {}, "groups must be"),
        (lambda m: None, lambda m: [[m[0].weight, m[0].weight]], {}, "two groups, or twice"),
        (lambda m: None, lambda m: [[torch.ones(1)]], {}, "not a parameter of the optimizer"),
        (lambda m: None, None, {"gradient_predivide_factor": 2.0, "op": ReduceOp.SUM}, "needs op=Average"),
        (lambda m: None, None, {"gradient_predivide_factor": 2.0, "op": ReduceOp.ADASUM}, "needs op=Average"),
        (lambda m: None, None, {"backward_passes_per_step": 0}, "backward_passes_per_step"),
        (lambda m: None, None, {"op": 9}, "op must be"),
    ],
)
def test_wrong_arguments(
    world: MakeWorld, named: Callable[[Any], Any], groups: Any, options: dict[str, Any], text: str
) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=text):
        distribute(
            world(1).contexts[0],
            OPTIMIZERS["sgd"](model.parameters()),
            named(model),
            groups(model) if callable(groups) else groups,
            **options,
        )


def test_names_may_come_from_a_generator_and_name_more_than_is_optimized(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = make_model()
        optimizer = distribute(context, torch.optim.SGD(model[2].parameters(), lr=0.1), model.named_parameters())
        loss_of(model).backward()
        assert in_flight(optimizer) == {"2.weight", "2.bias"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()

    world(2).run(rank_body)


# Sparse gradients, Adasum, PowerSGD, process sets --------------------------------------------------------------------


class Words(nn.Module):
    """An embedding whose gradient is sparse, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=True).double()
        self.dense = nn.Linear(4, 2).double()
        with torch.no_grad():
            self.words.weight.copy_(torch.arange(28.0).view(7, 4) / 28)
            self.dense.weight.copy_(torch.arange(8.0).view(2, 4) / 8)
            self.dense.bias.zero_()

    def forward(self, indices: Tensor) -> Tensor:
        embedded: Tensor = self.dense(self.words(indices))
        return embedded


SENTENCES = torch.tensor([[0, 1], [1, 2], [5, 6], [0, 6]])


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def test_sparse_gradients(world: MakeWorld, as_dense: bool) -> None:
    reference = Words()
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(3):
        plain.zero_grad()
        reference(SENTENCES).square().mean().backward()
        plain.step()

    def rank_body(context: Context) -> list[np.ndarray]:
        model = Words()
        optimizer = distribute(
            context, torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), sparse_as_dense=as_dense
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(SENTENCES[2 * context.rank : 2 * context.rank + 2]).square().mean().backward()
            optimizer.step()
            assert model.words.weight.grad is not None
            assert model.words.weight.grad.is_sparse is not as_dense
        return values(model)

    for result in world(2).run(rank_body):
        alike(result, values(reference))


def test_a_sparse_gradient_that_only_some_ranks_have(world: MakeWorld) -> None:
    """The others cannot know that it is sparse, and must not wait with a dense one."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = Words()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.5))
        for step in range(3):
            optimizer.zero_grad()
            if context.rank == step % 2:
                model(SENTENCES[:1]).sum().backward()
            else:
                model.dense(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return values(model)

    first, second = world(2).run(rank_body)
    alike(first, second, rtol=0)
    assert not np.allclose(first[0], Words().words.weight.detach().numpy())


@pytest.mark.parametrize("first", ["no rank", "dense here", "added later"])
def test_sparse_gradients_that_come_later(world: MakeWorld, first: str) -> None:
    """In the first step no rank has one, or one rank has a dense one: all must agree again, or for ever."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = Words()
        if first == "added later":
            optimizer = distribute(context, torch.optim.SGD(model.dense.parameters(), lr=0.5))
        else:
            optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.5))
        for step in range(4):
            optimizer.zero_grad()
            if step == 1 and first == "added later":
                optimizer.add_param_group({"params": list(model.words.parameters())})
            if step > 1 and context.rank == step % 2:
                model(SENTENCES[:1]).sum().backward()
            elif step == 0 and first == "dense here" and context.rank == 1:
                (model.words.weight.sum() + model.dense(torch.ones(1, 4, dtype=torch.float64)).sum()).backward()
            else:
                model.dense(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return values(model)

    one, other = world(2).run(rank_body)
    alike(one, other, rtol=0)
    assert not np.allclose(one[0], Words().words.weight.detach().numpy())


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def test_sparse_adam_gets_sparse_gradients(world: MakeWorld, as_dense: bool) -> None:
    """Also where ranks, or all of them, have none: it refuses dense zeros."""

    def trained(
        model: nn.Module, wrapped: Callable[[torch.optim.Optimizer], Any], sentences: Callable[[int], Tensor]
    ) -> list[np.ndarray]:
        words = model.words.weight
        unused = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
        optimizer = wrapped(torch.optim.SparseAdam([words, unused], lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            chosen = sentences(step)
            if len(chosen):
                # A sum over all ranks' sentences, averaged over two ranks.
                (model.words(chosen).square().sum() / 2).backward()
            optimizer.step()
        assert words.grad.is_sparse
        assert torch.equal(unused, torch.ones(3, 2))
        return [words.detach().numpy().copy()]

    expected = trained(Words(), lambda plain: plain, lambda step: SENTENCES)

    def rank_body(context: Context) -> list[np.ndarray]:
        def share(step: int) -> Tensor:
            if step == 1:  # one rank has it all
                return SENTENCES[: 4 * context.rank]
            return SENTENCES[2 * context.rank : 2 * context.rank + 2]

        def wrapped(plain: torch.optim.Optimizer) -> Any:
            return distribute(context, plain, op=ReduceOp.SUM, sparse_as_dense=as_dense)

        return trained(Words(), wrapped, share)

    for result in world(2).run(rank_body):
        alike(result, expected)


def test_a_sparse_gradient_has_no_place_in_a_group(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = Words()
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=0.5), groups=1)
        model(SENTENCES).sum().backward()
        with pytest.raises(InvalidArgumentError, match="cannot be in a group"):
            optimizer.step()

    world(2).run(rank_body)


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_combines_what_the_optimizers_did(world: MakeWorld, size: int) -> None:
    make = OPTIMIZERS["sgd"]
    models = [make_model() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in models]
    for _ in range(3):
        before = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, slice(rank * BATCH // size, (rank + 1) * BATCH // size)).backward()
            optimizer.step()
        with torch.no_grad():
            for index, start in enumerate(before):
                parameters = [list(model.parameters())[index] for model in models]
                change = adasum([parameter - start for parameter in parameters])
                for parameter in parameters:
                    parameter.copy_(start + change)

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, make(model.parameters()), model.named_parameters(), op=ReduceOp.ADASUM)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, part_of(context)).backward()
            optimizer.synchronize()
            optimizer.step()
        with pytest.raises(AssertionError, match="nothing to skip"), optimizer.skip_synchronize():
            pass
        return values(model)

    for result in world(size).run(rank_body):
        alike(result, values(models[0]))


def test_adasum_alone_is_the_plain_optimizer(world: MakeWorld) -> None:
    """A program that clips its gradients runs with one process, too."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()), op=ReduceOp.ADASUM)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        return values(model)

    alike(world(1).run(rank_body)[0], single_process(OPTIMIZERS["sgd"]))


@pytest.mark.extended
@pytest.mark.parametrize("groups", [None, 1], ids=["each", "one group"])
def test_powersgd_still_converges(ranks: MakeWorld, groups: int | None) -> None:
    """Vogels et al., 2019: error feedback lets it reach what plain SGD reaches (without, five times that is left).

    On one backend: that each sums what it is given is proved by all other tests, in fewer steps.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 32, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(32, 16, generator=generator) / 6)

    def rank_body(context: Context) -> tuple[float, float, list[np.ndarray], int]:
        own = slice(context.rank * 32, context.rank * 32 + 32)

        def loss_after_training(compression: Any) -> tuple[float, nn.Module]:
            model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
            with torch.no_grad():
                start = torch.Generator().manual_seed(5)
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=start) / 6)
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = distribute(context, plain, model.named_parameters(), groups, compression=compression)
            for _ in range(200):
                optimizer.zero_grad()
                ((model(inputs[own]) - targets[own]) ** 2).mean().backward()
                optimizer.step()
            return ((model(inputs) - targets) ** 2).mean().item(), model

        compressor = Compression.powersgd(rank=2)
        expected, _ = loss_after_training(Compression.none)
        loss, model = loss_after_training(compressor)
        return loss, expected, values(model), len(compressor.errors)

    (loss, expected, first, approximated), (_, _, second, _) = ranks(2).run(rank_body)
    alike(first, second, rtol=0)
    assert approximated == 2  # the matrices; the biases travel as they are
    assert loss < 1.5 * expected


def test_powersgd_at_full_rank_is_exact(world: MakeWorld) -> None:
    expected = single_process(OPTIMIZERS["sgd"])

    def rank_body(context: Context) -> list[np.ndarray]:
        return train(context, OPTIMIZERS["sgd"], compression=Compression.powersgd(rank=6, min_saving=0.0))

    for result in world(2).run(rank_body):
        alike(result, expected)


def test_powersgd_is_for_averages_in_an_optimizer(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        with pytest.raises(InvalidArgumentError, match="give it to DistributedOptimizer"):
            Frontend(TorchAdapter(), lambda: context).allreduce(torch.ones(2), compression=Compression.powersgd())
        with pytest.raises(InvalidArgumentError, match="a whole number from 1"):
            Compression.powersgd(rank=0)
        with pytest.raises(InvalidArgumentError, match="use op=Average"):
            train(context, OPTIMIZERS["sgd"], op=ReduceOp.MAX, compression=Compression.powersgd())

    world(2).run(rank_body)


def test_bf16_compression_is_near(world: MakeWorld) -> None:
    expected = single_process(OPTIMIZERS["sgd"])
    for result in world(2).run(lambda context: train(context, OPTIMIZERS["sgd"], compression=Compression.bf16)):
        alike(result, expected, rtol=0.05)


def test_a_process_set_shares_gradients_among_its_members(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[np.ndarray]:
        pair = Frontend(TorchAdapter(), lambda: context).add_process_set([0, 2])
        model = make_model()
        optimizer = distribute(context, OPTIMIZERS["sgd"](model.parameters()), process_set=pair)
        for _ in range(STEPS):
            optimizer.zero_grad()
            halves = [slice(None, BATCH // 2), slice(None), slice(BATCH // 2, None)]
            loss_of(model, halves[context.rank]).backward()
            optimizer.step()
        return values(model)

    expected = single_process(OPTIMIZERS["sgd"])
    for result in world(3).run(rank_body):
        alike(result, expected)
