"""``DistributedOptimizer`` for the Module API and custom loops, and ``DistributedTrainer`` for Gluon."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import mxnet as mx

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._platform import interrupts
from hvdgloo._training.options import GradientOptions
from hvdgloo._training.subclass import shell_class
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError, MismatchError
from hvdgloo.mxnet._adapter import Tensor
from hvdgloo.mxnet._frontend import FRONTEND
from hvdgloo.mxnet._gradients import MXNetGradientSync
from hvdgloo.mxnet.functions import require_dense

__all__ = ["DistributedOptimizer", "DistributedTrainer"]


class DistributedMXNetOptimizer:
    """Methods in which a distributed optimizer differs from the plain one, which it holds and whose state it shares."""

    __slots__ = ("_plain", "_sync")  # not in the state, which is the plain optimizer's

    _plain: Any
    _sync: MXNetGradientSync

    @property
    def aggregate_num(self) -> int:
        """The number of weights that MXNet's updater passes at once: all, so that their gradients travel together."""
        return sys.maxsize

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients over all ranks, in place, and update their weights with them.

        Args:
            index: of the weight, or a list of indices; then the others are lists as well.
            weight, grad, state: as for the plain optimizer.

        Raises:
            HorovodInternalError: the gradients could not be averaged; no weight was changed.
        """
        self._update(self._plain.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Do what ``update`` does, with weights of float16 kept as float32 if the optimizer does that."""
        self._update(self._plain.update_multi_precision, index, weight, grad, state)

    def __copy__(self) -> Any:
        return _distributed(copy.copy(self._plain), self._sync)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _distributed(copy.deepcopy(self._plain, memo), self._sync)

    def __reduce__(self) -> Any:
        # As itself: ``gluon.Trainer.load_states`` continues training with whatever comes out.
        return _distributed, (self._plain, self._sync)

    def _update(self, step: Any, index: Any, weight: Any, grad: Any, state: Any) -> None:
        try:
            if isinstance(index, (list, tuple)):
                self._sync.reduce(dict(zip(index, grad, strict=True)), lambda: weight)
                updates = self._parts(index, weight, grad, state)
            else:
                self._sync.reduce({index: grad}, lambda: [weight])
                updates = [(index, weight, grad, state)]
            held = interrupts.hold()  # a step that is half made would be made once more, or taken for the next one
            try:
                for each in updates:
                    step(*each)
                self._sync.step.clear()
            finally:
                interrupts.release(held)
        except Exception:
            self._sync.step.clear()
            raise

    def _parts(self, *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Divide the arguments of an update into as many as the plain optimizer takes at once."""
        at_once = self._plain.aggregate_num
        if at_once <= 0:
            return list(zip(*lists, strict=True))
        return [tuple(each[i : i + at_once] for each in lists) for i in range(0, len(lists[0]), at_once)]


def _distributed(plain: Any, sync: MXNetGradientSync) -> Any:
    shell = object.__new__(shell_class(DistributedMXNetOptimizer, type(plain)))
    shell.__dict__ = plain.__dict__
    shell._plain, shell._sync = plain, sync
    return shell


def wrap(frontend: Frontend[Tensor], optimizer: Any, options: GradientOptions) -> Any:
    """Make a ``DistributedOptimizer`` on a given Frontend.

    Raises:
        InvalidArgumentError: (a ValueError) not an optimizer, one that is already distributed, or an option that
            cannot be used.
        NotInitializedError: before ``init()``.
    """
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise InvalidArgumentError(f"expected an mx.optimizer.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedMXNetOptimizer):
        raise InvalidArgumentError("the optimizer is already distributed; wrap it only once")
    return _distributed(optimizer, MXNetGradientSync.reserved(frontend, options, "gradient"))


def DistributedOptimizer(  # noqa: N802 - Horovod's name; it makes an instance of a class of its own
    optimizer: Any,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
    compression: Compressor[Tensor] = NoneCompressor,
) -> Any:
    """An optimizer that updates weights with gradients averaged over all ranks.

    For ``Module.fit(kvstore=None, optimizer=...)`` and ``Module.init_optimizer``. Gluon has ``DistributedTrainer``.

    Args:
        optimizer: a plain optimizer. It is held and does the updating; both share one state from then on. Its
            ``rescale_grad`` is for this rank's batch: 1 / batch size, not divided by the number of ranks.
        gradient_predivide_factor: splits the average's division: by this before the sum, by size / this after it.
        num_groups: how many groups of gradients to send as one each; 0 sends each gradient separately.
        process_set: the ranks that share gradients.
        compression: ``Compression.fp16`` sends float32 and float64 gradients as float16; ``Compression.int8`` and
            ``Compression.int4`` leave gradients as they are within a host, and send float32 to other hosts in a quarter
            or a seventh of the bytes (docs/slow-networks.md).

    Returns:
        an instance of the optimizer's own class. Its copies are distributed as well, and so is what is loaded from its
        pickle, such as a file of ``gluon.Trainer.save_states``: loading needs hvdgloo, and its process set registered;
        updating needs ``init()``. The plain optimizer, which has the same state, is the one to pickle for programs
        without hvdgloo.

    Raises:
        InvalidArgumentError: (a ValueError) not an optimizer, or an option that cannot be used.
        NotInitializedError: before ``init()``.
    """
    options = GradientOptions(
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=num_groups,
        process_set=process_set,
    )
    return wrap(FRONTEND, optimizer, options)


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A Gluon trainer that steps on gradients averaged over all ranks; without a kvstore.

    ``step(batch_size)`` gets the batch size of this rank. ``allreduce_grads()`` and ``update()`` work as in a plain
    trainer. With ``ignore_stale_grad=True``, either way, a parameter is updated on all ranks if it has a new gradient
    on one: the others add zeros. ``save_states()`` saves the plain optimizer, for any trainer.

    In an elastic job it averages over the ranks that are there. When ranks come or go, gradients that no step has used
    yet are dropped: set to zero, and no longer fresh.

    Args:
        params: ``net.collect_params()``, on one device.
        optimizer: its name, or a plain optimizer.
        optimizer_params: for an optimizer that is given by its name.
        compression: ``Compression.fp16`` sends float32 and float64 gradients as float16; ``Compression.int8`` and
            ``Compression.int4`` leave gradients as they are within a host, and send float32 to other hosts in a quarter
            or a seventh of the bytes (docs/slow-networks.md).
        gradient_predivide_factor: splits the average's division: by this before the sum, by size / this after it.
        prefix: begins the names of gradients in messages. They end in the parameter's number, counted from 0 in order
            of names (for a list: in its order).
        num_groups: how many groups of gradients to send as one each; 0 sends each gradient separately.
        process_set: the ranks that share gradients.

    Raises:
        InvalidArgumentError: (a ValueError) parameters on several devices, sparse parameters, or an option that cannot
            be used.
        NotInitializedError: before ``init()``.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Compressor[Tensor] = NoneCompressor,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedMXNetOptimizer):
            text = (
                "DistributedTrainer averages gradients itself, and takes the plain optimizer that the given one holds"
            )
            warnings.warn(text, stacklevel=2)
            optimizer = optimizer._plain
        options = GradientOptions(
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=num_groups,
            process_set=process_set,
        )
        self._sync = MXNetGradientSync.reserved(FRONTEND, options, f"{prefix or ''}gradient")
        self._sync.when_job_ends(self._drop_gradients)
        self._joining: list[Tensor] = []
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        require_dense(self._params)
        if len(self._contexts or ()) > 1:
            raise InvalidArgumentError(
                f"parameters are on {len(self._contexts)} devices; start a rank for each device, with ctx=one device"
            )

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Average all gradients over the ranks and update the parameters.

        Args:
            batch_size: of this rank; gradients are divided by it.
            ignore_stale_grad: leave parameters alone that no rank has a new gradient for, instead of raising.

        Raises:
            InvalidArgumentError: (a ValueError) a gradient is sparse.
            HorovodInternalError: gradients could not be averaged; no parameter was changed.
            UserWarning: (an exception of MXNet's) a parameter has no new gradient.
        """
        if ignore_stale_grad and self._sync.active:
            self._share_freshness()
        try:
            super().step(batch_size, ignore_stale_grad)
        except Exception:
            self._sync.step.clear()
            raise

    def allreduce_grads(self) -> None:
        """Average all gradients over the ranks, for ``update()``: to clip them in between, for instance.

        A gradient that is new on another rank and not on this one is zeros before it is averaged.

        Raises:
            InvalidArgumentError: (a ValueError) a gradient is sparse.
            HorovodInternalError: gradients could not be averaged.
        """
        if self._sync.active:
            self._share_freshness()
        return (super().allreduce_grads(), self._sync.step.clear())[1]  # type: ignore[func-returns-value]

    def load_states(self, fname: str) -> None:
        """Load what ``save_states`` has written: the optimizer, its state, and its options.

        Args:
            fname: a file of this trainer's or of ``gluon.Trainer``'s. From a ``DistributedOptimizer`` in it the plain
                one is taken: this trainer averages, with its own options.
        """
        super().load_states(fname)
        loaded: Any = self.optimizer
        if isinstance(loaded, DistributedMXNetOptimizer):
            self._optimizer = loaded._plain
            for updater in self._updaters:
                updater.optimizer = loaded._plain

    def _allreduce_grads(self) -> None:
        trained = self._trained()
        try:
            gradients: dict[Hashable, Any] = {index: self._params[index].list_grad()[0] for index in trained}
            self._sync.reduce(gradients, lambda: [self._params[index].list_data()[0] for index in trained])
        except HorovodInternalError as error:
            self._joining = []
            if not isinstance(error, MismatchError):
                raise
            # Numbers name gradients, since parameters' names depend on what else a rank has built.
            number = error.name.rpartition(".")[2].partition("+")[0]
            here = self._params[int(number)].name
            raise MismatchError(f"{error} (on this rank {number} is {here})", name=error.name) from error

    def _update(self, ignore_stale_grad: bool = False) -> None:
        held = interrupts.hold()  # as in a distributed optimizer
        try:
            joining, self._joining = self._joining, []
            if ignore_stale_grad:
                for array in joining:
                    array._fresh_grad = True
            super()._update(ignore_stale_grad)
            self._sync.step.clear()
        finally:
            interrupts.release(held)

    def _share_freshness(self) -> None:
        """Have all ranks average the same gradients, those that are new on any of them, and step with them if stale
        ones are to be ignored."""
        if self._sync.step.get("shared"):
            return  # the step was interrupted, and goes on; its gradients may be under way
        trained = self._trained()
        data = [self._params[index].list_data()[0] for index in trained]
        fresh = self._sync.anywhere([bool(array._fresh_grad) for array in data])
        self._joining = []
        for index, array, anywhere in zip(trained, data, fresh, strict=True):
            if anywhere and not array._fresh_grad:
                self._params[index].list_grad()[0][:] = 0
                self._joining.append(array)
        self._sync.step["shared"] = True

    def _drop_gradients(self) -> None:
        """Drop gradients that are half reduced, or half added up, when an epoch of an elastic job has ended."""
        self._joining = []
        for index in self._trained():
            if self._params[index]._grad is None:
                continue  # not initialised yet
            for gradient, array in zip(self._params[index].list_grad(), self._params[index].list_data(), strict=True):
                gradient[:] = 0
                array._fresh_grad = False

    def _trained(self) -> Sequence[int]:
        return [index for index, parameter in enumerate(self._params) if parameter.grad_req != "null"]
