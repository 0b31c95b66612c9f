"""Programs that are traced or made in a job of one process: they reduce when the job has grown, and continue when it
has shrunk.

Ranks are threads. Each worker traces its functions in a world of its own: the survivor in the job's first epoch, the
newcomer in its provisional one. Then they meet in a world of two, after which the survivor is alone again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo._collectives.process_sets import global_process_set as _everyone
from hvdgloo._job.context import Context
from hvdgloo._training.options import GradientOptions
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError
from hvdgloo.tensorflow import _distributed_optimizer as v1
from hvdgloo.tensorflow import _sparse as sparse
from hvdgloo.tensorflow import _tape as tapes
from hvdgloo.tensorflow import sync_batch_norm
from hvdgloo.tensorflow._adapter import TensorFlowAdapter
from hvdgloo.tensorflow._frontend import TensorFlowFrontend
from hvdgloo.tensorflow._gradients import GradientSync
from hvdgloo.tensorflow._state import broadcast_variables
from hvdgloo.tensorflow.compression import Compression
from hvdgloo.types import ReduceOp
from tests.support.ways import session_config
from tests.support.world import World

Program = Callable[["Worker"], Callable[[float], Any]]
"""Made once by each worker; then called with its own number in each epoch. Returns what is compared."""

NUMBERS = (1.0, 3.0)


class Worker:
    """A process that outlives its epochs."""

    def __init__(self) -> None:
        self.context: Context | None = None
        self.frontend = TensorFlowFrontend(TensorFlowAdapter(), self._current)

    def _current(self) -> Context:
        assert self.context is not None
        return self.context


def in_world(workers: list[Worker], function: Callable[[int], Any], size: int | None = None) -> list[Any]:
    """Call a function with each worker's place, in an epoch of these workers."""
    with World(len(workers), "inline", elastic=True) as world:

        def body(context: Context) -> Any:
            workers[context.rank].context = context
            return function(context.rank)

        return world.run(body)


def over_sizes(program: Program) -> tuple[Any, Any, list[Any], Any]:
    """Return a program's results in the epoch of one worker, in the newcomer's own world, in the world of both, and in
    the first one's alone."""
    survivor, newcomer = Worker(), Worker()
    calls: list[Callable[[float], Any]] = []

    def make(worker: Worker, number: float) -> Callable[[int], Any]:
        def body(_: int) -> Any:
            calls.append(program(worker))
            return calls[-1](number)

        return body

    (first,) = in_world([survivor], make(survivor, NUMBERS[0]))
    (provisional,) = in_world([newcomer], make(newcomer, NUMBERS[1]))
    both = in_world([survivor, newcomer], lambda rank: calls[rank](NUMBERS[rank]))
    (last,) = in_world([survivor], lambda _: calls[0](NUMBERS[0]))
    return first, provisional, both, last


def values(results: Any) -> list[Any]:
    return [np.asarray(each).tolist() for each in tf.nest.flatten(results)]


def in_function(function: Callable[[Any], Any]) -> Callable[[float], Any]:
    traced = tf.function(function, autograph=False)
    return lambda number: values(traced(tf.constant(number)))


def in_session(build: Callable[[Any], Any]) -> Callable[[float], Any]:
    graph = tf.Graph()
    with graph.as_default():
        given = tf.compat.v1.placeholder(tf.float32, ())
        fetched = build(given)
        start = tf.compat.v1.global_variables_initializer()
    session = tf.compat.v1.Session(graph=graph, config=session_config())
    session.run(start)
    return lambda number: values(session.run(fetched, {given: number}))


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("function", GradientOptions()),
        ("function", GradientOptions(groups=1)),
        ("function", GradientOptions(compression=Compression.fp16)),
        ("session", GradientOptions()),
        ("eager", GradientOptions()),
    ],
    ids=["function", "groups", "fp16", "session", "eager"],
)
def test_a_tape_reduces_with_as_many_as_there_are(way: str, options: GradientOptions) -> None:
    """Dense and sparse gradients, and gradients of local variables, which are divided by the size."""
    shapes = [2], [3, 1], [1]

    def program(worker: Worker) -> Callable[[float], Any]:
        def step(number: Any, variables: Any) -> Any:
            weights, table, own = variables
            with tf.GradientTape() as plain:
                rows = tf.nn.embedding_lookup(table, tf.constant([1]))
                loss = number * (tf.reduce_sum(weights) + tf.reduce_sum(rows) + tf.reduce_sum(own))
            tape = tapes.wrap(worker.frontend, plain, options)
            tape.register_local_source(own)
            dense, sparse, local = tape.gradient(loss, variables)
            return dense, tf.reduce_sum(tf.convert_to_tensor(sparse)), local

        if way == "session":
            return in_session(lambda number: step(number, [_v1_variable(np.ones(shape)) for shape in shapes]))
        variables = [tf.Variable(np.ones(shape, np.float32)) for shape in shapes]
        if way == "function":
            return in_function(lambda number: step(number, variables))
        return lambda number: values(step(tf.constant(number), variables))

    first, provisional, both, last = over_sizes(program)
    assert first == last == [[1.0, 1.0], 1.0, [1.0]]
    assert provisional == [[3.0, 3.0], 3.0, [3.0]]
    assert both == [[[2.0, 2.0], 2.0, [0.5]], [[2.0, 2.0], 2.0, [1.5]]]


def test_what_is_written_in_functions_follows() -> None:
    """Averages of sparse tensors, agreements, the gradients of reducescatter, batch statistics, and the size itself."""

    def program(worker: Worker) -> Callable[[float], Any]:
        frontend = worker.frontend
        layer = sync_batch_norm.SyncBatchNormalization()
        layer.frontend = frontend
        layer.build((None, 1))
        sync = GradientSync(frontend, GradientOptions())
        rows = tf.Variable([[1.0], [1.0]])

        def step(number: Any) -> Any:
            slices = tf.IndexedSlices(tf.reshape(number, (1, 1)), tf.constant([0]), tf.constant([1, 1]))
            average = _sparse(frontend, slices)
            agreed = sync.agree(number < 2, "agree")
            with tf.GradientTape() as tape:
                part = frontend.reducescatter(rows * number, op=ReduceOp.SUM, name="scatter")
            gradient = tape.gradient(part, rows)
            normal = layer(tf.reshape(number, (1, 1)), training=True)
            return average, agreed, gradient, normal, frontend.number_of(_everyone)

        return in_function(step)

    first, _, both, last = over_sizes(program)
    assert first == last == [1.0, True, [[1.0], [1.0]], [[0.0]], 1]
    for rank, number in enumerate(NUMBERS):
        average, agreed, gradient, normal, size = both[rank]
        assert (average, agreed, size) == (2.0, False, 2)
        assert gradient == [[2.0 * number], [2.0 * number]]  # size times the exact one: see adjoints
        assert abs(normal[0][0] - (number - 2.0)) < 1e-2


def _sparse(frontend: TensorFlowFrontend, slices: Any) -> Any:
    reduced = sparse.sparse_allreduce(frontend, slices, "sparse", ReduceOp.AVERAGE, 1.0, 1.0, _everyone)
    return tf.reduce_sum(tf.convert_to_tensor(reduced))


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.ADASUM])
def test_optimizers_of_sessions_follow(op: ReduceOp) -> None:
    def program(worker: Worker) -> Callable[[float], Any]:
        def build(number: Any) -> Any:
            weights = _v1_variable([0.0, 0.0])
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            step = v1.wrap(worker.frontend, optimizer, GradientOptions(op=op)).minimize(-number * weights[0])
            with tf.control_dependencies([step]):
                return weights.read_value()

        return in_session(build)

    first, _, both, last = over_sizes(program)
    together = np.mean(NUMBERS)  # of parallel changes, Adasum is the mean, too
    assert first == [[1.0, 0.0]]
    assert both == [[[1.0 + together, 0.0]], [[3.0 + together, 0.0]]]
    assert last == [[2.0 + together, 0.0]]


@pytest.mark.parametrize("way", ["function", "session"])
def test_passes_that_add_up_begin_together_when_the_job_has_changed(way: str) -> None:
    """The survivor is in the middle of a step when the newcomer, which has none under way, comes."""

    def program(worker: Worker) -> Callable[[float], Any]:
        def build(loss: Any, weights: Any, optimizer: Any) -> Any:
            pairs = optimizer.compute_gradients(loss, [weights])
            with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
                return weights.read_value()

        def made(weights: Any) -> Any:
            plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            return v1.wrap(worker.frontend, plain, GradientOptions(), 2)

        if way == "function":
            weights = tf.Variable([0.0, 0.0])
            optimizer = made(weights)
            return in_function(lambda number: build(lambda: -number * weights[0], weights, optimizer))

        def in_graph(number: Any) -> Any:
            weights = _v1_variable([0.0, 0.0])
            return build(-number * weights[0], weights, made(weights))

        return in_session(in_graph)

    survivor, newcomer = Worker(), Worker()
    calls: dict[int, Callable[[float], Any]] = {}

    def passes(rank: int, count: int) -> Any:
        for _ in range(count):
            result = calls[rank](NUMBERS[rank])
        return result

    def make(worker: Worker, rank: int, count: int) -> Any:
        calls[rank] = program(worker)
        return passes(rank, count)

    def weight(results: Any) -> list[float]:
        return [result[0][0] for result in results]

    assert weight(in_world([survivor], lambda _: make(survivor, 0, 3))) == [2.0]
    assert weight(in_world([newcomer], lambda _: make(newcomer, 1, 2))) == [6.0]
    both = [survivor, newcomer]
    # A pass of each epoch alone does not make a step, however many passes there were before.
    assert weight(in_world(both, lambda rank: passes(rank, 1))) == [2.0, 6.0]
    assert weight(in_world(both, lambda rank: passes(rank, 1))) == [2.0, 6.0]
    assert weight(in_world(both, lambda rank: passes(rank, 2))) == [6.0, 10.0]


@pytest.mark.parametrize("way", ["function", "session"])
def test_a_step_that_failed_leaves_nothing_for_the_next_epoch(way: str) -> None:
    """Some gradients had been sent when the peer went."""

    def program(worker: Worker) -> Callable[[float], Any]:
        def step(number: Any, weights: Any) -> Any:
            gradients = [number * tf.ones_like(w) for w in weights]
            return GradientSync(worker.frontend, GradientOptions()).reduce(gradients, weights)

        if way == "session":
            return in_session(lambda number: step(number, [_v1_variable([1.0]), _v1_variable([1.0])]))
        weights = [tf.Variable([1.0]), tf.Variable([1.0])]
        return in_function(lambda number: step(number, weights))

    workers = [Worker(), Worker()]
    calls: dict[int, Callable[[float], Any]] = {}

    def fails(rank: int) -> None:
        calls[rank] = program(workers[rank])
        calls[rank](NUMBERS[rank])
        if rank == 1:
            context = workers[1].context
            assert context is not None
            context.close()
            return
        with pytest.raises(HorovodInternalError) as raised:
            calls[0](NUMBERS[0])
        assert isinstance(raised.value, tf.errors.UnknownError)

    in_world(workers, fails)
    assert in_world([workers[0]], lambda _: calls[0](7.0)) == [[[7.0], [7.0]]]
    assert in_world(workers, lambda rank: calls[rank](NUMBERS[rank])) == [[[2.0], [2.0]]] * 2


def test_a_function_of_a_process_set_that_is_gone_says_so() -> None:
    """In the next epoch the set is another one, or none: an error, and no wait."""
    workers = [Worker(), Worker(), Worker()]
    calls: dict[int, Callable[[float], Any]] = {}

    def traces(rank: int) -> Any:
        frontend = workers[rank].frontend
        pair = frontend.add_process_set([0, 1])
        weights = tf.Variable([1.0])
        sync = GradientSync(frontend, GradientOptions(process_set=pair))
        calls[rank] = in_function(lambda number: sync.reduce([number * tf.ones_like(weights)], [weights]))
        return calls[rank](float(rank))

    assert in_world(workers, traces) == [[[0.5]], [[0.5]], [[2.0]]]

    def again(rank: int) -> None:
        with pytest.raises(InvalidArgumentError, match="not registered"):
            calls[rank](float(rank))

    in_world(workers, again)


def test_variables_are_broadcast_from_a_function_that_one_worker_traced() -> None:
    def program(worker: Worker) -> Callable[[float], Any]:
        variable = tf.Variable(0.0)

        def step(number: Any) -> Any:
            variable.assign(number)
            broadcast_variables(worker.frontend, [variable], 0)
            return variable.read_value()

        return in_function(step)

    first, provisional, both, last = over_sizes(program)
    assert (first, provisional, both, last) == ([1.0], [3.0], [[1.0], [1.0]], [1.0])


def test_outside_elastic_jobs_nothing_is_traced_for_one_process() -> None:
    worker = Worker()
    with World(1, "inline") as world:
        (worker.context,) = world.contexts
        weights = tf.Variable([1.0])
        sync = GradientSync(worker.frontend, GradientOptions())

        @tf.function(autograph=False)
        def step() -> Any:
            return sync.reduce([tf.ones_like(weights)], [weights])

        kinds = {operation.type for operation in step.get_concrete_function().graph.get_operations()}
    assert not kinds & {"PyFunc", "PyFuncStateless", "EagerPyFunc"}, kinds


def _v1_variable(start: Any) -> Any:
    return tf.compat.v1.Variable(np.asarray(start, np.float32), use_resource=True)
