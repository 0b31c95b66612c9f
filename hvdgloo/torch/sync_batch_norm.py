"""Batch normalisation over the batches of all ranks together (Ioffe and Szegedy, 2015).

Forward, every rank gathers all ranks' number of values, mean and sum of squared deviations for each channel, and merges
them pairwise-exactly (Chan, Golub and LeVeque, 1983): the difference of two sums of squares would lose the variance of
data with a large mean. Backward, the two sums over the batch that the gradient needs are summed over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdgloo._collectives.frontend import Frontend
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d/2d/3d`` whose statistics are those of all ranks' batches together.

    Args:
        num_features: C of an input of shape (N, C, ...).
        eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``.

    Ranks' batches may differ in size, and be empty as long as not all are. In evaluation, and in a job of one process,
    it is the plain layer. All ranks must run it, forward and backward, in the same order.

    Raises:
        InvalidArgumentError: (a ValueError) when called with an input of fewer than two dimensions, or when all ranks
            together have a single value per channel.
    """

    frontend: Frontend[Tensor] = FRONTEND

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise InvalidArgumentError(f"expected an input of at least two dimensions (N, C, ...), got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; shape (N, C, ...) to the same shape."""
        self._check_input_dim(input)
        if not self.training or self.frontend.size() == 1:
            output: Tensor = super().forward(input)
            return output
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.frontend)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._track(mean, variance, float(count))
        return output

    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            assert running is not None
            running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)


class _Normalise(torch.autograd.Function):
    """The layer as a node of torch's graph; also returns the statistics, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, frontend: Frontend[Tensor]
    ) -> Any:
        values = _channels(x)
        mean, variance, count = _statistics(values, frontend)
        inverse = torch.rsqrt(variance + eps)
        normal = (values - mean[:, None]) * inverse[:, None]
        output = normal
        if weight is not None and bias is not None:
            output = normal * weight.to(normal.dtype)[:, None] + bias.to(normal.dtype)[:, None]
        ctx.frontend, ctx.count = frontend, count
        ctx.has_weight = weight is not None
        ctx.save_for_backward(normal, inverse, weight if weight is not None else inverse)
        total = torch.tensor(count)
        ctx.mark_non_differentiable(mean, variance, total)
        return _restore(output, x), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        normal, inverse, weight = ctx.saved_tensors
        incoming = _channels(gradient)
        by_value, by_normal = incoming.sum(1), (incoming * normal).sum(1)
        sums = ctx.frontend.allreduce(torch.stack([by_value, by_normal]), op=ReduceOp.SUM) / ctx.count
        scale = inverse * weight.to(inverse.dtype) if ctx.has_weight else inverse
        result = (incoming - sums[0][:, None] - normal * sums[1][:, None]) * scale[:, None]
        needed = ctx.has_weight
        return (
            _restore(result, gradient),
            by_normal.to(weight.dtype) if needed else None,
            by_value.to(weight.dtype) if needed else None,
            None,
            None,
        )


def _channels(x: Tensor) -> Tensor:
    """(N, C, ...) to (C, values), in at least float32."""
    wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    return wide.transpose(0, 1).reshape(x.shape[1], -1)


def _restore(values: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_channels``."""
    swapped = (like.shape[1], like.shape[0], *like.shape[2:])
    return values.reshape(swapped).transpose(0, 1).to(like.dtype).contiguous()


def _statistics(values: Tensor, frontend: Frontend[Tensor]) -> tuple[Tensor, Tensor, float]:
    """Mean and (biased) variance of each channel over all ranks, shape (C,), and the number of values per channel."""
    channels, count = values.shape
    mean = values.double().mean(1) if count else values.new_zeros(channels, dtype=torch.float64)
    deviation = (values.double() - mean[:, None]).square().sum(1)
    own = torch.cat([mean.new_tensor([count]), mean, deviation])
    everyone = frontend.allgather(own[None])
    counts, means, deviations = everyone[:, :1], everyone[:, 1 : 1 + channels], everyone[:, 1 + channels :]
    total = float(counts.sum())
    if total <= 1:
        raise InvalidArgumentError(
            f"all ranks together have {total:g} values per channel; their variance needs more than one"
        )
    whole = (counts * means).sum(0) / total
    spread = deviations.sum(0) + (counts * (means - whole).square()).sum(0)
    return whole.to(values.dtype), (spread / total).to(values.dtype), total
