"""Batch normalisation over the batches of all ranks together (Ioffe and Szegedy, 2015).

Forward, every rank gathers all ranks' number of values, mean and sum of squared deviations for each channel, and merges
them pairwise-exactly (Chan, Golub and LeVeque, 1983): the difference of two sums of squares would lose the variance of
data with a large mean. Backward, the two sums over the batch that the gradient needs are summed over the ranks.

Activations are touched by torch's own kernels for batch normalisation only, in their own type and memory format; what
is computed here has one number per channel. Of each direction's collective the host waits for the end, and for nothing
else, so that a GPU always has something to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdgloo._collectives.frontend import Frontend
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d/2d/3d`` whose statistics are over all ranks' batches together.

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
        output, mean, variance, count = _normalise(input, self.weight, self.bias, self.eps, self.frontend)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.num_batches_tracked.double().reciprocal() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            assert running is not None
            running.mul_(1 - share).add_(new * share)


@uncompiled
def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, frontend: Frontend[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of the layer that ranks do together; what it returns is what ``_Normalise`` does."""
    output, mean, variance, count = _Normalise.apply(x, weight, bias, eps, frontend)  # type: ignore[no-untyped-call]
    return output, mean, variance, count


class _Normalise(torch.autograd.Function):
    """The layer as a node of torch's graph; also returns the statistics (float64), which have no gradient: mean and
    biased variance of each channel over all ranks, shape (C,), and the number of values per channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, frontend: Frontend[Tensor]
    ) -> Any:
        mean, variance, count = _statistics(x, frontend)
        ctx.frontend, ctx.eps, ctx.affine = frontend, eps, weight is not None
        ctx.save_for_backward(x, mean, variance, count, *(() if weight is None else (weight,)))
        ctx.mark_non_differentiable(mean, variance, count)
        return _normalised(x, weight, bias, mean, variance, eps), mean, variance, count

    @staticmethod
    @once_differentiable
    @uncompiled
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        x, mean, variance, count, *affine = ctx.saved_tensors
        # Over this rank's batch: the sums of the gradient, and of its products with the normalised values.
        by_value, by_normal = _sums(x, gradient, mean, variance, ctx.eps)
        sums = ctx.frontend.allreduce(torch.stack([by_value, by_normal]), op=ReduceOp.SUM) / count
        inverse = (variance + ctx.eps).rsqrt()
        scale = inverse * affine[0].double() if affine else inverse
        # scale * (gradient - sums[0] - normal * sums[1]), of which all but the gradient is a normalisation of its own
        result = _normalised(x, -sums[1] * scale, -sums[0] * scale, mean, variance, ctx.eps)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        result.addcmul_(gradient, scale.to(_kind(x)).view(shape))
        if not ctx.affine:
            return result, None, None, None, None
        return result, by_normal.to(affine[0].dtype), by_value.to(affine[0].dtype), None, None


def _kind(x: Tensor) -> torch.dtype:
    """The type in which torch's kernels compute with values of a type."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, as ``x`` in type and memory format."""
    if not x.numel():
        return torch.empty_like(x)
    kind = _kind(x)
    weight, bias = (None if number is None else number.to(kind) for number in (weight, bias))
    return torch.native_batch_norm(x, weight, bias, mean.to(kind), variance.to(kind), False, 0.0, eps)[0]


def _sums(x: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """For each channel, over a batch: the sum of the gradient, and of its products with the normalised values; (C,)."""
    if not x.numel():
        return mean.new_zeros(mean.shape), mean.new_zeros(mean.shape)
    kind = _kind(x)
    mean, variance = mean.to(kind), variance.to(kind)
    # What the layer's gradient in evaluation is made of; its input's is not asked for. The saved statistics have no
    # part in it, but CUDA's kernel refuses to run without them.
    _, by_normal, by_value = torch.ops.aten.native_batch_norm_backward(
        gradient,
        x,
        torch.ones_like(mean),
        mean,
        variance,
        mean,
        (variance + eps).rsqrt(),
        False,
        eps,
        [False, True, True],
    )
    return by_value.double(), by_normal.double()


def _statistics(x: Tensor, frontend: Frontend[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and (biased) variance of each channel over all ranks, shape (C,), and the number of values per channel."""
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    mean = variance = torch.zeros(channels, dtype=torch.float64, device=x.device)
    if count:
        # torch keeps statistics of half types in float32 if it is given some to update.
        scratch = None if x.dtype is _kind(x) else torch.zeros(channels, dtype=torch.float32, device=x.device)
        mean, variance = torch.batch_norm_update_stats(x, scratch, scratch, 0.0)
    own = torch.cat([mean.new_full((1,), count, dtype=torch.float64), mean, variance.double() * count])
    everyone = frontend.allgather(own[None])
    counts, means, deviations = everyone[:, :1], everyone[:, 1 : 1 + channels], everyone[:, 1 + channels :]
    total = counts.sum()
    # If this rank alone has enough, there is no need to wait for the number.
    if count <= 1 and float(total) <= 1:
        raise InvalidArgumentError(
            f"all ranks together have {float(total):g} values per channel; their variance needs more than one"
        )
    whole = (counts * means).sum(0) / total
    spread = deviations.sum(0) + (counts * (means - whole).square()).sum(0)
    return whole, spread / total, total
