"""Keras 3's optimizers, stepping on gradients that all ranks share, on each of its backends.

The user's optimizer becomes an instance of a class that derives from its own and has the same name and module: so its
state, its checkpoints and its configuration are the plain optimizer's, and plain Keras loads what was saved. The class
overrides the one method through which every gradient passes just before a step, also where gradients are accumulated:
there they are reduced, before they are clipped. How depends on the backend: see the modules ``_on_tensorflow``,
``_on_torch`` (with hooks) and ``_on_jax`` beside this one.

Under mixed precision a LossScaleOptimizer decides whether gradients are finite before it calls the optimizer inside.
All ranks must decide alike, or those that step would wait for those that skip. So gradients are reduced before it looks
at them: a sum is finite only if all its parts are, and all ranks look at the same one. Where gradients stay a rank's
own (local layers, passes that only add up, reductions that can lose a NaN), the question is put to all ranks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import keras

from hvdgloo._training.options import GradientOptions, label
from hvdgloo._training.reducer import check_passes
from hvdgloo._training.subclass import shell_class
from hvdgloo.errors import InvalidArgumentError, MissingDependencyError
from hvdgloo.types import ReduceOp

FINITE = "gradients_are_finite"
"""The name under which ranks agree whether a step can be made."""

REMEDY = (
    "Pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit() on all ranks; in a loop of your own, call "
    "hvd.broadcast_variables or hvd.broadcast_parameters of the backend's front-end, at the latest after the first step"
)
"""The advice if ranks train from different weights."""


@dataclass(frozen=True)
class KerasOptions(GradientOptions):
    """Arguments of ``DistributedOptimizer`` that determine how gradients are reduced."""

    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    local_variables: tuple[Any, ...] = ()


class Sync(Protocol):
    """One backend's way to reduce gradients.

    Attributes:
        arrived: the reduced gradients of a step that is under way, or was interrupted; to be emptied when it is over.
    """

    arrived: list[list[Any]]

    def track(self, variables: Sequence[Any], *, changes: bool) -> None:
        """Prepare for the variables of a built optimizer; it ``changes`` gradients before it has them reduced."""

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, with zeros for gradients that this rank lacks and others might have."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; the given tensors are not changed where the user can see it."""

    def agree(self, holds: Any) -> Any:
        """Tell whether a boolean tensor is true on all ranks."""


class DistributedKerasOptimizer:
    """Methods that an optimizer has in addition once ``DistributedOptimizer`` has made it distributed."""

    _hvd: _State
    _hvd_options: ClassVar[KerasOptions]

    def build(self, variables: Any) -> None:
        """Make the optimizer's variables for some trained variables."""
        super().build(variables)  # type: ignore[misc]
        _track(self)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Make the plain optimizer's step on reduced gradients."""
        sync = self._hvd.sync
        grads, trainable_variables = _complete(self, sync, grads, trainable_variables)
        try:
            # As one: between the two, the next step would be taken for this one.
            return (super().apply(grads, trainable_variables), sync.arrived.clear())[1]  # type: ignore[misc,func-returns-value]
        except Exception:
            sync.arrived.clear()
            raise

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._hvd.variables = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        state = self._hvd
        if state.is_reduced:
            return super()._clip_gradients(grads)  # type: ignore[misc]
        whole = [gradient * state.factor for gradient in grads] if state.factor != 1 else list(grads)
        variables = state.variables
        if keras.backend.backend() == "jax" and self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            # There a step is computed in every pass, and discarded unless it is the last one.
            passes = self.gradient_accumulation_steps  # type: ignore[attr-defined]
            is_last = keras.ops.equal((self._iterations + 1) % passes, 0)  # type: ignore[attr-defined]
            reduced = keras.ops.cond(is_last, lambda: state.sync.reduce(whole, variables), lambda: whole)
        else:
            reduced = state.sync.reduce(whole, variables)
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone. To be called before the optimizer first steps."""
        self._hvd.add_local(variable)
        if self.built:  # type: ignore[attr-defined]
            _track(self)

    def register_local_layer(self, layer: Any) -> None:
        """Leave a layer's gradients to this rank alone; it may be built later."""
        self._hvd.local_layers.append(layer)
        if self.built:  # type: ignore[attr-defined]
            _track(self)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a distributed copy, as Keras makes it: without state."""
        plain: Any = super()
        rebuild, given = plain.__reduce__()
        return _distribute(rebuild(*given), self._hvd.options, self._hvd.local_layers)

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Make the optimizer of a configuration, distributed as this class's are; register local variables again.

        Keras itself asks the plain class for it, whose name is in the files that it saves.
        """
        plain = cls.__bases__[0].from_config(config, **kwargs)  # type: ignore[attr-defined]
        return _distribute(plain, cls._hvd_options)


class _State:
    """Distributed part of an optimizer; not among the objects that Keras tracks and saves."""

    def __init__(self, options: KerasOptions, local_layers: Sequence[Any]) -> None:
        passes = options.backward_passes_per_step
        self.options = options
        self.factor = 1.0 if passes == 1 or options.average_aggregated_gradients else float(passes)
        self.sync = open_sync(options)
        self.variables: list[Any] = []
        self.local_layers = list(local_layers)
        self.is_reduced = False  # whether the LossScaleOptimizer around this one has reduced gradients
        self.is_alike = False  # and whether all of them

    def add_local(self, *variables: Any) -> None:
        local = self.options.local_variables
        known = {id(variable) for variable in local}
        local = (*local, *(variable for variable in variables if id(variable) not in known))
        self.options = replace(self.options, local_variables=local)
        self.sync = open_sync(self.options)


def label_of(variables: Sequence[Any]) -> str:
    """Return the prefix of the names of these variables' gradients."""
    return label([(tuple(v.shape), str(v.dtype)) for v in variables])


def check_op(options: KerasOptions) -> None:
    """Check that Keras's optimizers can step on gradients that are reduced in this way.

    Raises:
        InvalidArgumentError: for Adasum, which combines what optimizers did, not gradients.
    """
    if options.op == ReduceOp.ADASUM:
        raise InvalidArgumentError(
            "op=Adasum combines the changes that optimizers made, and Keras's step on gradients; use Average, or "
            "hvdgloo.tensorflow's DistributedGradientTape or DistributedOptimizer with a tf.compat.v1 optimizer"
        )


def open_sync(options: KerasOptions) -> Sync:
    """Make the object that reduces gradients on the backend that Keras uses.

    Raises:
        MissingDependencyError: this backend is not supported.
        InvalidArgumentError: (a ValueError) an option cannot be used.
    """
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "torch", "jax"):
        raise MissingDependencyError(
            f"hvdgloo.keras works on Keras's TensorFlow, torch and JAX backends, not on {backend}; set KERAS_BACKEND"
        )
    made: Sync = importlib.import_module(f"hvdgloo.keras._on_{backend}").open_sync(options)
    return made


def wrap(optimizer: Any, options: KerasOptions) -> Any:
    """``DistributedOptimizer``: see there.

    Raises:
        InvalidArgumentError: (a ValueError) not an optimizer, one that is already distributed, or an option that
            cannot be used.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        wrap(optimizer.inner_optimizer, options)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidArgumentError(f"expected an optimizer of Keras, not {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedKerasOptimizer):
        raise InvalidArgumentError("the optimizer is already distributed; wrap it only once")
    passes = options.backward_passes_per_step
    check_passes(passes)
    check_op(options)
    if passes > 1:
        _accumulate(optimizer, passes)
    return _distribute(optimizer, options)


def _distribute(optimizer: Any, options: KerasOptions, local_layers: Sequence[Any] = ()) -> Any:
    state = _State(options, local_layers)
    _prepare()
    optimizer.__class__ = _class_of(type(optimizer), options)
    object.__setattr__(optimizer, "_hvd", state)  # Keras would track, and save, what it sees
    if optimizer.built:
        _track(optimizer)
    return optimizer


def _track(optimizer: Any) -> None:
    for layer in optimizer._hvd.local_layers:
        optimizer._hvd.add_local(*layer.trainable_variables)
    changes = bool(optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor)
    optimizer._hvd.sync.track(optimizer._trainable_variables, changes=changes)


def _accumulate(optimizer: Any, passes: int) -> None:
    if optimizer.gradient_accumulation_steps:
        raise InvalidArgumentError(
            "backward_passes_per_step= and Keras's gradient_accumulation_steps= are two names for one thing; use one"
        )
    if optimizer.built:
        raise InvalidArgumentError(
            "backward_passes_per_step= needs an optimizer that has no state yet; wrap it before the model is compiled"
        )
    optimizer.gradient_accumulation_steps = passes


def saved_as(saving: Any, template: type, base: type, options: KerasOptions, module: str | None = None) -> type:
    """Make the class of distributed optimizers that Keras saves as instances of ``base``.

    Args:
        saving: the module of Keras, or of tf_keras, that knows the names under which classes have been registered.
        template, base, module: as for ``shell_class``.
        options: of optimizers made by its ``from_config``; without groups of variables, which belong to one model.
    """
    groups = options.groups if isinstance(options.groups, int) else None
    made = shell_class(template, base, module, replace(options, groups=groups, local_variables=()))
    registered = saving.get_registered_name(base)
    package, is_registered, name = registered.rpartition(">")
    if is_registered and saving.get_registered_name(made) != registered:
        register, found = saving.register_keras_serializable(package, name), saving.get_registered_object(registered)
        register(made)
        register(found or base)  # the name still means what it did
    return made


def _class_of(base: type, options: KerasOptions) -> type:
    missing = [name for name in ("_clip_gradients", "_backend_apply_gradients") if not hasattr(base, name)]
    if missing:
        raise MissingDependencyError(
            f"Keras {keras.__version__} has no Optimizer.{missing[0]}, which hvdgloo needs; docs/compatibility.md "
            "lists the versions that work"
        )
    # By its public name, a class is found on every backend.
    public = getattr(keras.optimizers, base.__name__, None)
    is_public = public is not None and issubclass(base, public) and base.__module__.startswith("keras.")
    return saved_as(keras.saving, DistributedKerasOptimizer, base, options, "keras.optimizers" if is_public else None)


def _prepare() -> None:
    """Change what Keras does for distributed optimizers alone, once."""
    scaling = keras.optimizers.LossScaleOptimizer
    if not hasattr(scaling.check_finite, "hvdgloo"):
        scaling.check_finite = _agreeing(scaling.check_finite)
        scaling.apply = _reducing(scaling.apply)
        scaling.stateless_apply = _reducing_stateless(scaling.stateless_apply)
    prepare = getattr(importlib.import_module(f"hvdgloo.keras._on_{keras.backend.backend()}"), "prepare", None)
    if prepare is not None:
        prepare()


def _agreeing(plain: Any) -> Any:
    @functools.wraps(plain)
    def check_finite(self: Any, grads: Any) -> Any:
        inner, holds = self.inner_optimizer, plain(self, grads)
        return (
            holds
            if not isinstance(inner, DistributedKerasOptimizer) or inner._hvd.is_alike
            else inner._hvd.sync.agree(holds)
        )

    check_finite.hvdgloo = True  # type: ignore[attr-defined]
    return check_finite


def _reducing(plain: Any) -> Any:
    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not isinstance(self.inner_optimizer, DistributedKerasOptimizer) or (
            trainable_variables is None and not self.built
        ):
            return plain(self, grads, trainable_variables)  # which says what is wrong, if so
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)  # plain would do so too late; what is local is known after this
        sync = self.inner_optimizer._hvd.sync
        grads, trainable_variables = _complete(self, sync, grads, trainable_variables)
        try:
            with _reduced(self, grads, trainable_variables or self._trainable_variables) as reduced:
                return (plain(self, reduced, trainable_variables), sync.arrived.clear())[1]  # type: ignore[func-returns-value]
        except Exception:
            sync.arrived.clear()
            raise

    return apply


def _reducing_stateless(plain: Any) -> Any:
    @functools.wraps(plain)
    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        if not isinstance(self.inner_optimizer, DistributedKerasOptimizer) or not self.built:
            return plain(self, optimizer_variables, grads, trainable_variables)
        with _reduced(self, grads, self._trainable_variables) as reduced:
            return plain(self, optimizer_variables, reduced, trainable_variables)

    return stateless_apply


@contextmanager
def _reduced(scaling: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield scaled gradients, reduced before the LossScaleOptimizer looks at them, while it looks at them and steps."""
    results, state = list(gradients), scaling.inner_optimizer._hvd
    adds = state.options.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
    if not adds or scaling.inner_optimizer.gradient_accumulation_steps or len(results) != len(variables):
        yield results
        return
    # What is not a gradient but a variable's next value (of float8 scales) is each rank's own.
    chosen = [
        index
        for index, (gradient, variable) in enumerate(zip(results, variables, strict=True))
        if gradient is not None and not getattr(variable, "overwrite_with_gradient", False)
    ]
    reduced = state.sync.reduce([results[index] for index in chosen], [variables[index] for index in chosen])
    for index, gradient in zip(chosen, reduced, strict=True):
        results[index] = gradient
    given = sum(gradient is not None for gradient in results)
    state.is_reduced, state.is_alike = True, not state.options.local_variables and len(chosen) == given
    try:
        yield results
    finally:
        state.is_reduced = state.is_alike = False


def _complete(optimizer: Any, sync: Sync, gradients: Any, given: Any) -> tuple[list[Any], list[Any] | None]:
    gradients, given = list(gradients), None if given is None else list(given)
    variables = optimizer._trainable_variables if given is None else given
    # Keras says what is wrong if there are more of one than of the other.
    return sync.complete(gradients, variables) if len(gradients) == len(variables) else gradients, given
