"""Collectives and their gradients in a ``tf.function`` and in TensorFlow 1's graphs: what they give eagerly."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdgloo.keras
import hvdgloo.tensorflow as hvd
import hvdgloo.tensorflow.keras as hvd_keras
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job.context import Context
from hvdgloo._platform.error_tokens import mark, recall
from hvdgloo.errors import (
    HorovodInternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    StallError,
)
from hvdgloo.tensorflow import _ops, _waiting
from hvdgloo.tensorflow._frontend import TensorFlowFrontend, public
from hvdgloo.tensorflow._sparse import SparseReductionError, sparse_allreduce
from hvdgloo.tensorflow.compression import Compression
from hvdgloo.types import Collective, DType, ReduceOp
from tests.support.threads import at_once
from tests.support.ways import WAYS, frontend_of, gradients, run, session_config
from tests.support.world import MakeWorld

SIZE = 3
INPUTS = np.array([[1.0, -2.0, 3.0, 0.0], [1.0, 5.0, -3.0, 2.0], [4.0, 5.0, 0.5, 0.0]])
ARRIVING = np.array([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, 1.0], [2.0, 2.0, 2.0, 0.25]])

way = pytest.mark.parametrize("way", WAYS)
known = pytest.mark.parametrize("known", [True, False], ids=["known shapes", "unknown shapes"])
OPS: dict[ReduceOp, Callable[[np.ndarray], Any]] = {
    ReduceOp.AVERAGE: lambda stack: stack.mean(axis=0),
    ReduceOp.SUM: lambda stack: stack.sum(axis=0),
    ReduceOp.MIN: lambda stack: stack.min(axis=0),
    ReduceOp.MAX: lambda stack: stack.max(axis=0),
    ReduceOp.PRODUCT: lambda stack: stack.prod(axis=0),
}


def extreme(op: Callable[..., Any], rank: int) -> Any:
    hits = op(INPUTS, axis=0) == INPUTS
    return ARRIVING.sum(axis=0) * hits[rank] / hits.sum(axis=0)


GRADIENTS: dict[ReduceOp, Callable[[int], Any]] = {
    ReduceOp.SUM: lambda rank: ARRIVING.sum(axis=0),
    ReduceOp.AVERAGE: lambda rank: ARRIVING.mean(axis=0),
    ReduceOp.MIN: lambda rank: extreme(np.min, rank),
    ReduceOp.MAX: lambda rank: extreme(np.max, rank),
    ReduceOp.PRODUCT: lambda rank: ARRIVING.sum(axis=0) * np.delete(INPUTS, rank, axis=0).prod(axis=0),
}


def differentiate(way: str, known: bool, forward: Callable[[Any], Any], value: Any, arriving: Any) -> Any:
    """The gradient that arrives at an input."""

    def body(x: Any, g: Any) -> Any:
        if way == "session":
            return gradients([forward(x)], [x], [g])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(x)
        return gradients([y], [x], [g], tape)

    (result,) = run(way, body, value, arriving, shapes_known=known)
    return result


@way
@known
@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op.name.lower())
def test_allreduce(ranks: MakeWorld, way: str, known: bool, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        (result,) = run(way, lambda x: frontend.allreduce(x, op=op), INPUTS[rank], shapes_known=known)
        np.testing.assert_allclose(result, OPS[op](INPUTS))
        got = differentiate(way, known, lambda x: frontend.allreduce(x, op=op), INPUTS[rank], ARRIVING[rank])
        np.testing.assert_allclose(got, GRADIENTS[op](rank))

    ranks(SIZE).run(rank_body)


@way
@known
@pytest.mark.parametrize("rows", [(2, 0, 3), (1, 1, 1)], ids=str)
def test_allgather(ranks: MakeWorld, way: str, known: bool, rows: tuple[int, ...]) -> None:
    parts = [np.full((n, 2), float(rank)) for rank, n in enumerate(rows)]
    arriving = np.arange(SIZE * sum(rows) * 2, dtype=float).reshape(SIZE, sum(rows), 2) ** 1.5

    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        (result,) = run(way, frontend.allgather, parts[rank], shapes_known=known)
        np.testing.assert_array_equal(result, np.concatenate(parts))
        got = differentiate(way, known, frontend.allgather, parts[rank], arriving[rank])
        first = sum(rows[:rank])
        np.testing.assert_allclose(got, arriving.mean(axis=0)[first : first + rows[rank]])

    ranks(SIZE).run(rank_body)


@way
@known
def test_broadcast(ranks: MakeWorld, way: str, known: bool) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        (result,) = run(way, lambda x: frontend.broadcast(x, 1), INPUTS[rank], shapes_known=known)
        np.testing.assert_array_equal(result, INPUTS[1])
        got = differentiate(way, known, lambda x: frontend.broadcast(x, 1), INPUTS[rank], ARRIVING[rank])
        np.testing.assert_allclose(got, ARRIVING.mean(axis=0) if rank == 1 else np.zeros(4))

    ranks(SIZE).run(rank_body)


@way
@known
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE], ids=lambda op: op.name.lower())
def test_reducescatter(ranks: MakeWorld, way: str, known: bool, op: ReduceOp) -> None:
    bounds = [0, 2, 3, 4]  # of four rows among three ranks

    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        own = slice(bounds[rank], bounds[rank + 1])
        (result,) = run(way, lambda x: frontend.reducescatter(x, op=op), INPUTS[rank], shapes_known=known)
        np.testing.assert_allclose(result, OPS[op](INPUTS)[own])
        arriving = ARRIVING[0][own]
        got = differentiate(way, known, lambda x: frontend.reducescatter(x, op=op), INPUTS[rank], arriving)
        np.testing.assert_allclose(got, ARRIVING[0] * (SIZE if op is ReduceOp.SUM else 1))

    ranks(SIZE).run(rank_body)


@way
@known
@pytest.mark.parametrize("splits", [None, [1, 0, 1], [0, 2, 1]], ids=str)
def test_alltoall(ranks: MakeWorld, way: str, known: bool, splits: list[int] | None) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        value = np.arange(3.0) + 10 * rank
        rows = splits or [1, 1, 1]
        begin = sum(rows[:rank])
        expected = np.concatenate([np.arange(3.0)[begin : begin + rows[rank]] + 10 * r for r in range(SIZE)])

        def forward(x: Any) -> Any:
            return frontend.alltoall(x, splits)

        result, *counts = run(way, forward, value, shapes_known=known)
        np.testing.assert_array_equal(result, expected)
        assert [c.tolist() for c in counts] == ([] if splits is None else [[rows[rank]] * SIZE])

        def received(x: Any) -> Any:
            return forward(x) if splits is None else forward(x)[0]

        got = differentiate(way, known, received, value, expected + 1)
        sent = np.where(np.arange(3) < sum(rows), value + 1, 0.0)
        np.testing.assert_array_equal(got, sent)

    ranks(SIZE).run(rank_body)


@way
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BOOL], ids=str)
def test_every_type_in_every_collective(ranks: MakeWorld, way: str, dtype: DType) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        def body(x: Any) -> Any:
            own = tf.cast(x, dtype.value)
            results = [
                frontend.allreduce(own, op=ReduceOp.SUM),
                frontend.allgather(own),
                frontend.broadcast(own, 1),
                frontend.reducescatter(own, op=ReduceOp.SUM),
                frontend.alltoall(own),
            ]
            assert all(result.dtype is own.dtype for result in results)
            return [tf.cast(result, tf.float64) for result in results]

        total, gathered, root, part, exchanged = run(way, body, np.array([1.0, 3.0]) + frontend.rank())
        assert total.tolist() == [3.0, 7.0]
        assert gathered.tolist() == [1.0, 3.0, 2.0, 4.0]
        assert root.tolist() == [2.0, 4.0]
        assert part.tolist() == [[3.0, 7.0][frontend.rank()]]
        assert exchanged.tolist() == [[1.0, 2.0], [3.0, 4.0]][frontend.rank()]

    ranks(2).run(rank_body, frontend_of)


@way
def test_groups_mix_types_and_their_integers_have_no_gradient(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        integers = np.arange(3, dtype=np.int32) + rank

        def group(x: Any, i: Any) -> Any:
            return frontend.grouped_allreduce([x, i], op=ReduceOp.SUM, compression=Compression.fp16)

        first, second = run(way, group, INPUTS[rank], integers)
        np.testing.assert_allclose(first, INPUTS.sum(axis=0))
        assert second.dtype == np.int32
        assert second.tolist() == [3, 6, 9]

        def body(x: Any, i: Any, g: Any) -> Any:
            if way == "session":
                return gradients([group(x, i)[0]], [x], [g])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = group(x, i)[0]
            return gradients([y], [x], [g], tape)

        (got,) = run(way, body, INPUTS[rank], integers, ARRIVING[rank])
        np.testing.assert_allclose(got, ARRIVING.sum(axis=0), rtol=1e-3)

    ranks(SIZE).run(rank_body)


@way
@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM], ids=lambda op: op.name.lower())
def test_indexed_slices_are_gathered(ranks: MakeWorld, way: str, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        count = rank + 1

        def body(values: Any, indices: Any) -> Any:
            slices = tf.IndexedSlices(values, indices, tf.constant([4, 2]))
            made = sparse_allreduce(frontend, slices, None, op, 1.0, 1.0, frontend_set())
            return tf.convert_to_tensor(made)

        (dense,) = run(way, body, np.ones((count, 2)), np.arange(count, dtype=np.int64))
        whole = np.array([[3.0] * 2, [2.0] * 2, [1.0] * 2, [0.0] * 2])
        np.testing.assert_allclose(dense, whole / (SIZE if op is ReduceOp.AVERAGE else 1))
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([4, 2]))
        with pytest.raises(SparseReductionError, match="without factors"):
            sparse_allreduce(frontend, slices, None, ReduceOp.MAX, 1.0, 1.0, frontend_set())
        with pytest.raises(NotImplementedError):
            sparse_allreduce(frontend, slices, None, op, 2.0, 1.0, frontend_set())

    ranks(SIZE).run(rank_body)


def frontend_set() -> Any:
    from hvdgloo._collectives.process_sets import global_process_set

    return global_process_set


@way
def test_second_derivatives_of_sums_are_right(ranks: MakeWorld, way: str) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        def body(x: Any) -> Any:
            if way == "session":
                y = frontend.allreduce(x, op=ReduceOp.SUM) ** 3
                (first,) = tf.gradients(y, x)
                return tf.gradients(first, x)
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = frontend.allreduce(x, op=ReduceOp.SUM) ** 3
                first = inner.gradient(y, x)
            return outer.gradient(first, x)

        (second,) = run(way, body, np.array([1.0, 2.0]))
        # y = (sum of x over two ranks)^3; a rank's first derivative is the ranks' sum of 3 s^2, its second of 2 x 6 s.
        np.testing.assert_allclose(second, 2 * 2 * 6 * np.array([2.0, 4.0]))

    ranks(2).run(rank_body, frontend_of)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_second_derivatives_of_extremes_are_refused(ranks: MakeWorld, way: str) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        def body(x: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = frontend.allreduce(x * x, op=ReduceOp.MAX) ** 2
                first = inner.gradient(y, x)
            return outer.gradient(first, x)

        with pytest.raises(InvalidArgumentError, match="differentiated again"):
            run(way, body, np.array([1.0, 2.0]))

    ranks(2).run(rank_body, frontend_of)


def test_it_does_not_matter_in_which_order_ranks_trace(ranks: MakeWorld) -> None:
    """One rank traces (and retraces) another function first; names are counted as functions run."""

    def rank_body(frontend: Frontend[Any]) -> None:
        doubled = tf.function(lambda x: frontend.allreduce(2 * x, op=ReduceOp.SUM), autograph=False)
        squared = tf.function(lambda x: frontend.allreduce(x * x, op=ReduceOp.SUM), autograph=False)
        functions = [doubled, squared] if frontend.rank() else [squared, doubled]
        for function in functions:
            function.get_concrete_function(tf.TensorSpec([], tf.float64))
        if frontend.rank():
            squared.get_concrete_function(tf.TensorSpec([3], tf.float64))
        for _ in range(3):
            assert float(doubled(tf.constant(3.0, tf.float64))) == 12
            assert float(squared(tf.constant(3.0, tf.float64))) == 18

    ranks(2).run(rank_body, frontend_of)


def test_names_of_a_session_do_not_depend_on_the_order_of_execution(ranks: MakeWorld) -> None:
    """Nothing orders these three operators, nor what their gradients do: each must meet its like of the other rank."""

    def rank_body(frontend: Frontend[Any]) -> None:
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float64, [1, 2])
            sums = [frontend.allreduce(x * k, op=ReduceOp.SUM) for k in (1.0, 10.0, 100.0)]
            gathered = [frontend.allgather(x * k) for k in (1.0, 10.0)]
            slopes = [tf.gradients(g * k, x)[0] for g, k in zip(gathered, (1.0, 5.0), strict=True)]
            config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8, use_per_session_threads=True)
            with tf.compat.v1.Session(config=config) as session:
                for _ in range(5):
                    got, slope = session.run([sums, slopes], {x: [[1.0, 2.0]]})
                    assert [g.tolist() for g in got] == [[[2.0 * k, 4.0 * k]] for k in (1, 10, 100)]
                    assert [s.tolist() for s in slope] == [[[1.0, 1.0]], [[50.0, 50.0]]]

    ranks(2).run(rank_body, frontend_of)


COLLECTIVES: dict[str, Callable[[TensorFlowFrontend, Any, str | None], Any]] = {
    "sum": lambda hvd, x, name: hvd.allreduce(x, op=ReduceOp.SUM, name=name),
    "min": lambda hvd, x, name: hvd.allreduce(x, op=ReduceOp.MIN, name=name),
    "max": lambda hvd, x, name: hvd.allreduce(x, op=ReduceOp.MAX, name=name),
    "product": lambda hvd, x, name: hvd.allreduce(x, op=ReduceOp.PRODUCT, name=name),
    "group": lambda hvd, x, name: hvd.grouped_allreduce([x, x], op=ReduceOp.MAX, name=name)[1],
    "allgather": lambda hvd, x, name: hvd.allgather(x, name),
    "grouped allgather": lambda hvd, x, name: hvd.grouped_allgather([x, x], name)[0],
    "broadcast": lambda hvd, x, name: hvd.broadcast(x, 1, name),
    "even alltoall": lambda hvd, x, name: hvd.alltoall(x, None, name),
    "alltoall": lambda hvd, x, name: hvd.alltoall(x, [0, 2], name)[0],
    "reducescatter": lambda hvd, x, name: hvd.reducescatter(x, op=ReduceOp.SUM, name=name),
}


def test_gradients_through_one_collective_are_told_apart_in_a_session(ranks: MakeWorld) -> None:
    """Nothing orders them: under one name, a rank's first could meet another rank's second."""
    value = np.array([[1.0, 2.0], [3.0, 4.0]])

    def rank_body(frontend: Frontend[Any]) -> None:
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float64, [2, 2])
            slopes = {}
            for number, (kind, collective) in enumerate(COLLECTIVES.items()):
                y = collective(frontend, x * (1.0 + frontend.rank()), kind if number % 2 else None)
                slopes[kind] = [tf.gradients(y * factor, x)[0] for factor in (1.0, 5.0)]
            with tf.compat.v1.Session(config=session_config()) as session:
                for kind, several in slopes.items():
                    for _ in range(2):
                        first, *others = session.run(several, {x: value})
                        for slope, factor in zip(others, (5.0,), strict=True):
                            np.testing.assert_allclose(slope, first * factor, err_msg=kind)

    ranks(2).run(rank_body, frontend_of)


@pytest.mark.parametrize("way", ["function", "session"])
def test_there_may_be_more_collectives_than_threads(ranks: MakeWorld, way: str) -> None:
    """A session has one thread for operators here, and starts with any: no rank may be stuck where others are not."""
    rows = 5.0 * np.ones((2, 3))

    def rank_body(frontend: Frontend[Any]) -> None:
        def every(x: Any) -> list[Any]:
            made = [collective(frontend, x, kind) for kind, collective in COLLECTIVES.items()]
            summed = [frontend.allreduce(x + k, op=ReduceOp.SUM, name=f"plain.{k}") for k in range(10)]
            slopes = [] if way == "function" else [tf.gradients(y, x)[0] for y in made]
            return [*summed, *made, *slopes]

        for _ in range(2):
            results = run(way, every, rows)
            for k in range(10):
                np.testing.assert_array_equal(results[k], 2 * (rows + k))

    ranks(2).run(rank_body, frontend_of)


def test_a_stall_report_tells_that_all_of_tensorflows_threads_wait(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Functions that several Python threads call: rank 0's hold all threads, and rank 1's do not get one."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    submitted = threading.Semaphore(0)
    held = threading.Barrier(threads)

    def rank_body(frontend: Frontend[Any]) -> None:
        start = frontend.start

        def started(*args: Any, **kwargs: Any) -> Any:
            # The time until the report begins with the first submission, so none is made before every thread is held.
            if frontend.rank() == 0:
                held.wait(timeout=30)
            pending = start(*args, **kwargs)
            submitted.release()
            return pending

        frontend.start = started  # type: ignore[method-assign]

        def call(number: int) -> None:
            with pytest.raises(StallError):
                run("function", lambda x: frontend.allreduce(x, name=f"{number}"), np.ones(2))

        if frontend.rank() == 1:
            for _ in range(threads):
                assert submitted.acquire(timeout=30)
        at_once(*(partial(call, number) for number in range(threads)))

    with caplog.at_level(logging.WARNING, "hvdgloo"):
        ranks(2, stall_warning_time=0.5, stall_shutdown_time=3.0).run(rank_body, frontend_of)
    (report, *_) = [text for text in caplog.messages if text.startswith("Stalled")]
    rank = report.partition("is here:")[2].splitlines()
    assert rank[1].strip() == (
        f"TensorFlow's {threads} inter-op threads all wait for collectives. If other Python threads call functions "
        "with collectives, theirs cannot begin: call tf.config.threading.set_inter_op_parallelism_threads(n) at the "
        "start of the program, with n at least the number of such threads."
    )


def test_the_number_of_tensorflows_threads_is_what_tensorflow_makes_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 0)
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "3")
    assert _waiting.inter_op_threads() == 3
    monkeypatch.delenv("TF_NUM_INTEROP_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    assert _waiting.inter_op_threads() == 5
    with_one = _waiting.counted(_waiting.all_wait)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 2)
    assert with_one() is None
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 1)
    assert with_one().startswith("TensorFlow's only inter-op thread waits for collectives. ")


@way
def test_a_disagreement_is_an_error_of_tensorflows_too_and_the_job_goes_on(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "shapes": (lambda x: frontend.allreduce(x, name="x"), np.zeros(1 + rank)),
            "types": (lambda x: frontend.allgather(x, "x"), np.zeros(2, [np.float32, np.int32][rank])),
            "roots": (lambda x: frontend.broadcast(x, rank, "x"), np.zeros(2)),
            "rows": (lambda x: frontend.alltoall(x, [1, 1], "x")[0], np.zeros((2, 1 + rank))),
        }
        for what, (call, value) in calls.items():
            with pytest.raises(MismatchError, match="x") as caught:
                run(way, call, value)
            assert isinstance(caught.value, tf.errors.FailedPreconditionError), what
            assert caught.value.error_code == tf.errors.FAILED_PRECONDITION
        (result,) = run(way, lambda x: frontend.allreduce(x, name="x"), np.ones(2))
        assert result.tolist() == [1.0, 1.0]

    ranks(2).run(rank_body)


@way
def test_a_wrong_argument_is_an_error_of_tensorflows_too(ranks: MakeWorld, way: str) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="2 splits were given for 1 ranks") as caught:
        run(way, lambda x: public(frontend.alltoall)(x, [1, 1])[0], np.ones(2))
    assert isinstance(caught.value, InvalidArgumentError)
    assert type(pickle.loads(pickle.dumps(caught.value))) is InvalidArgumentError


@pytest.mark.parametrize(
    ("bad", "options", "error"),
    [
        (tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([2])), {"op": ReduceOp.MAX}, NotImplementedError),
        (tf.IndexedSlices(tf.constant([1j]), tf.constant([0]), tf.constant([2])), {}, InvalidArgumentError),
        (tf.constant([1j]), {}, InvalidArgumentError),
    ],
    ids=["reduction", "type of entries", "type"],
)
def test_nothing_of_a_mixed_group_is_sent_if_a_part_of_it_cannot_be(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch, bad: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    monkeypatch.setattr(_ops, "FRONTEND", frontend)
    sent: list[Any] = []
    monkeypatch.setattr(frontend, "start", lambda *args, **_: sent.append(args))
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([2]))
    with pytest.raises(error):
        hvd.grouped_allreduce([tf.ones([2]), slices, bad], **options)
    assert not sent


@pytest.mark.parametrize("module", [hvd, hvd_keras], ids=["tensorflow", "tensorflow.keras"])
@pytest.mark.parametrize("name", ["allgather", "allgather_object", "allreduce"])
def test_functions_of_the_modules_raise_tensorflows_errors(module: Any, name: str) -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match="init") as before:
        getattr(module, name)(np.ones(2))
    assert isinstance(before.value, NotInitializedError)
    with pytest.raises(tf.errors.InvalidArgumentError, match="op must be one of") as wrong:
        module.allreduce(tf.ones(2), op=17)
    assert isinstance(wrong.value, ValueError)


def test_an_error_of_a_graph_is_ours_and_tensorflows_and_has_its_facts(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    lost = PeerLostError("rank 3 was lost", rank=3, host="h2")

    def fail(*_: Any, **__: Any) -> Any:
        raise lost

    frontend.start = fail  # type: ignore[method-assign]
    for way in WAYS:
        with pytest.raises(PeerLostError, match=r"^rank 3 was lost$") as caught:
            run(way, frontend.allreduce, np.ones(2))
        assert isinstance(caught.value, tf.errors.UnknownError)
        assert (caught.value.rank, caught.value.host) == (3, "h2")
        assert "rank 3 was lost" in caught.value.message
        copy = pickle.loads(pickle.dumps(caught.value))
        assert type(copy) is PeerLostError
        assert copy.rank == 3
    # Others' errors stay what they are.
    with pytest.raises(tf.errors.UnknownError, match="ZeroDivisionError") as other:
        tf.function(lambda: tf.numpy_function(lambda: 1 / 0, [], tf.float64))()
    assert not isinstance(other.value, HorovodInternalError)


def test_numbers_that_a_graph_asks_for_each_time(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        for way in WAYS:
            (number,) = run(way, lambda: frontend.reads(frontend.rank))
            assert (number.dtype, number.tolist()) == (np.int32, frontend.rank())
        last = run("function", lambda: frontend.reads(frontend.join))
        assert last[0].tolist() in (0, 1)

    ranks(2).run(rank_body, frontend_of)


def _branch(body: Callable[[Any], Any], x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: body(x), lambda: 2.0 * body(x))


def _case(body: Callable[[Any], Any], x: Any) -> Any:
    return tf.switch_case(tf.cast(tf.size(x) > 0, tf.int32), [lambda: 2.0 * body(x), lambda: body(x)])


def _loop(body: Callable[[Any], Any], x: Any) -> Any:
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + body(x) / 2.0), [0, tf.constant(0.0, x.dtype)])[1]


def _branch_of_loop(body: Callable[[Any], Any], x: Any) -> Any:
    return _loop(lambda inner: _branch(body, inner), x)


def _loop_of_branch(body: Callable[[Any], Any], x: Any) -> Any:
    return _branch(lambda inner: _branch_of_loop(body, inner), x)


@pytest.mark.parametrize("within", [_branch, _case, _loop, _branch_of_loop, _loop_of_branch])
def test_gradients_within_branches_and_loops(ranks: MakeWorld, within: Callable[..., Any]) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        def body(x: Any) -> Any:
            every = [
                frontend.allreduce(x, op=ReduceOp.SUM),
                frontend.allreduce(x * x, op=ReduceOp.MAX),
                frontend.allgather(x),
                frontend.broadcast(x, 0),
                frontend.reducescatter(x, op=ReduceOp.SUM),
                frontend.alltoall(x),
                frontend.alltoall(x * x, [1, 2])[0],
            ]
            return tf.add_n([tf.reduce_sum(each**2) for each in every])

        value = np.array([1.0, 2.0, -3.0, 1.5]) * (1.0 + frontend.rank())
        expected = differentiate("function", True, body, value, np.float64(1))
        got = differentiate("function", True, lambda x: within(body, x), value, np.float64(1))
        np.testing.assert_allclose(got, expected)

    ranks(2).run(rank_body, frontend_of, 45.0)  # building the graphs takes seconds of processor time


def test_splits_that_are_no_whole_numbers(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        for way in WAYS:
            with pytest.raises((InvalidArgumentError, tf.errors.OpError), match="splits are"):
                run(way, lambda x: frontend.alltoall(x, [1.7, 1.2])[0], np.ones(3))

    ranks(2).run(rank_body, frontend_of)


def test_wrong_calls_are_refused_while_the_graph_is_made(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    with pytest.raises(InvalidArgumentError, match="complex128"):
        run("function", frontend.allreduce, np.array([1j]))
    with pytest.raises(InvalidArgumentError, match="Average"):
        run("function", lambda x: frontend.allreduce(x, op=17), np.ones(1))


def traced(call: Callable[[Any], Any], value: Any) -> Any:
    def body(x: Any) -> Any:
        return call(x) if tf.size(x) > 0 else x  # AutoGraph makes a function of each branch

    return tf.function(body)(value)


def mapped(call: Callable[[Any], Any], value: Any) -> Any:
    return list(tf.data.Dataset.from_tensors(value).map(lambda x: call(x)))


def layer_of(call: Callable[[Any], Any]) -> Any:
    class Calling(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return call(x)

    return Calling()


def called_by_keras(call: Callable[[Any], Any], value: Any) -> Any:
    return layer_of(call)(value)


def shaped_by_keras(call: Callable[[Any], Any], value: Any) -> Any:
    return layer_of(call)(tf.keras.Input(value.shape[1:], dtype=value.dtype.name))


def traced_by_keras(call: Callable[[Any], Any], value: Any) -> Any:
    return traced(layer_of(call), value)


@pytest.mark.parametrize(
    "where", [traced, mapped, called_by_keras, shaped_by_keras, traced_by_keras], ids=lambda where: where.__name__
)
@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        ([[1.0]], {"op": 77}, "op must be one of"),
        ([[1j]], {}, "complex"),
        ([["a"]], {}, "string"),
        ([[1.0]], {"process_set": 3}, "process_set must be a ProcessSet"),
    ],
    ids=["op", "complex", "strings", "process set"],
)
def test_a_wrong_argument_met_while_tracing_can_be_printed_and_pickled(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch, where: Any, value: Any, options: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr(_ops, "FRONTEND", frontend_of(ranks(1).contexts[0]))
    with pytest.raises(InvalidArgumentError) as caught:
        where(lambda x: hvd.allreduce(x, **options), tf.constant(value))
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is InvalidArgumentError
    for error in (caught.value, copy):
        assert text in str(error)
        assert text in repr(error)


@pytest.mark.parametrize("where", [traced, mapped, called_by_keras, traced_by_keras], ids=lambda where: where.__name__)
def test_an_error_met_while_tracing_keeps_its_facts(where: Any) -> None:
    @public
    def fail(x: Any) -> Any:
        raise PeerLostError("rank 3 was lost", rank=3, host="h2")

    with pytest.raises(PeerLostError, match="rank 3 was lost") as caught:
        where(fail, tf.ones([1, 1]))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.rank, error.host) == (3, "h2")


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_an_error_that_tensorflow_has_no_class_for_stays_what_it_is_while_tracing(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ops, "FRONTEND", frontend_of(ranks(1).contexts[0]))

    def largest(x: Any) -> Any:
        return hvd.allreduce(tf.IndexedSlices(x, tf.constant([0])), op=hvd.Max)

    with pytest.raises(NotImplementedError, match="IndexedSlices can be averaged"):
        traced(largest, tf.ones([1, 1]))
    with pytest.raises(InvalidArgumentError, match=r"inside a step, use hvdgloo\.tensorflow's"):
        traced(hvdgloo.keras.allreduce, tf.ones([1, 1]))


def test_memory_is_shared_where_it_can_be(ranks: MakeWorld) -> None:
    """A tensor's own memory goes to the engine, and what comes back is a tensor without a copy."""
    frontend = frontend_of(ranks(1).contexts[0])
    adapter = frontend.adapter
    tensor = tf.random.uniform([1000])
    exported = adapter.export(tensor)
    assert exported.owner is tensor
    assert exported.address == np.asarray(tensor).__array_interface__["data"][0]
    memory = adapter.allocate(exported.spec, tensor)
    assert adapter.export(memory).address % 64 == 0
    delivered = adapter.deliver(memory, tensor, in_place=False)
    assert np.asarray(delivered).__array_interface__["data"][0] == adapter.export(memory).address
    variable = tf.Variable(tensor)
    assert adapter.export(variable, writable=True).owner is not variable
    seen: list[int] = []
    operation = CollectiveSpec(Collective.ALLREDUCE)
    start = frontend.start

    def watched(operation: CollectiveSpec, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(adapter.export(tensors[0]).address)
        pending = start(operation, tensors, *args, **kwargs)
        seen.append(pending.result()[0].__array_interface__["data"][0])
        return pending

    frontend.start = watched  # type: ignore[method-assign]
    result = tf.function(lambda x: frontend.apply(operation, [x])[0], autograph=False)(tensor)
    assert seen == [
        np.asarray(tensor).__array_interface__["data"][0],
        np.asarray(result).__array_interface__["data"][0],
    ]


def test_a_dead_rank_is_told_to_those_who_wait_in_a_graph(ranks: MakeWorld) -> None:
    two = ranks(2)

    def rank_body(context: Context) -> None:
        if context.rank:
            context.engine.close("it was tired")
            return
        frontend = frontend_of(context)
        with pytest.raises(HorovodInternalError, match="rank 1"):
            run("function", frontend.allreduce, np.ones(2))

    two.run(rank_body)


@way
def test_numbers_travel_compressed_as_numbers(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        (mean,) = run(way, lambda x: frontend.allreduce(x, compression=Compression.fp16), np.float32(rank))
        assert (mean.dtype, mean.tolist()) == (np.float32, 0.5)
        assert frontend.adapter.owns(np.float32(1))
        number = frontend.allreduce(np.float32(rank), compression=Compression.fp16)
        assert (number.dtype, number.shape, float(number)) == (np.float32, (), 0.5)

    ranks(2).run(rank_body)


def test_errors_that_are_kept_hold_no_frames() -> None:
    try:
        raise PeerLostError("rank 3 was lost", rank=3, host="h2")
    except PeerLostError as error:
        text = mark(error)
    kept = recall(text)
    assert kept is not None
    assert kept.__traceback__ is None
