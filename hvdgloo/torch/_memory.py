"""Tells which tensors have no memory that could be sent, and what to do with them instead.

Everything that hands an address to the engine asks here first: torch answers 0 for the address of many kinds of tensors
that look like ordinary ones on the CPU, and a small number for a view of memory that was freed.
"""

from __future__ import annotations

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from hvdgloo._backends import gpu

_UNREAL = (
    "a {} has no values, as torch uses it to trace a program (torch.export, torch.compile); call hvdgloo outside of "
    "what is traced"
)
_LAZY = "a lazy module has not made this one yet ({}); run the model on a batch first, on every rank"
_KINDS = {
    "DTensor": (
        "a DTensor is spread over torch.distributed's ranks, and has no memory of its own: send tensor.to_local() or "
        "tensor.full_tensor(); a model of fully_shard or parallelize_module reduces its gradients itself, so train it "
        "with the plain optimizer"
    ),
    "FakeTensor": _UNREAL,
    "FunctionalTensor": _UNREAL,
    "UninitializedParameter": _LAZY,
    "UninitializedBuffer": _LAZY,
}
"""Classes of torch's, some of which exist only once a module has been imported, to what is said about their tensors."""


def refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no memory that could be sent, and what to do instead; None if it has."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    for kind in () if is_plain else type(tensor).__mro__:
        if kind.__name__ in _KINDS and kind.__module__.startswith("torch."):
            return _KINDS[kind.__name__].format(kind.__name__)
    if is_functorch_wrapped_tensor(tensor):
        return (
            "tensors have no memory of their own inside of vmap, grad and the other transforms of torch.func; call "
            "hvdgloo outside of the function that is transformed"
        )
    if tensor.is_nested:
        return "a nested tensor cannot be sent; tensor.to_padded_tensor(0.0) gives one that can, or send its parts"
    if tensor.is_meta:
        return (
            "a meta tensor has no values; give the whole model memory, model.to_empty(device='cpu'), and load or "
            "initialise its weights, before an optimizer is made for it and before anything is sent"
        )
    if tensor.layout is torch.strided and has_no_address(tensor) and not tensor._is_zerotensor():
        if is_plain:
            return "the tensor's memory has been freed (its storage has 0 bytes), as FSDP does it between uses"
        return f"a {type(tensor).__name__} has no memory of its own; send the tensors that it consists of"
    return None


def has_no_address(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor with elements, on the CPU or a GPU, lacks memory."""
    if not (tensor.is_cpu or gpu.of(tensor) is not None) or not tensor.numel():
        return False
    try:
        return is_null(tensor, tensor.data_ptr())
    except RuntimeError:  # the way in which some kinds say so
        return True


def is_null(tensor: torch.Tensor, address: int) -> bool:
    """Tell whether an address is only the tensor's place in its storage, which itself lies nowhere."""
    return address == tensor.storage_offset() * tensor.element_size()
