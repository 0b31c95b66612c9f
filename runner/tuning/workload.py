"""The tensors of a training step, and the times at which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_BYTES = 1 << 20
"""Size of the first bucket of PyTorch's DistributedOptimizer, which is small; see ``torch._buckets``."""


@dataclass(frozen=True)
class Workload:
    """The gradients of one step, in the order in which they become ready.

    Attributes:
        sizes: size of each gradient, in bytes.
        delays: time at which each gradient is ready, in seconds since the first one; empty if not known. They are then
            spread over the time that it takes to send them.
        in_buckets: gradients are sent in buckets, as by PyTorch's DistributedOptimizer, rather than one by one.
    """

    sizes: tuple[int, ...]
    delays: tuple[float, ...] = ()
    in_buckets: bool = True

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def first(self, nbytes: int) -> Workload:
        """Return a workload of the first gradients, up to ``nbytes`` in all but at least one."""
        kept = 1
        while kept < len(self.sizes) and sum(self.sizes[: kept + 1]) <= nbytes:
            kept += 1
        return replace(self, sizes=self.sizes[:kept], delays=self.delays[:kept])

    def sent(self, bucket: int) -> list[tuple[int, int]]:
        """Return the tensors that are submitted: for each its bytes, and the number of the gradient that completes it.

        Args:
            bucket: maximum size of a bucket in bytes, unless a single gradient is larger; 0 for no buckets.
        """
        if not (self.in_buckets and bucket):
            return [(nbytes, number) for number, nbytes in enumerate(self.sizes)]
        sent: list[tuple[int, int]] = []
        filling = 0
        for number, nbytes in enumerate(self.sizes):
            limit = bucket if sent else min(bucket, FIRST_BYTES)
            if filling and filling + nbytes > limit:
                sent.append((filling, number - 1))
                filling = 0
            filling += nbytes
        return [*sent, (filling, len(self.sizes) - 1)]


def resnet50() -> tuple[int, ...]:
    """Return the sizes of ResNet-50's gradients in bytes, in the order of a backward pass: 161 of them, 97.5 MiB."""
    counts = [64 * 3 * 49, 64, 64]
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            counts += [into * width, width, width, 9 * width * width, width, width]
            counts += [4 * width * width, 4 * width, 4 * width]
            if block == 0:
                counts += [into * 4 * width, 4 * width, 4 * width]
            into = 4 * width
    counts += [1000 * 2048, 1000]
    return tuple(4 * count for count in reversed(counts))


def of_steps(steps: Sequence[Sequence[tuple[str, int, float]]], *, in_buckets: bool) -> Workload:
    """Return the workload of a program.

    Args:
        steps: the gradients of each step: name, bytes, and the time at which they were submitted, in seconds.
    """
    last = steps[-1]
    delays: dict[str, list[float]] = {name: [] for name, _, _ in last}
    for step in steps:
        for name, _, at in step:
            if name in delays:
                delays[name].append(at - step[0][2])
    middle = {name: sorted(found)[len(found) // 2] for name, found in delays.items()}
    order = sorted(last, key=lambda gradient: middle[gradient[0]])
    return Workload(tuple(nbytes for _, nbytes, _ in order), tuple(middle[name] for name, _, _ in order), in_buckets)
