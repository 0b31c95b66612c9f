"""Which tensors the engine shares, which are staged, and which are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdgloo.errors import InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter, overlaps_itself  # noqa: E402
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
