"""PowerSGD: gradients sent as two thin matrices (Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2).

A gradient M (n x m) is approximated by P Q^T with P (n x r) and Q (m x r), found by one step of subspace iteration that
begins where the last step ended. Both factors are averaged over the ranks, so r (n + m) numbers travel instead of n m.
What an approximation leaves out is added to the next gradient (error feedback), so nothing is lost, only late.

Ranks continue from the same factors. In an elastic job's next epoch some have none, so all begin again, without errors:
what the last approximation left out is lost, as is the error of a rank that is gone.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hvdgloo._collectives.core import Core
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor


class PowerSGD:
    """A compressor for one DistributedOptimizer, which keeps its state: a gradient's matrix M travels as two thin ones.

    ``M = P Q^T`` approximately, with P of shape (n, r) and Q of shape (m, r), found by one step of subspace iteration
    that begins with the last step's Q. What is left out of M is added to the next gradient. Source: Vogels, Karimireddy
    and Jaggi, "PowerSGD", NeurIPS 2019, arXiv 1905.13727.

    Args:
        rank: r, the width of the factors; more is more exact and more to send.
        min_saving: matrices that would shrink by less than this factor, and vectors, are sent as they are.

    Raises:
        InvalidArgumentError: rank is not a positive whole number; later, for reductions other than Average and Sum.
    """

    def __init__(self, rank: int = 4, min_saving: float = 2.0) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise InvalidArgumentError(f"the rank of PowerSGD is a whole number from 1, not {rank!r}")
        self.rank = rank
        self.min_saving = min_saving
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._context: weakref.ref[Context] | None = None  # that they are of

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_context": None}

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Not supported for a single tensor.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError("PowerSGD approximates gradients over many steps; give it to DistributedOptimizer")

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Not supported for a single tensor.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError("PowerSGD approximates gradients over many steps; give it to DistributedOptimizer")

    def begin(
        self, frontend: Core[Tensor], operation: CollectiveSpec, name: str, gradients: Sequence[Tensor]
    ) -> _Steps:
        """See ``hvdgloo._collectives.compression.MultiStep``.

        Raises:
            InvalidArgumentError: for reductions other than Average and Sum.
        """
        if operation.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InvalidArgumentError("PowerSGD approximates an average or a sum; use op=Average or op=Sum")
        context = frontend.context
        if self._context is not None and self._context() is not context:
            self.errors.clear()
            self.factors.clear()
        self._context = weakref.ref(context)
        return _Steps(self, frontend, operation, name, gradients)

    def is_worthwhile(self, gradient: Tensor) -> bool:
        """Tell whether the factors are sufficiently smaller than the gradient."""
        if gradient.dim() < 2 or not gradient.is_floating_point() or not gradient.numel():
            return False
        n, m = _as_matrix(gradient).shape
        return n * m >= self.min_saving * self.rank * (n + m)

    def factor(self, key: str, columns: int, like: Tensor) -> Tensor:
        """Return the start of a gradient's subspace iteration; at first a random matrix, the same on all ranks."""
        kept = self.factors.get(key)
        if kept is None or kept.shape[0] != columns:
            generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(key.encode()))
            random = torch.randn(columns, self.rank, generator=generator, dtype=like.dtype, device="cpu")
            kept = random.to(like.device)
        return kept


class _Approximation:
    """One matrix, from its gradient to the average of its approximations."""

    def __init__(self, compressor: PowerSGD, key: str, gradient: Tensor) -> None:
        self.compressor = compressor
        self.key = key
        self.gradient = gradient
        wide = gradient.detach() if gradient.dtype == torch.float64 else gradient.detach().float()
        self.matrix = _as_matrix(wide) + compressor.errors.get(key, 0.0)
        self.p = self.matrix @ compressor.factor(key, self.matrix.shape[1], self.matrix)
        self.q = self.p  # until ``project``

    def project(self) -> None:
        """P has been averaged: make its columns orthonormal, and project."""
        self.p = torch.linalg.qr(self.p)[0]
        self.q = self.matrix.t() @ self.p
        self.compressor.errors[self.key] = self.matrix - self.p @ self.q.t()

    def finish(self, factor: float) -> Tensor:
        """Q has been averaged."""
        self.compressor.factors[self.key] = self.q
        with torch.no_grad():
            self.gradient.copy_((self.p @ self.q.t()).mul_(factor).view_as(self.gradient))
        return self.gradient


class _Steps:
    """The gradients of one ``GradientReducer`` transfer."""

    def __init__(
        self,
        compressor: PowerSGD,
        frontend: Core[Tensor],
        operation: CollectiveSpec,
        name: str,
        gradients: Sequence[Tensor],
    ) -> None:
        self._frontend = frontend
        self._average = operation._replace(op=ReduceOp.AVERAGE, prescale=1.0, postscale=1.0)
        self._factor = operation.prescale * operation.postscale
        if operation.op is ReduceOp.SUM:
            self._factor *= frontend.members(operation)[0]
        self._gradients = gradients
        self._name = name
        self._large = {
            index: _Approximation(compressor, f"{name}.{index}", gradient)
            for index, gradient in enumerate(gradients)
            if compressor.is_worthwhile(gradient)
        }
        small = [gradient for index, gradient in enumerate(gradients) if index not in self._large]
        self._small = self._start(operation, small, name) if small else None
        self._second: Pending[Tensor] | None = None
        self._first = self._start(self._average, [a.p for a in self._large.values()], f"{name}.p")

    def _start(self, operation: CollectiveSpec, tensors: Sequence[Tensor], name: str) -> Pending[Tensor] | None:
        if not tensors:
            return None
        return self._frontend.start(operation, tensors, name, in_place=True, grouped=len(tensors) > 1)

    def advance(self) -> None:
        if self._first is None or self._second is not None:
            return
        self._first.result()
        held = interrupts.hold()  # what was projected twice would not be what the others have
        try:
            for approximation in self._large.values():
                approximation.project()
            self._second = self._start(self._average, [a.q for a in self._large.values()], f"{self._name}.q")
        finally:
            interrupts.release(held)

    def wait(self) -> list[Tensor]:
        if self._small is not None:
            self._small.result()
        if self._second is not None:
            self._second.result()
            for approximation in self._large.values():
                approximation.finish(self._factor)
        return list(self._gradients)


def _as_matrix(gradient: Tensor) -> Tensor:
    return gradient.reshape(gradient.shape[0], -1)
