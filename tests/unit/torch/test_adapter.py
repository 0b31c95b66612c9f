"""Tensors that the engine shares, stages, or refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdgloo.errors import InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter, overlaps_itself  # noqa: E402
from hvdgloo.torch._parameters import refuse_unsendable  # noqa: E402
from hvdgloo.types import DType, TensorSpec  # noqa: E402

adapter = TorchAdapter()


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_contiguous_tensors_are_shared(dtype: DType) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype.value))
    buffer = adapter.export(tensor, writable=True)
    assert buffer.owner is tensor
    assert buffer.spec == TensorSpec(dtype, (2, 3))
    buffer.array().view(np.uint8)[:] = 0
    assert tensor.double().tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.ones(1).expand(4),
        torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(6.0).reshape(2, 3).t().requires_grad_(),
    ],
    ids=["transposed", "strided", "expanded", "channels last", "negated view", "needs a gradient"],
)
def test_others_are_staged(tensor: torch.Tensor) -> None:
    buffer = adapter.export(tensor)
    assert buffer.owner is not tensor
    np.testing.assert_array_equal(buffer.array().reshape(buffer.shape), tensor.detach().resolve_neg().numpy())
    assert adapter.fence([tensor]) is None


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.zeros(2, device="meta"), "meta"),
        (np.zeros(2), "ndarray"),
    ],
    ids=["complex", "float8", "sparse", "meta", "array"],
)
def test_what_cannot_be_sent_is_refused_by_name(tensor: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        adapter.export(tensor)  # type: ignore[arg-type]


def test_a_result_needs_memory_of_its_own() -> None:
    with pytest.raises(InvalidArgumentError, match="share memory"):
        adapter.export(torch.ones(1).expand(4), writable=True)
    adapter.export(torch.ones(1).expand(1), writable=True)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)], ids=str)
def test_what_is_allocated_is_shared(shape: tuple[int, ...]) -> None:
    like = torch.ones(2, 2, dtype=torch.bfloat16).t().requires_grad_()
    tensor = adapter.allocate(TensorSpec(DType.BFLOAT16, shape), like)
    assert tensor.dtype is torch.bfloat16
    assert not tensor.requires_grad
    buffer = adapter.export(tensor, writable=True)
    assert buffer.owner is tensor
    assert buffer.count == math.prod(shape)


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.ones(2, 3), False),
        (torch.ones(2, 3).t(), False),
        (torch.ones(4, 6)[::2, ::3], False),
        (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), False),
        (torch.ones(12).as_strided((2, 3), (3, 2)), False),  # they reach into each other, and do not meet
        (torch.ones(1).expand(1), False),
        (torch.ones(3, 0).expand(3, 0), False),
        (torch.ones(()), False),
        (torch.ones(2, 1).expand(2, 3), True),
        (torch.ones(5).unfold(0, 3, 1), True),
    ],
)
def test_which_tensors_share_memory_with_themselves(tensor: torch.Tensor, overlaps: bool) -> None:
    assert overlaps_itself(tensor) is overlaps


@pytest.fixture
def spread() -> Iterator[Callable[[torch.Tensor], Any]]:
    """Makes a DTensor on a mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        yield lambda tensor: distribute_tensor(tensor, mesh, [Replicate()])
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_tensor_that_is_spread_over_other_processes_is_refused(spread: Callable[[torch.Tensor], Any]) -> None:
    tensor = spread(torch.ones(4))
    with pytest.raises(InvalidArgumentError, match=r"^a DTensor .* send tensor\.to_local\(\) or "):
        adapter.export(tensor)
    with pytest.raises(InvalidArgumentError, match="DTensor"):
        adapter.export(tensor, known=TensorSpec(DType.FLOAT32, (4,)))
    assert adapter.export(tensor.to_local()).array().tolist() == [1] * 4
    linear = torch.nn.Linear(2, 2)
    linear.weight = torch.nn.Parameter(spread(linear.weight.detach()))
    with pytest.raises(InvalidArgumentError, match=r"^weight: a DTensor .* train it with the plain optimizer"):
        refuse_unsendable(linear.named_parameters())


class Pair(torch.Tensor):
    """A subclass that consists of another tensor, as the subclasses of libraries for quantisation do."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A subclass that is memory like any other."""


def traced() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


def freed(offset: int) -> torch.Tensor:
    whole = torch.ones(8)
    part = whole[offset : offset + 4]
    whole.untyped_storage().resize_(0)
    return part


@pytest.mark.filterwarnings("ignore")  # torch's own: nested tensors are a prototype
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Pair(torch.ones(4)), r"^a Pair has no memory of its own; send the tensors that it consists of"),
        (traced, r"^a FakeTensor has no values"),
        (lambda: torch.ones(4, device="meta"), r"^a meta tensor has no values; .*model\.to_empty\(device='cpu'\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]), r"^a nested tensor .*to_padded_tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            r"^a nested tensor .*to_padded_tensor",
        ),
        (lambda: torch.nn.LazyLinear(2).weight, r"^a lazy module has not made this one yet \(UninitializedParameter\)"),
        (lambda: freed(0), r"memory has been freed"),
        (lambda: freed(2), r"memory has been freed"),
    ],
    ids=["wrapper", "fake", "meta", "nested", "jagged", "lazy", "freed", "part of freed"],
)
def test_a_tensor_without_memory_is_refused_with_what_to_do(make: Callable[[], torch.Tensor], text: str) -> None:
    tensor = make()
    for known in (None, TensorSpec(DType.FLOAT32, (4,))):
        with pytest.raises(InvalidArgumentError, match=text):
            adapter.export(tensor, known=known)
    with pytest.raises(InvalidArgumentError, match=text.replace("^", "^layer: ")):
        refuse_unsendable([("layer", tensor)])


def test_a_tensor_inside_of_a_transform_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(InvalidArgumentError, match=r"torch\.func; call hvdgloo outside"):
            adapter.export(x, known=TensorSpec(DType.FLOAT32, (4,)))
        with pytest.raises(InvalidArgumentError, match=r"torch\.func"):
            adapter.differentiable(adapter_forward, lambda _, gradients: gradients, [x], keep=False)
        return x.sum()

    def adapter_forward(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in tensors:
            adapter.export(tensor)
        return list(tensors)

    torch.func.vmap(function)(torch.ones(2, 4))
    torch.func.grad(function)(torch.ones(4))


def test_what_has_memory_is_not_refused() -> None:
    for tensor in (torch.ones(3).as_subclass(Named), torch.nn.Parameter(torch.ones(3)), torch.ones(0), torch.ones(())):
        buffer = adapter.export(tensor)
        assert buffer.owner is tensor
        refuse_unsendable([("layer", tensor)])
    assert adapter.export(torch._efficientzerotensor((3,))).array().tolist() == [0, 0, 0]


def test_nothing_is_staged_in_what_a_mode_makes_instead_of_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = torch.arange(6.0).reshape(2, 3).t()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InvalidArgumentError, match="FakeTensor"):
        adapter.export(tensor)
    spec = TensorSpec(DType.FLOAT32, (3,))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InvalidArgumentError, match="FakeTensor"):
        adapter.export(adapter.allocate(spec, tensor), known=spec)
