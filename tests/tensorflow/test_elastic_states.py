"""Elastic states of TensorFlow and Keras, and the callbacks: what is saved, restored, sent and run again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdgloo.keras as hvd_keras
import hvdgloo.tensorflow as hvd
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo.elastic._variables import VariablesState
from hvdgloo.elastic.loop import Loop
from hvdgloo.errors import HostsUpdatedInterrupt, InvalidArgumentError, MismatchError, PeerLostError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.tensorflow.keras import elastic as for_tf_keras
from tests.support.elastic_loop import FakeJob, placement
from tests.support.world import MakeWorld, World

X, Y = np.ones((8, 4), np.float32), np.ones((8, 2), np.float32)


def dense(module: Any = keras) -> Any:
    layers = [module.layers.Dense(3), module.layers.Dropout(0.5), module.layers.BatchNormalization()]
    return module.Sequential([module.layers.Input((4,)), *layers, module.layers.Dense(2)])


def compiled(module: Any = keras, optimizer: Any = None) -> Any:
    model = dense(module)
    model.compile(optimizer or module.optimizers.Adam(0.1), loss="mse", run_eagerly=True)
    return model


def values_of(state: VariablesState) -> list[list[Any]]:
    return [np.asarray(value).tolist() for value in state._read(state._variables())]


def on(context: Context, state: Any) -> Any:
    """A state in a job of ranks as threads."""
    state._frontend = Frontend(NumpyAdapter(), lambda: context)
    state._bcast_object, state._rank = state._frontend.broadcast_object, state._frontend.rank
    state._context = lambda: context
    return state


def tf_keras() -> Any:
    return pytest.importorskip("tf_keras")


MODELS: dict[str, Callable[[], Any]] = {
    "adam": compiled,
    "scaled": lambda: compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))),
    "tf_keras": lambda: compiled(tf_keras()),
    "tf_keras legacy": lambda: compiled(tf_keras(), tf_keras().optimizers.legacy.Adam(0.1)),
    "tf_keras scaled": lambda: compiled(
        tf_keras(), tf_keras().mixed_precision.LossScaleOptimizer(tf_keras().optimizers.SGD(0.1), initial_scale=8.0)
    ),
}


@pytest.mark.parametrize("make", [hvd.elastic.TensorFlowKerasState, hvd_keras.elastic.KerasState])
@pytest.mark.parametrize("kind", MODELS)
def test_models_return_to_their_last_commit(make: Callable[..., Any], kind: str) -> None:
    model = MODELS[kind]()
    state = make(model, epoch=0)
    model.fit(X, Y, verbose=0)
    state.save()
    saved = values_of(state)
    assert len(saved) > len(model.weights) + 1  # the optimizer's, too
    kept = [array.ctypes.data for array in state._kept]
    state.epoch = 1
    model.fit(X, Y, verbose=0)
    assert values_of(state) != saved
    state.restore()
    assert values_of(state) == saved
    assert state.epoch == 0
    # What the next steps change is not the copy.
    model.fit(X, Y, verbose=0)
    state.restore()
    assert values_of(state) == saved
    model.fit(X, Y, verbose=0)
    state.save()
    assert [array.ctypes.data for array in state._kept] == kept, "a save takes the memory of the one before"


def test_the_scale_of_tf_keras_is_part_of_its_state() -> None:
    model = MODELS["tf_keras scaled"]()
    state = hvd.elastic.TensorFlowKerasState(model)
    model.fit(np.full_like(X, np.inf), Y, verbose=0)
    assert float(model.optimizer.loss_scale) == 4.0
    state.restore()
    assert float(model.optimizer.loss_scale) == 8.0


def test_a_commit_that_fails_changes_nothing() -> None:
    """All values are read before the first is kept: of a failed step, some have been computed and others not."""
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    state = hvd.elastic.TensorFlowState(variables)
    variables[0].assign(5.0)

    class Broken:
        def read_value(self) -> None:
            raise PeerLostError("lost", rank=1)

    state.variables = [variables[0], Broken()]
    with pytest.raises(PeerLostError):
        state.save()
    state.variables = variables
    state.restore()
    assert [float(v) for v in variables] == [1.0, 2.0]


@pytest.mark.parametrize("kind", MODELS)
def test_newcomers_get_the_newest_model_with_its_optimizer(ranks: MakeWorld, kind: str) -> None:
    """From the rank that the job names, whose optimizer has trained, to one whose has not."""
    states = [hvd_keras.elastic.KerasState(MODELS[kind](), epoch=0) for _ in range(2)]
    states[1].model.fit(X, Y, verbose=0)
    states[1].epoch = 3
    states[1].save()

    def sync(context: Context) -> None:
        state = on(context, states[context.rank])
        with state._progress.syncing(newest=1, root=1, unchanged=False):
            state.sync()

    seeds = [np.asarray(v).tolist() for v in states[0].model.variables if "seed" in v.name]
    ranks(2).run(sync)
    assert states[0].epoch == 3
    for state in states:
        assert [np.asarray(w).tolist() for w in state.model.get_weights()] == [
            np.asarray(w).tolist() for w in states[1].model.get_weights()
        ]
        assert values_of(state)[-3:] == values_of(states[1])[-3:]
        state.restore()  # it has been saved
        assert state.epoch == 3
    # Random seeds are each rank's own.
    assert [np.asarray(v).tolist() for v in states[0].model.variables if "seed" in v.name] == seeds


def test_where_all_hold_the_same_nothing_travels(ranks: MakeWorld) -> None:
    """Unless a variable was changed since, in a reset callback for example."""
    state = hvd_keras.elastic.KerasState(compiled())
    same = state._fingerprint()
    state.optimizer.learning_rate = 0.5
    changed = state._fingerprint()
    assert changed != same
    state.optimizer.learning_rate = 0.25
    assert state._fingerprint() not in (same, changed)
    state.restore()
    assert state._fingerprint() == same
    state._receive = None  # must not be called
    with state._progress.syncing(newest=0, root=0, unchanged=True):
        state.sync()


def test_models_that_differ_are_an_error_on_all_ranks(ranks: MakeWorld) -> None:
    models = [[tf.Variable([1.0])], [tf.Variable([[1.0]])], [tf.Variable([1.0]), tf.Variable(1)]]

    def sync(context: Context) -> None:
        state = on(context, hvd.elastic.TensorFlowState(models[context.rank]))
        with pytest.raises(MismatchError, match="all workers must build the same model") as error:
            state.sync()
        assert "float32 of shape (1, 1) on rank 1, and float32 of shape (1,) on rank 0" in str(error.value)

    ranks(3).run(sync)


def test_types_that_no_collective_has(ranks: MakeWorld) -> None:
    def sync(context: Context) -> Any:
        start = context.rank + 1.0
        variables = [tf.Variable(start, dtype=kind) for kind in (tf.bfloat16, tf.complex64, tf.float16)]
        variables.append(tf.Variable(np.zeros((0, 3))))
        state = on(context, hvd.elastic.TensorFlowState(variables))
        state.sync()
        return [np.asarray(v).tolist() for v in variables]

    assert ranks(2).run(sync) == [[1.0, 1.0, 1.0, []]] * 2


@pytest.mark.parametrize("monitored", [False, True])
def test_variables_of_sessions(ranks: MakeWorld, monitored: bool) -> None:
    """Also in a graph that is finished, without the hooks of a monitored session."""

    def body(context: Context) -> Any:
        ran: list[int] = []

        class Hook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
            def before_run(self, run_context: Any) -> None:
                ran.append(1)

        with tf.Graph().as_default():
            weights = tf.compat.v1.get_variable("w", initializer=[1.0, context.rank])
            count = tf.compat.v1.Variable(0, name="count")  # of the older kind as well
            step = tf.group(weights.assign_add([1.0, 1.0]), count.assign_add(1))
            if monitored:
                session = tf.compat.v1.train.MonitoredSession(hooks=[Hook()])
            else:
                session = tf.compat.v1.Session()
                session.run(tf.compat.v1.global_variables_initializer())
                tf.compat.v1.get_default_graph().finalize()
            state = on(context, hvd.elastic.TensorFlowState(session=session, batch=0))
            session.run(step)
            state.save()
            session.run(step)
            state.restore()
            restored = [np.asarray(value).tolist() for value in session.run([weights, count])]
            with state._progress.syncing(newest=1, root=1, unchanged=False):
                state.sync()
            synced = [np.asarray(value).tolist() for value in session.run([weights, count])]
            assert len(ran) == (4 if monitored else 0)
        return restored, synced

    both = ranks(2).run(body)
    assert both[0] == ([[2.0, 1.0], 1], [[2.0, 2.0], 1])
    assert both[1] == ([[2.0, 2.0], 1], [[2.0, 2.0], 1])


def test_what_cannot_be_a_state_says_what_to_do() -> None:
    for make in (hvd.elastic.TensorFlowKerasState, hvd_keras.elastic.KerasState, for_tf_keras.KerasState):
        for module in (keras, tf_keras()):
            with pytest.raises(ValueError, match=r"model.build\(input_shape\), or the model itself once"):
                make(module.Sequential([module.layers.Dense(2)]))
    with pytest.raises(InvalidArgumentError, match="eager program has no global variables"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(InvalidArgumentError, match="expected a variable"):
        hvd.elastic.TensorFlowState([1.0])
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("w", initializer=[1.0])
        with pytest.raises(InvalidArgumentError, match="needs a session"):
            hvd.elastic.TensorFlowState([variable])
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidArgumentError, match="batches_per_commit"):
            hvd_keras.elastic.CommitStateCallback(hvd_keras.elastic.KerasState(compiled()), wrong)


# Callbacks ------------------------------------------------------------------------------------------------------------

STEPS = 4
"""Batches in an epoch here."""


class Training:
    """A model that is fitted in an elastic job of one worker; hosts change, or a peer is lost, when a test says so."""

    def __init__(self, context: Context, order: Sequence[int] = (0, 1, 2), module: Any = keras, **fitting: Any) -> None:
        self.module = module
        self.model = compiled(module, module.optimizers.SGD(0.01))
        self.job = FakeJob([placement(epoch) for epoch in range(6)])
        self.state = on(context, hvd_keras.elastic.KerasState(self.model, batch=0, epoch=0))
        self.order = order
        self.every = fitting.pop("every", 1)
        self.fitting = fitting
        self.log: list[Any] = []
        self.seen_by_callbacks: list[tuple[int, int]] = []
        self.state.register_reset_callbacks(
            [lambda: self.seen_by_callbacks.append((self.state.epoch, self.state.batch))]
        )

    def run(self, epochs: int, happens: Callable[[int, int], Any]) -> list[Any]:
        """Train; ``happens(epoch, batch)`` is called before each batch's end.

        Returns:
            the batches that were trained, as pairs of an epoch and an index, with "again" where the function was
            called again.
        """
        training = self

        class Look(hvd_keras.callbacks.ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                training.log.append((self.epoch, batch))
                happens(training.state.epoch, batch)

        def train() -> None:
            if self.log:
                self.log.append("again")
            mine = [
                hvd_keras.elastic.CommitStateCallback(self.state, self.every),
                hvd_keras.elastic.UpdateBatchStateCallback(self.state),
                hvd_keras.elastic.UpdateEpochStateCallback(self.state),
            ]
            callbacks = [Look(), *(mine[place] for place in self.order)]
            options = {"epochs": epochs - self.state.epoch} | {
                name: value() if callable(value) else value for name, value in self.fitting.items()
            }
            self.model.fit(X, Y, batch_size=len(X) // STEPS, verbose=0, callbacks=callbacks, **options)

        Loop(self.job, self.state).run(train)
        return self.log


@pytest.fixture(scope="module")
def context() -> Any:
    with World(1) as world:
        yield world.contexts[0]


def once(wanted: tuple[int, int], action: Callable[[], Any]) -> Callable[[int, int], None]:
    done: list[int] = []

    def happens(epoch: int, batch: int) -> None:
        if (epoch, batch) == wanted and not done:
            done.append(1)
            action()

    return happens


def lose() -> None:
    raise PeerLostError("lost", rank=1)


ORDERS = list(itertools.permutations(range(3)))
WHOLE = [(0, b) for b in range(STEPS)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join("CBE"[i] for i in order))
def test_the_order_of_callbacks_makes_no_difference(context: Context, order: Sequence[int]) -> None:
    """Hosts change in the middle of an epoch, and at the end of one (#2844: there the epoch's number was too low)."""
    middle = Training(context, order)
    trained = middle.run(2, once((1, 1), lambda: middle.job.announce(2)))
    assert trained == [*WHOLE, (1, 0), (1, 1), "again", *WHOLE]
    assert middle.seen_by_callbacks == [(1, 1)]
    assert (middle.state.epoch, middle.state.batch) == (2, 0)

    end = Training(context, order, every=100)  # so that only the epoch's end commits
    trained = end.run(3, once((1, STEPS - 1), lambda: end.job.announce(2)))
    assert trained == [*WHOLE, *[(1, b) for b in range(STEPS)], "again", *WHOLE]
    assert end.seen_by_callbacks == [(2, 0)]
    assert (end.state.epoch, end.state.batch) == (3, 0)


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[-1]], ids=["commit first", "commit last"])
def test_after_a_failure_training_goes_on_from_the_last_commit(context: Context, order: Sequence[int]) -> None:
    """The commits are in batch 1 and batch 3; the failure comes in batch 2 of the second epoch."""
    training = Training(context, order, every=2)
    committed: dict[str, Any] = {}

    def fails() -> None:
        committed["saved"] = [kept.copy() for kept in training.state._kept]
        lose()

    trained = training.run(2, once((1, 2), fails))
    assert trained == [*WHOLE, (1, 0), (1, 1), (1, 2), "again", *WHOLE]
    assert training.seen_by_callbacks == [(1, 1)]
    assert isinstance(training.job.asked[0].error, PeerLostError)
    iterations = int(committed["saved"][len(training.model.variables)])
    assert iterations == STEPS + 2
    assert int(np.asarray(training.model.optimizer.iterations)) == iterations + STEPS


def test_a_program_may_leave_out_what_it_has_trained(context: Context) -> None:
    """``steps_per_epoch - state.batch``: the batch of the last commit is trained once more."""
    training = Training(context)
    training.fitting = {"steps_per_epoch": lambda: STEPS - training.state.batch, "epochs": 1}
    assert training.run(1, once((0, 2), lambda: training.job.announce(1))) == [*WHOLE[:3], "again", *WHOLE[:2]]


def test_epochs_may_be_numbered_by_keras(context: Context) -> None:
    training = Training(context)
    training.fitting = {"initial_epoch": lambda: training.state.epoch, "epochs": 3}
    trained = training.run(3, once((1, 0), lambda: training.job.announce(1)))
    assert trained == [*WHOLE, (1, 0), "again", *[(e, b) for e in (1, 2) for b in range(STEPS)]]
    assert training.state.epoch == 3


def test_callbacks_work_in_tf_keras_too(context: Context) -> None:
    training = Training(context, (0, 2, 1), tf_keras())
    assert training.run(2, once((1, 1), lambda: training.job.announce(2))) == [*WHOLE, (1, 0), (1, 1), "again", *WHOLE]
    assert training.seen_by_callbacks == [(1, 1)]


def test_commits_are_counted_in_batches(context: Context) -> None:
    """Also where several steps are executed at once, and Keras calls back once for all of them."""
    commits: list[int] = []
    for together, expected in ((1, [2, 5]), (2, [3, 5])):
        model = compiled(optimizer=keras.optimizers.SGD(0.01))
        model.compile(model.optimizer, loss="mse", steps_per_execution=together)
        state = on(context, hvd_keras.elastic.KerasState(model, batch=0))
        commits.clear()
        state.commit = lambda state=state: commits.append(state.batch)
        callbacks = [hvd_keras.elastic.CommitStateCallback(state, 3), hvd_keras.elastic.UpdateBatchStateCallback(state)]
        model.fit(np.ones((6, 4)), np.ones((6, 2)), batch_size=1, verbose=0, callbacks=callbacks)
        assert commits == [*expected, 0]


def test_callbacks_of_an_earlier_fit_have_no_part_in_the_next(context: Context) -> None:
    model = compiled(optimizer=keras.optimizers.SGD(0.01))
    state = on(context, hvd_keras.elastic.KerasState(model, batch=0, epoch=0))
    model.fit(X, Y, verbose=0, callbacks=[hvd_keras.elastic.UpdateEpochStateCallback(state)])
    model.fit(X, Y, verbose=0, callbacks=[hvd_keras.elastic.CommitStateCallback(state)])
    assert state.epoch == 1


def test_an_interrupt_in_a_callback_leaves_fit(context: Context) -> None:
    state = on(context, hvd_keras.elastic.KerasState(compiled(), batch=0))
    state.on_hosts_updated(1.0, 1)
    with pytest.raises(HostsUpdatedInterrupt):
        state.model.fit(X, Y, verbose=0, callbacks=[for_tf_keras.CommitStateCallback(state)])
