"""Elastic training with TensorFlow: eagerly, in functions, and in sessions.

::

    @hvd.elastic.run
    def train(state):
        while state.batch < batches:
            step(next(data))
            state.batch += 1
            if state.batch % 10 == 0:
                state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo.elastic._variables import Array, ModelState, Variable, VariablesState, run
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow._frontend import FRONTEND
from hvdgloo.tensorflow._state import variable_of

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(VariablesState):
    """Variables, and plain attributes.

    Args:
        variables: ``tf.Variable`` or Keras variables; in a graph of TensorFlow 1 by default all global ones.
        session: of the graph; by default the one that is entered when the state is saved. A session that a
            ``MonitoredTrainingSession`` made is used without its hooks. Assign ``state.session`` where a new one takes
            its place.
        kwargs: attributes and their first values; see ``hvdgloo.elastic.ObjectState``.

    Raises:
        InvalidArgumentError: (a ValueError) no variables are given to an eager program, which has no global ones; or
            something is not a variable.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None:
            if tf.executing_eagerly():
                raise InvalidArgumentError(
                    "an eager program has no global variables; pass the state's variables: "
                    "TensorFlowState(variables=model.variables)"
                )
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session
        for variable in self.variables:
            variable_of(variable)
        super().__init__(FRONTEND, **kwargs)

    def _variables(self) -> list[Variable]:
        return self.variables

    def _read(self, variables: Sequence[Variable]) -> list[Array]:
        return super()._read(variables) if tf.executing_eagerly() else read_in_session(self.session, variables)

    def _write(self, variables: Sequence[Variable], values: Sequence[Array]) -> None:
        if tf.executing_eagerly():
            super()._write(variables, values)
        else:
            write_in_session(self.session, variables, values)


class TensorFlowKerasState(ModelState):
    """A model of Keras 3 or tf_keras, its optimizer, and plain attributes.

    Args:
        model: must be built.
        optimizer: by default the one that the model was compiled with.
        backend: the Keras module whose ``get_session()`` a program of TensorFlow 1 uses.
        kwargs: attributes and their first values; see ``hvdgloo.elastic.ObjectState``.

    Raises:
        InvalidArgumentError: (a ValueError) the model is not built: call ``model.build(input_shape)``, or the model.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.backend = backend
        super().__init__(FRONTEND, model, optimizer, **kwargs)

    def _build(self) -> None:
        if tf.executing_eagerly():  # variables of a graph would have to be initialised, too
            super()._build()

    def _read(self, variables: Sequence[Variable]) -> list[Array]:
        return super()._read(variables) if tf.executing_eagerly() else read_in_session(self._session(), variables)

    def _write(self, variables: Sequence[Variable], values: Sequence[Array]) -> None:
        if tf.executing_eagerly():
            super()._write(variables, values)
        else:
            write_in_session(self._session(), variables, values)

    def _session(self) -> Any:
        find = getattr(self.backend, "get_session", None)
        return None if find is None else find()


def read_in_session(session: Any, variables: Sequence[Variable]) -> list[Array]:
    """The values of a graph's variables.

    Args:
        session: None for the one that is entered.

    Raises:
        InvalidArgumentError: (a ValueError) there is none.
    """
    if not variables:
        return []
    values: list[Array] = _run(session, [variable_of(variable) for variable in variables])
    return values


def write_in_session(session: Any, variables: Sequence[Variable], values: Sequence[Array]) -> None:
    """Assign values to a graph's variables; adds nothing to the graph, which may be finalized.

    Args:
        session: as for ``read_in_session``.
    """
    if variables:
        # What an initializer assigns can be fed.
        initializers = [variable_of(variable).initializer for variable in variables]
        feed = {each.inputs[1]: value for each, value in zip(initializers, values, strict=True)}
        _run(session, initializers, feed)


def _run(session: Any, fetches: Any, feed: Any = None) -> Any:
    chosen = session if session is not None else tf.compat.v1.get_default_session()
    if chosen is None:
        raise InvalidArgumentError(
            "the state of a graph needs a session: give session= to it, or save it within `with session.as_default():`"
        )
    if hasattr(chosen, "run_step_fn"):  # a monitored session, whose hooks this is not for
        return chosen.run_step_fn(lambda step_context: step_context.session.run(fetches, feed))
    return chosen.run(fetches, feed)
