"""Training on simulated GPUs: gradients in buckets, hooks on any stream, and no wait between backward pass and step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._backends import gpu  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.torch import _buckets as buckets  # noqa: E402
from hvdgloo.torch import _distributed_optimizer  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import ReductionOptions, wrap  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from tests.support.gpus import Schedule, Simulated, on_gpu, simulated  # noqa: E402
from tests.support.gpus.worlds import world  # noqa: E402

SIZE = 2
STEPS = 3


@pytest.fixture(params=[("late", 0), ("any", 3)], ids=lambda param: param[0])
def gpus(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    with simulated(Schedule(*request.param)) as made:
        yield made


@pytest.fixture
def late() -> Iterator[Simulated]:
    with simulated(Schedule("late")) as made:
        yield made


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(place: Callable[[Tensor], Tensor]) -> list[nn.Parameter]:
    """Of three layers, the middle one a convolution's in ``channels_last``."""
    middle = values(4, 3, 3, 3, seed=2).to(memory_format=torch.channels_last)
    return [nn.Parameter(place(tensor)) for tensor in (values(27, 6, seed=1), middle, values(36, 2, seed=3))]


def loss_of(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    first, middle, last = weights
    hidden = (inputs @ first.t()).tanh().view(-1, 3, 3, 3)
    hidden = torch.nn.functional.conv2d(hidden, middle, padding=1)
    loss: Tensor = (hidden.reshape(len(inputs), -1) @ last).pow(2).mean()
    return loss


def expected(passes: int = 1) -> list[Tensor]:
    """The parameters after training in one process, on all ranks' inputs."""
    weights = parameters(lambda tensor: tensor)
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            loss_of(weights, values(4 * SIZE, 6, seed=10 + step * passes + each)).backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


def distributed(context: Context, weights: Sequence[nn.Parameter], **options: Any) -> Any:
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    frontend = Frontend(TorchAdapter(), lambda: context)
    return wrap(frontend, optimizer, None, options.pop("groups", None), ReductionOptions(**options))


def assert_trained(weights: Sequence[Tensor], passes: int = 1) -> None:
    for ours, theirs in zip(weights, expected(passes), strict=True):
        torch.testing.assert_close(torch.tensor(ours.detach().tolist(), dtype=torch.float64), theirs)


@pytest.mark.parametrize(("operations", "completion"), [("nccl", "host"), ("nccl", "stream"), ("gloo", "host")])
def test_training_equals_one_process_s(gpus: Simulated, completion: str, operations: str) -> None:
    def body(context: Context) -> None:
        weights = parameters(on_gpu)
        optimizer = distributed(context, weights)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = values(4 * SIZE, 6, seed=10 + step).chunk(SIZE)[context.rank]
            loss_of(weights, on_gpu(inputs)).backward()
            optimizer.step()
        assert weights[1].grad is not None
        assert weights[1].grad.stride() == weights[1].stride()
        assert_trained(weights)

    with world(gpus, operations=operations, gpu_completion=completion) as made:
        made.run(body)


@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": 2},
        {"compression": Compression.fp16, "gradient_predivide_factor": 2.0},
        {"groups": 1},
    ],
    ids=["accumulated", "compressed", "grouped"],
)
def test_options(late: Simulated, options: dict[str, Any]) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def body(context: Context) -> None:
        weights = parameters(on_gpu)
        optimizer = distributed(context, weights, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for each in range(passes):
                inputs = values(4 * SIZE, 6, seed=10 + step * passes + each).chunk(SIZE)[context.rank]
                loss_of(weights, on_gpu(inputs)).backward()
            optimizer.step()
        if "compression" not in options:
            assert_trained(weights, passes)

    with world(late, gpu_completion="stream") as made:
        made.run(body)


@pytest.mark.parametrize("groups", [None, 1], ids=["buckets", "groups"])
def test_hooks_on_side_streams(late: Simulated, groups: int | None) -> None:
    """Gradients of one transfer are computed on streams of their own; the optimizer runs on the main one."""

    def body(context: Context) -> None:
        there = late.machine
        main, sides = there.current_stream(0), [there.new_stream(0) for _ in range(3)]
        weights = [nn.Parameter(on_gpu(torch.full((40,), float(n)))) for n in range(3)]
        optimizer = distributed(context, weights, groups=groups)
        for step in range(3):
            optimizer.zero_grad()
            ready = there.record(main)
            for weight, side in zip(weights, sides, strict=True):
                there.wait(side, ready)
                with there.on_stream(side):
                    (weight * on_gpu(torch.full((40,), float(step + context.rank)))).sum().backward()
                gpu.used_here(weight.grad)  # as a program has to say whose optimizer runs on another stream
            optimizer.step()
        for number, weight in enumerate(weights):
            value, momentum = float(number), 0.0
            for step in range(3):
                momentum = 0.9 * momentum + step + 0.5
                value -= 0.05 * momentum
            torch.testing.assert_close(torch.tensor(weight.detach().tolist()), torch.full((40,), value))

    with world(late) as made:
        made.run(body)


def test_a_gradient_asks_for_no_stream_object(late: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes microseconds to make and to compare, and gradients are many: one for each stream will do."""
    made: list[object] = []
    current = gpu.current

    def counted(device: torch.device) -> object:
        if threading.current_thread().name.startswith("rank-"):  # the program's, not the engine's
            made.append(device)
        return current(device)

    def body(context: Context) -> None:
        weights = [nn.Parameter(on_gpu(torch.full((4,), float(n)))) for n in range(20)]
        optimizer = distributed(context, weights)
        sum((weight.sum() for weight in weights), start=on_gpu(torch.zeros(()))).backward()
        optimizer.step()

    monkeypatch.setattr(gpu, "current", counted)
    with world(late) as ranks:
        ranks.run(body)
    assert len(made) == SIZE


def resnet50(width: int) -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's parameters in their order, with ``width`` channels after the first convolution."""
    shapes: list[tuple[int, ...]] = [(width, 3, 7, 7), (width,), (width,)]
    inputs = width
    for block, count in enumerate((3, 4, 6, 3)):
        narrow = width << block
        for number in range(count):
            layers = [(narrow, inputs, 1, 1), (narrow, narrow, 3, 3), (4 * narrow, narrow, 1, 1)]
            if number == 0:
                layers.append((4 * narrow, inputs, 1, 1))
            for layer in layers:
                shapes += [layer, (layer[0],), (layer[0],)]
            inputs = 4 * narrow
    return [*shapes, (1000 * width // 64, inputs), (1000 * width // 64,)]


def initial(shape: tuple[int, ...]) -> Tensor:
    tensor = torch.ones(shape)
    return tensor.to(memory_format=torch.channels_last) if len(shape) == 4 else tensor


@pytest.mark.extended
def test_at_most_eight_submissions_in_a_step_of_resnet_50(late: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """5.13: and nothing is copied for a transfer, whatever the memory format; at an eighth of the width, with buckets
    that are smaller in proportion."""
    assert len(resnet50(64)) == 161
    count = sum(torch.Size(shape).numel() for shape in resnet50(64))
    assert count == 25_557_032
    small = resnet50(8)
    share = sum(torch.Size(shape).numel() for shape in small) / count
    monkeypatch.setattr(buckets, "_FIRST_BYTES", int((1 << 20) * share))
    taken = threading.Barrier(SIZE)
    submitted: list[int] = []

    def body(context: Context) -> None:
        weights = [nn.Parameter(on_gpu(initial(shape))) for shape in small]
        optimizer = distributed(context, weights)
        for _ in range(2):
            optimizer.zero_grad()
            taken.wait(20)
            before = late.nccl.submitted
            taken.wait(20)
            sum((weight * 2.0).sum() for weight in reversed(weights)).backward()  # type: ignore[union-attr]
            optimizer.step()
            taken.wait(20)
            submitted.append(late.nccl.submitted - before)

    with world(late, gradient_bucket=int((25 << 20) * share), operation_timeout=30.0) as made:
        made.run(body, deadline=60)
    assert max(submitted[SIZE:]) <= 8 * SIZE
    assert len(set(submitted[SIZE:])) == 1


def test_a_step_does_not_drain_the_gpu(late: Simulated) -> None:
    """5.14: while no kernel runs at all, three whole steps are queued."""

    def body(context: Context) -> None:
        weights = [nn.Parameter(on_gpu(torch.full((40,), 1.0)))]
        optimizer = distributed(context, weights)

        def step() -> None:
            optimizer.zero_grad()
            (weights[0] * on_gpu(torch.full((40,), 1.0 + 2 * context.rank))).sum().backward()
            optimizer.step()

        step()
        step()
        meeting.wait(10)
        late.machine.schedule.is_paused = True
        waits = late.machine.waits
        for _ in range(3):
            step()
        assert late.machine.waits == waits
        meeting.wait(10)
        late.machine.schedule.is_paused = False
        value, momentum = 1.0, 0.0
        for _ in range(5):
            momentum = 0.9 * momentum + 2.0
            value -= 0.05 * momentum
        torch.testing.assert_close(torch.tensor(weights[0].detach().tolist()), torch.full((40,), value))

    meeting = threading.Barrier(SIZE)
    with world(late, gpu_completion="stream") as made:
        made.run(body)


def test_a_gradient_becomes_its_part_of_the_bucket(late: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """5.13: it is copied once, on its way into the bucket, and not a second time on its way back; in ``channels_last``
    as in any other format."""
    # Python cannot count the uses of simulated memory. The other count is kept for the process's other tests.
    monkeypatch.setattr(buckets, "_uses", lambda gradient: (1,))
    for module in (buckets, _distributed_optimizer):
        monkeypatch.setattr(module, "uses_of_a_private_gradient", lambda: (1,))

    def body(context: Context) -> None:
        weights = parameters(on_gpu)
        optimizer = distributed(context, weights)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(weights, on_gpu(values(4, 6, seed=context.rank))).backward()
            optimizer.step()
        (bucket,) = optimizer._hvd._bucketing.buckets.all
        assert gpu.of(bucket.whole) == torch.device("cuda", 0)
        addresses = {weight.grad.data_ptr(): weight.grad for weight in weights}
        assert set(addresses) == {bucket.address(name) for name in bucket.offsets}
        assert [weight.grad.stride() for weight in weights] == [weight.stride() for weight in weights]
        assert not weights[1].grad.is_contiguous()

    with world(late) as made:
        made.run(body)
