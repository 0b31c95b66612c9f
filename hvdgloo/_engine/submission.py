"""One rank's part in a collective: what it asks for, made once, and each start of it, from submission to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hvdgloo._engine.handle import Handle
from hvdgloo._engine.messages import Request, Response
from hvdgloo._engine.residual import Residual
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, TensorSpec


class Signature:
    """An agreement of all ranks, and the number that stands for it in messages.

    Attributes:
        number: the number; -1 once the coordinator has forgotten it. For a template, the number of the last call that
            was ordered.
        response: the agreement.
        request: this rank's request, whose dimensions may differ from the agreed ones; None if it made none. It may be
            a template's.
        ended: number of operations that have been carried out under it, or failed by an order; the same on all ranks
            that have got as far.
        was_declined: True if an operation of it that this rank offered last was ordered instead.
    """

    __slots__ = ("ended", "number", "request", "response", "was_declined")

    def __init__(self, number: int, response: Response, request: Request | None) -> None:
        self.number = number
        self.response = response
        self.request = request
        self.ended = 0
        self.was_declined = False


class PersistentRequest:
    """A Request that is started again and again (MPI's term): what was found out about it is kept with it.

    Attributes:
        request: what is asked for.
        signature: what was last agreed upon for it, if anything. While that has a number, the request is known to be
            valid in itself.
        may_be_offered: True if it is of those that ranks of one host offer to each other; None if that was not asked.
        template: for a call with an automatic name: what it shares with all calls that differ only in that name's
            number, and where everything that was found out is kept.
        instance: that number.
        residual: what encoding has left out of its tensors, if that is kept.
    """

    __slots__ = ("instance", "may_be_offered", "request", "residual", "signature", "template")

    def __init__(self, request: Request, residual: Residual | None = None) -> None:
        self.request = request
        self.residual = residual
        self.signature: Signature | None = None
        self.may_be_offered: bool | None = None
        self.template: PersistentRequest | None = None
        self.instance = 0

    def numbered(self, instance: int) -> PersistentRequest:
        """Return the request of one call with an automatic name, of which this is the template."""
        numbered = PersistentRequest(replace(self.request, name=f"{self.request.name}.{instance}"))
        numbered.template, numbered.instance = self, instance
        return numbered


class Submission:
    """A started operation: a Request with this rank's memory for it, and its Handle.

    Args:
        persistent: the request, with what was found out about it at earlier starts.
        handle: resolved at the end; by default a new one.

    Attributes:
        submitted: when the program did, on the monotonic clock; 0 where nothing is counted, or for a rank that has
            joined.
    """

    __slots__ = (
        "allocate",
        "handle",
        "inputs",
        "number",
        "outputs",
        "persistent",
        "ready",
        "remaining",
        "request",
        "splits",
        "submitted",
        "times",
    )

    def __init__(
        self,
        persistent: PersistentRequest,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        allocate: Callable[[int, TensorSpec], Buffer] | None = None,
        ready: Callable[[], None] | None = None,
        splits: Sequence[int] = (),
        handle: Handle | None = None,
    ) -> None:
        request = self.request = persistent.request
        self.inputs = inputs
        self.outputs = list(outputs)
        self.allocate = allocate
        self.ready = ready
        self.splits = splits
        self.persistent = persistent
        self.handle = Handle(request.name) if handle is None else handle
        self.number = -1
        self.submitted = 0.0
        self.remaining = len(request.tensors) or 1
        self.times: Sequence[float] = ()  # submitted, ordered; only while there is a timeline

    def allocated(self, tensor: int, rows: int) -> Buffer:
        """Allocate a tensor's result, now that its number of rows is known.

        Raises:
            BackendError: nothing was given to allocate it with.
        """
        if self.allocate is None:
            raise BackendError(f"{self.request.name} was submitted without a way to allocate its result")
        spec = self.request.tensors[tensor]
        return self.allocate(tensor, TensorSpec(spec.dtype, (rows, *spec.shape[1:]), spec.device))
