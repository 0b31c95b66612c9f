"""Gradients in buckets: exactly what comes of reducing each by itself, whatever a program does with its gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._backends.shm.zero_copy import ZeroCopy  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import MismatchError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._buckets import plan  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.types import Buffer, ReduceOp  # noqa: E402
from tests.support.world import MakeWorld, World  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
LAYERS = 3
WIDTH = 16


@pytest.fixture(autouse=True)
def everything_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, too, are looked for in the segment."""
    monkeypatch.setattr("hvdgloo._backends.shm.backend.RESIDENT_FROM", 1)


def random(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


class Model(nn.Module):
    """Layers of which some are left out of some forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=i) / 4)

    def forward(self, inputs: Tensor, used: int = LAYERS) -> Tensor:
        for layer in list(self.layers)[:used]:
            inputs = torch.tanh(layer(inputs))
        return inputs


def distribute(context: Context, model: nn.Module, **options: Any) -> DistributedTorchOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    named = list(model.named_parameters())
    return wrap(Frontend(TorchAdapter(), lambda: context), optimizer, named, None, ReductionOptions(**options))


def inputs_of(context: Context, step: int) -> Tensor:
    return random(5, WIDTH, seed=100 * step + context.rank)


def values(model: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def together(model: nn.Module) -> list[list[str]]:
    """Names of the gradients that follow each other in memory without a gap (but for the one up to the next cache
    line), as the gradients of one bucket do and tensors that were allocated one by one do not."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found: list[list[str]] = []
    end = None
    for name, gradient in sorted(gradients.items(), key=lambda item: item[1].data_ptr()):
        if gradient.data_ptr() != end:
            found.append([])
        found[-1].append(name)
        end = gradient.data_ptr() + -(-gradient.nbytes // 64) * 64
    return found


def whole_step(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    optimizer.zero_grad()
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.step()


def without_clearing(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.step()


def cleared_in_place(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.step()


def cleared_by_the_model(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    model.zero_grad()
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.step()


def layers_left_out(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    optimizer.zero_grad()
    model(inputs_of(context, step), 1 + (step + context.rank) % LAYERS).square().sum().backward()
    optimizer.step()


def gradients_replaced(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    optimizer.zero_grad()
    if step == 2:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = random(*parameter.shape, seed=i + context.rank)
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.step()


def sparse_on_one_rank(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    optimizer.zero_grad()
    if step == 2 and context.rank == 1:
        model.layers[0].weight.grad = torch.zeros(WIDTH, WIDTH).to_sparse()
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.step()


def clipped(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    optimizer.zero_grad()
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()


def data_replaced(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    """As old programs normalise gradients."""
    optimizer.zero_grad()
    model(inputs_of(context, step)).square().sum().backward()
    optimizer.synchronize()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data / 2
    with optimizer.skip_synchronize():
        optimizer.step()
    without_clearing(context, model, optimizer, step + 100)


def converted(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    if step == 2:
        model.double()
    optimizer.zero_grad()
    model(inputs_of(context, step).to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


def scaled(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    """Loss scaling where layers are left out on some ranks, and one rank's gradients overflow."""
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    optimizer.zero_grad()
    loss = model(inputs_of(context, step), 1 + (step + context.rank) % LAYERS).square().sum()
    if step == 2 and context.rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def given_up(context: Context, model: Model, optimizer: DistributedTorchOptimizer, step: int) -> None:
    """A gradient that the user holds belongs to a batch that is not reduced after all."""
    optimizer.zero_grad()
    kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    optimizer.set_backward_passes_per_step(2)
    model(inputs_of(context, step)).square().sum().backward()
    before = [gradient.clone() for gradient in kept]
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    whole_step(context, model, optimizer, step)
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))


PROGRAMS = [
    data_replaced,
    converted,
    scaled,
    given_up,
    whole_step,
    without_clearing,
    cleared_in_place,
    cleared_by_the_model,
    layers_left_out,
    gradients_replaced,
    sparse_on_one_rank,
    clipped,
]


class Halved(Compression.none):
    """A program's own compressor, which treats elements one by one."""

    elementwise = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor * 0.5, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2.0


class ByLargest(Compression.none):
    """A program's own compressor, which looks at whole tensors."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor / 4.0 if tensor.abs().max() > 1.0 else tensor * 1.0, None


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": ReduceOp.SUM, "gradient_predivide_factor": 1.0},
    "predivided": {"gradient_predivide_factor": 4.0},
    "fp16": {"compression": Compression.fp16},
    "int8": {"compression": Compression.int8},
    "own": {"compression": Halved},
    "passes": {"backward_passes_per_step": 1},
}


def train(world: World, program: Callable[..., None], **options: Any) -> list[list[np.ndarray]]:
    def rank_body(context: Context) -> list[np.ndarray]:
        model = Model()
        optimizer = distribute(context, model, **options)
        for step in range(STEPS):
            program(context, model, optimizer, step)
        bucketed = any(len(names) > 1 for names in together(model))
        assert bucketed == bool(context.config.gradient_bucket)
        return values(model)

    return world.run(rank_body)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_bits_as_without_buckets(world: MakeWorld, backend: str, program: Callable[..., None]) -> None:
    size = 2 if backend == "gloo" else 3
    apart = world(size, gradient_bucket=0)
    expected = train(apart, program)
    for limit in (2 * WIDTH * (WIDTH + 1) * 4, 1 << 20):  # one layer of float64 or two of float32; everything
        result = train(world(size, gradient_bucket=limit), program)
        for rank in range(size):
            for ours, theirs in zip(result[rank], expected[rank], strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("in_step", [False, True], ids=["hooks", "step"])
def test_a_model_that_one_rank_alone_converts_is_an_error_on_all(world: MakeWorld, in_step: bool) -> None:
    """The others' buckets would wait for it, and it for single gradients of theirs."""

    def rank_body(context: Context) -> None:
        model = Model()
        optimizer = distribute(context, model)
        for step in range(3):
            whole_step(context, model, optimizer, step)
        optimizer.zero_grad()
        if context.rank == 1:
            model.double()
        if in_step:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        else:
            model(inputs_of(context, 3).to(next(model.parameters()).dtype)).square().sum().backward()
        with pytest.raises(MismatchError, match=r"its dtype: float32 on rank 0; float64 on rank 1"):
            optimizer.step()

    world(2, stall_warning_time=1.0, stall_shutdown_time=2.0).run(rank_body)


def test_a_grad_scaler_sees_reduced_gradients_in_the_step_after_a_conversion(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = distribute(context, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(4):
            if step == 2:
                model.double()
            rank = torch.full((1, 1), float(context.rank), dtype=model.weight.dtype)
            optimizer.zero_grad()
            scaler.scale(model(rank).sum()).backward()
            scaler.unscale_(optimizer)
            assert model.weight.grad is not None
            assert model.weight.grad.item() == 0.5, step
            scaler.step(optimizer)
            scaler.update()

    world(2).run(rank_body)


def test_on_three_ranks_gloo_s_sums_depend_only_a_little_on_where_in_a_bucket_an_element_stands() -> None:
    with contextlib.closing(World(3, "gloo", gradient_bucket=0)) as apart:
        expected = train(apart, whole_step)
    with contextlib.closing(World(3, "gloo")) as bucketed:
        result = train(bucketed, whole_step)
    for ours, theirs in zip(result[0], expected[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_mean_what_they_do_without_buckets(world: MakeWorld, options: dict[str, Any]) -> None:
    expected = train(world(2, gradient_bucket=0), whole_step, **options)
    result = train(world(2), whole_step, **options)
    for ours, theirs in zip(result[0], expected[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_compressor_that_looks_at_whole_tensors_gets_each_gradient_alone(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = Model()
        optimizer = distribute(context, model, compression=ByLargest)
        for step in range(3):
            whole_step(context, model, optimizer, step)
        assert all(len(names) == 1 for names in together(model))

    world(2, gradient_bucket=1 << 20).run(rank_body)


def test_several_passes_add_up_in_the_bucket(world: MakeWorld) -> None:
    def run(bucket: int) -> list[list[np.ndarray]]:
        def rank_body(context: Context) -> list[np.ndarray]:
            model = Model()
            optimizer = distribute(context, model, backward_passes_per_step=3)
            for step in range(STEPS):
                optimizer.zero_grad()
                for part in range(3):
                    model(inputs_of(context, 10 * step + part)).square().sum().backward()
                optimizer.step()
            return values(model)

        return world(2, gradient_bucket=bucket).run(rank_body)

    for ours, theirs in zip(run(1 << 20)[1], run(0)[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_gradients_take_their_places_and_nothing_else_changes_them(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = Model()
        optimizer = distribute(context, model)
        places = []
        for step in range(4):
            whole_step(context, model, optimizer, step)
            places.append([parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None])
        assert places[1] == places[2] == places[3]
        assert len(together(model)) == 1
        for parameter in model.parameters():
            assert parameter.grad is not None
            # Saved and copied by itself, not with the whole bucket.
            assert parameter.grad.untyped_storage().nbytes() == parameter.numel() * 4

    world(2).run(rank_body)


@pytest.mark.parametrize("bucket", [0, 1 << 20])
def test_autograd_learns_that_results_have_arrived(world: MakeWorld, bucket: int) -> None:
    """A value computed from a gradient before its reduction cannot be differentiated with the gradient's later
    value."""

    def rank_body(context: Context) -> None:
        model = Model()
        optimizer = distribute(context, model)
        for step in range(2):
            whole_step(context, model, optimizer, step)
        model(inputs_of(context, 2)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            weight = torch.ones_like(parameter, requires_grad=True)
            norm = (weight * parameter.grad).sum()  # keeps the gradient, for its own backward pass
            if parameter is model.layers[0].weight:
                optimizer.synchronize()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    norm.backward()
                break
            norm.backward()

    world(2, gradient_bucket=bucket).run(rank_body)


def test_who_else_holds_a_gradient_sees_the_result_in_it(world: MakeWorld) -> None:
    """A flat buffer of the user's, of which gradients are views, as some libraries make."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = Model()
        optimizer = distribute(context, model)
        whole_step(context, model, optimizer, 0)
        flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
        at = 0
        for parameter in model.parameters():
            parameter.grad = flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        mine = [parameter.grad for parameter in model.parameters()]
        model(inputs_of(context, 1)).square().sum().backward()
        optimizer.synchronize()
        assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), mine, strict=True))
        return [flat.numpy().copy()]

    bucketed = world(2).run(rank_body)
    apart = world(2, gradient_bucket=0).run(rank_body)
    np.testing.assert_array_equal(bucketed[0][0], bucketed[1][0])
    np.testing.assert_array_equal(bucketed[0][0], apart[0][0])


def test_rank_0_decides_and_its_order_of_readiness_holds(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[list[str]]:
        model = Model()
        optimizer = distribute(context, model)
        layers = list(model.layers)
        for step in range(2):
            for layer in layers if context.rank else layers[::-1]:  # each has a backward pass of its own
                layer(inputs_of(context, step)).square().sum().backward()
            optimizer.step()
        return together(model)

    first, second = world(2).run(rank_body)
    assert first == second
    (order,) = first
    assert [name.rpartition(".")[0] for name in order[::2]] == ["layers.2", "layers.1", "layers.0"]
    assert sorted(order) == sorted(name for name, _ in Model().named_parameters())


def test_an_optimizer_that_outlives_its_job_forms_buckets_in_the_next(world: MakeWorld) -> None:
    worlds = [world(2), world(2)]
    models, optimizers, current = [Model(), Model()], dict[int, DistributedTorchOptimizer](), dict[int, Context]()

    def rank_body(context: Context) -> None:
        rank = context.rank
        current[rank] = context
        if rank not in optimizers:
            frontend = Frontend(TorchAdapter(), lambda: current[rank])
            plain = torch.optim.SGD(models[rank].parameters(), lr=0.1)
            optimizers[rank] = wrap(frontend, plain, list(models[rank].named_parameters()), None, ReductionOptions())
        before = {id(parameter): parameter.grad for parameter in models[rank].parameters()}
        for step in range(3):
            whole_step(context, models[rank], optimizers[rank], step)
        assert len(together(models[rank])) == 1
        for parameter in models[rank].parameters():
            assert parameter.grad is not before[id(parameter)]  # but in a bucket of this job's

    for each in worlds:
        each.run(rank_body)
    for ours, theirs in zip(values(models[0]), values(models[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_plan_fills_buckets_in_order_by_type_the_first_one_small() -> None:
    def parameter(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, dtype=dtype)

    mega = 1 << 18  # floats in a MiB
    parameters = {
        "a": parameter(mega // 2),
        "b": parameter(mega // 2),
        "c": parameter(mega),
        "d": parameter(8, torch.float64),
        "e": parameter(mega),
        "f": parameter(9 * mega),
        "g": parameter(1),
    }
    assert plan(parameters, parameters, 2 << 20) == [["a", "b"], ["c", "e"], ["f"], ["g"], ["d"]]
    assert plan(parameters, ["g", "a"], 1 << 30) == [["g", "a"]]
    assert plan(parameters, [], 1 << 20) == []


def test_a_gradient_stays_as_it_is_while_a_slow_peer_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes its time over what it reads of rank 0's memory; rank 0 must not believe to have it back."""
    reading, go_on = threading.Event(), threading.Event()
    original = ZeroCopy._end

    def slow_end(self: ZeroCopy, step: int) -> Any:
        if self._rank == 1:
            reading.set()
            assert go_on.wait(10)
        yield from original(self, step)

    monkeypatch.setattr(ZeroCopy, "_end", slow_end)
    world = World(2, "shm")

    def rank_body(context: Context) -> None:
        memory = context.engine.allocate(0, 1 << 16)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        tensor.fill_(context.rank + 1.0)
        frontend = Frontend(TorchAdapter(), lambda: context)
        handle = frontend.allreduce_async_(tensor, op=ReduceOp.SUM, name="slow")
        if context.rank == 0:
            assert reading.wait(10)
            assert not frontend.poll(handle)
            go_on.set()
        frontend.synchronize(handle)
        assert (tensor == 3).all()

    with world:
        world.run(rank_body)


def test_all_go_another_way_where_one_ranks_tensor_is_elsewhere(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        memory = context.engine.allocate(0, 1 << 16) if context.rank == 0 else None
        tensor = torch.zeros(1 << 14) if memory is None else torch.frombuffer(memory, dtype=torch.float32)
        tensor.fill_(context.rank + 1.0)
        frontend = Frontend(TorchAdapter(), lambda: context)
        frontend.allreduce_(tensor, op=ReduceOp.SUM, name="x")
        assert (tensor == 6).all()
        elsewhere = frontend.allreduce(tensor, op=ReduceOp.SUM, name="y")  # the input stays, the result is new memory
        assert (elsewhere == 18).all()
        assert (tensor == 6).all()

    world(3).run(rank_body)


class TestArena:
    def test_memory_comes_back_and_is_found_where_it_is(self) -> None:
        with World(2, "shm") as world:
            arena = world.contexts[0].engine._groups[0].host.backend._arena  # type: ignore[attr-defined]
            blocks = [arena.allocate(size) for size in (5000, 1, 70_000)]
            places = [Buffer.of_array(np.frombuffer(block, np.uint8)).address for block in blocks]
            offsets = [arena.offset_of(address, 1) for address in places]
            assert offsets == [0, 8192, 12288]
            assert arena.offset_of(places[0] + 4999, 1) == 4999
            assert arena.offset_of(places[2] + 70_000, 8192) is None
            assert arena.offset_of(1, 1) is None
            del blocks[1:]
            assert arena.offset_of(places[1], 1) is None
            again = arena.allocate(80_000)
            assert arena.offset_of(Buffer.of_array(np.frombuffer(again, np.uint8)).address, 1) == 8192

    def test_memory_outlives_the_job(self) -> None:
        with World(2, "shm") as world:
            memory = world.contexts[0].engine.allocate(0, 1 << 16)
            tensor = torch.frombuffer(memory, dtype=torch.float32)
            tensor.fill_(7.0)
            del memory
        assert world.contexts[0].engine.allocate(0, 1 << 16) is None
        assert (tensor == 7).all()

    def test_a_lack_of_memory_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_room(nbytes: int) -> None:
            raise OSError(12, "no room")

        with World(2, "shm") as world:
            monkeypatch.setattr("hvdgloo._backends.shm.limits.check_room", no_room)
            assert world.contexts[0].engine.allocate(0, 1 << 16) is None
            monkeypatch.undo()
            assert world.contexts[0].engine.allocate(0, 1 << 16) is not None
            assert world.contexts[0].engine.allocate(0, 1 << 60) is None
