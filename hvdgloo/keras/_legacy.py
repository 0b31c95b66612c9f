"""Optimizers of tf_keras, which is Keras 2: what ``tf.keras`` is if a program asks for it (TF_USE_LEGACY_KERAS=1).

Their gradients pass through ``apply_gradients``, with the variables, and are reduced there. If a program calls
``compute_gradients`` itself, its gradients are reduced there, and not again by the ``apply_gradients`` that follows.
tf_keras is imported only once there is such an optimizer.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

from hvdgloo._training.reducer import check_passes
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras._distributed_optimizer import FINITE, KerasOptions, check_op, saved_as

_NO_PASSES = (
    "backward_passes_per_step= cannot be combined with a LossScaleOptimizer of tf_keras; accumulate gradients in the "
    "training step"
)


class DistributedLegacy:
    """Methods that an optimizer of tf_keras has in addition once it is distributed."""

    _hvd: _State
    _hvd_options: ClassVar[KerasOptions]

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """The plain optimizer's step on a loss; ``apply_gradients`` reduces its gradients."""
        with self._hvd.minimizing():
            return super().minimize(*args, **kwargs)  # type: ignore[misc]

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """The gradients of all ranks, to be clipped or logged; the next ``apply_gradients`` takes them as reduced."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        plain: Any = super()
        if hasattr(__class__.__bases__[0], "_compute_gradients"):  # type: ignore[name-defined]
            return self._hvd.compute(plain._compute_gradients, loss, var_list, grad_loss, tape=tape)
        if grad_loss is not None:
            raise InvalidArgumentError("grad_loss= is for tf_keras.optimizers.legacy; multiply the loss by it instead")
        return self._hvd.compute(plain.compute_gradients, loss, var_list, tape=tape)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The gradients of all ranks; of an optimizer of tf_keras.optimizers.legacy."""
        return self._hvd.compute(super().get_gradients, loss, params, of=params)  # type: ignore[misc,no-any-return]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain optimizer's step, on the gradients of all ranks; with several passes per step after the last."""
        pairs, state, plain = list(grads_and_vars), self._hvd, super().apply_gradients  # type: ignore[misc]
        if state.is_reduced:
            return plain(pairs, *args, **kwargs)
        passes = state.passes
        together = pairs if state.takes_reduced() else state.reduce(pairs)
        if passes is None:
            return plain(together, *args, **kwargs)
        trained = [variable for gradient, variable in pairs if gradient is not None]
        # No variables can be made in a branch.
        make = self.build if hasattr(self, "build") else self._create_all_weights  # type: ignore[attr-defined]
        return passes.apply_gradients(lambda: plain(together, *args, **kwargs), lambda: make(trained))

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._hvd.sync.register_local_source(variable)

    def register_local_layer(self, layer: Any) -> None:
        """Leave a built layer's gradients to this rank alone."""
        for variable in layer.trainable_variables:
            self.register_local_var(variable)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """The optimizer of a configuration, distributed as this class's are; what is local must be registered again.

        tf_keras itself asks the plain class for it, whose name is in what it saves.
        """
        plain = cls.__bases__[0].from_config(config, **kwargs)  # type: ignore[attr-defined]
        return wrap(plain, cls._hvd_options)


def is_legacy(optimizer: Any) -> bool:
    """Tell whether an object is an optimizer of tf_keras."""
    return any(
        base.__module__.startswith("tf_keras.") and base.__name__ in ("Optimizer", "OptimizerV2", "_BaseOptimizer")
        for base in type(optimizer).__mro__
    )


def wrap(optimizer: Any, options: KerasOptions) -> Any:
    """Make an optimizer of tf_keras distributed.

    Raises:
        InvalidArgumentError: (a ValueError) it is already distributed, or an option cannot be used.
    """
    if isinstance(optimizer, DistributedLegacy):
        raise InvalidArgumentError("the optimizer is already distributed; wrap it only once")
    if hasattr(optimizer, "inner_optimizer"):
        if options.backward_passes_per_step != 1:
            raise InvalidArgumentError(_NO_PASSES)
        wrap(optimizer.inner_optimizer, options)
        return optimizer
    check_passes(options.backward_passes_per_step)
    check_op(options)
    state = _State(options)
    _prepare()
    keras = importlib.import_module("tf_keras")
    optimizer.__class__ = saved_as(keras.saving, DistributedLegacy, type(optimizer), options)
    object.__setattr__(optimizer, "_hvd", state)
    return optimizer


def load_model(filepath: Any, names: dict[str, Any], options: KerasOptions) -> Any:
    """Load a model that tf_keras has saved, with a distributed optimizer.

    Args:
        filepath: of a ``.keras`` or ``.h5`` file, or of a SavedModel's directory.
        names: the objects that names in it stand for.
        options: of the optimizer.
    """
    model = importlib.import_module("tf_keras").models.load_model(filepath, custom_objects=names)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        wrap(optimizer, options)
    return model


class _State:
    """Distributed part of an optimizer; not among the objects that tf_keras tracks and saves."""

    def __init__(self, options: KerasOptions, local_variables: Iterable[Any] = ()) -> None:
        gradients = importlib.import_module("hvdgloo.tensorflow._gradients")
        aggregation = importlib.import_module("hvdgloo.tensorflow.gradient_aggregation")
        self._frontend = importlib.import_module("hvdgloo.tensorflow._frontend")
        self.sync = gradients.GradientSync(self._frontend.FRONTEND, options)
        for variable in local_variables:
            self.sync.register_local_source(variable)
        self.passes: Any = None
        if options.backward_passes_per_step > 1:
            self.passes = aggregation.LocalGradientAggregationHelper(
                options.backward_passes_per_step,
                self.sync.reduce,
                average_aggregated_gradients=options.average_aggregated_gradients,
                renewed=self.sync.renewed,
            )
        self.is_reduced = False  # whether the LossScaleOptimizer around this one has reduced the gradients
        self._is_minimizing = False
        # Where gradients were reduced that no apply_gradients has taken yet: a graph, and whether one in it has.
        self._computed: tuple[Any, list[bool]] | None = None

    def reduce(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduce gradients, which are paired with variables; with several passes per step only in the last pass."""
        gradients, variables = [], []
        for gradient, variable in pairs:
            gradients.append(gradient)
            variables.append(variable)
        reduce = self.sync.reduce if self.passes is None else self.passes.compute_gradients
        return list(zip(reduce(gradients, variables), variables, strict=True))

    @contextmanager
    def minimizing(self) -> Iterator[None]:
        """Surround a computation of gradients that ``apply_gradients`` is to reduce."""
        before, self._is_minimizing = self._is_minimizing, True
        try:
            yield
        finally:
            self._is_minimizing = before

    def compute(self, plain: Callable[..., Any], *args: Any, of: Any = None, **kwargs: Any) -> Any:
        """Return what an optimizer's method computes, reduced, unless ``minimize`` calls it.

        Args:
            plain: returns pairs of gradients and variables; with ``of=``, the gradients of these variables.
        """
        if self._is_minimizing:
            return plain(*args, **kwargs)
        with self.minimizing():  # one method may call another
            computed = list(plain(*args, **kwargs))
        pairs = self.reduce(computed if of is None else zip(computed, of, strict=True))
        self._hand_out()
        return pairs if of is None else [gradient for gradient, _ in pairs]

    def takes_reduced(self) -> bool:
        """Tell whether what ``apply_gradients`` is given comes from ``compute``. To be called once by each."""
        computed = self._computed
        if self._is_minimizing:
            self._computed = None
        if self._is_minimizing or computed is None:
            return False
        graph, taken = computed
        here = innermost = self._frontend.graph_here()
        while here is not graph:
            if here is None:
                return False
            here = getattr(here, "outer_graph", None)
        taken.append(True)
        if here is innermost:  # of several branches, each may step
            self._computed = None
        return True

    def _hand_out(self) -> None:
        """Remember that there are reduced gradients, for the ``apply_gradients`` of this graph; or, if there is none
        when the graph runs, for one outside."""
        graph, taken = self._computed = self._frontend.graph_here(), []
        if graph is None or not self.sync.active:
            return

        def run() -> None:
            if not taken:
                self._computed = None, []

        self._frontend.effect(run, [])

    def __deepcopy__(self, memo: Any) -> _State:
        return _State(self.sync.options, self.sync.local_sources)


def _prepare() -> None:
    """Change what tf_keras does for distributed optimizers alone, once.

    LossScaleOptimizers look at the gradients of all ranks: all skip a step, or none.
    """
    keras = importlib.import_module("tf_keras")
    importlib.import_module("hvdgloo.tensorflow._xla").spare(keras.Model)
    known = keras.mixed_precision.LossScaleOptimizer
    for name in ("LossScaleOptimizer", "LossScaleOptimizerV3"):
        kind = getattr(sys.modules[known.__module__], name, None)
        if kind is None or hasattr(kind.apply_gradients, "hvdgloo"):
            continue
        kind.apply_gradients, kind.minimize = _reducing(kind.apply_gradients), _minimizing(kind.minimize)
        for method in ("compute_gradients", "_compute_gradients"):
            if hasattr(kind, method):
                setattr(kind, method, _computing(getattr(kind, method)))


def _reducing(plain: Any) -> Any:
    @functools.wraps(plain)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self.inner_optimizer, "_hvd", None)
        if not isinstance(state, _State):
            return plain(self, grads_and_vars, *args, **kwargs)
        if state.passes is not None:
            raise InvalidArgumentError(_NO_PASSES)
        pairs = list(grads_and_vars)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        reduced = gradients if state.takes_reduced() else state.sync.reduce(gradients, variables)
        reduced = state.sync.alike(gradients, reduced, variables, FINITE)
        state.is_reduced = True
        try:
            return plain(self, list(zip(reduced, variables, strict=True)), *args, **kwargs)
        finally:
            state.is_reduced = False

    apply_gradients.hvdgloo = True  # type: ignore[attr-defined]
    return apply_gradients


def _minimizing(plain: Any) -> Any:
    @functools.wraps(plain)
    def minimize(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self.inner_optimizer, "_hvd", None)
        with state.minimizing() if isinstance(state, _State) else nullcontext():
            return plain(self, *args, **kwargs)

    return minimize


def _computing(plain: Any) -> Any:
    @functools.wraps(plain)
    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self.inner_optimizer, "_hvd", None)
        compute = functools.partial(state.compute, plain) if isinstance(state, _State) else plain
        return compute(self, *args, **kwargs)

    return compute_gradients
