"""A checksum of a model's weights, for ``hvdgloo._training.weights``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hvdgloo._training.weights import checksum, samples_of


def checksum_of(parameters: Iterable[torch.Tensor]) -> int | None:
    """Return the checksum of a few elements of each parameter; None if none can be read.

    They are collected on the parameters' devices, and copied from each at once. Subclasses of tensors are left out:
    what is inside may be this rank's part alone.
    """
    samples: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for parameter in parameters:
            is_plain = type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.layout is torch.strided
            if is_plain and not parameter.is_meta and parameter.numel():
                elements = parameter.detach().reshape(-1)[samples_of(parameter.numel())]
                real = torch.view_as_real(elements).reshape(-1) if elements.is_complex() else elements
                samples.setdefault(parameter.device, []).append(real.double())
        found = [torch.cat(each).cpu().numpy() for each in samples.values()]
    return checksum(np.concatenate(found)) if found else None
