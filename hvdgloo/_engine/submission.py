"""One rank's part in a collective, from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdgloo._engine.handle import Handle
from hvdgloo._engine.messages import Request
from hvdgloo.types import Buffer, TensorSpec


class Submission:
    """A submitted Request with this rank's memory for it."""

    __slots__ = (
        "allocate",
        "handle",
        "inputs",
        "number",
        "outputs",
        "ready",
        "remaining",
        "request",
        "splits",
        "times",
    )

    def __init__(
        self,
        request: Request,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        allocate: Callable[[int, TensorSpec], Buffer] | None,
        ready: Callable[[], None] | None,
        splits: Sequence[int] = (),
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = list(outputs)
        self.allocate = allocate
        self.ready = ready
        self.splits = splits
        self.handle = Handle(request.name)
        self.number = -1
        self.remaining = max(1, len(request.tensors))
        self.times: list[float] = []  # submitted, ordered; only while there is a timeline
