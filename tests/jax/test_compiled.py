"""Collectives in compiled functions: the same values as eagerly and by numpy, in the order of the program."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._platform.error_tokens import recall
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.jax._adapter import JaxAdapter, dtype_of
from hvdgloo.jax._errors import translated
from hvdgloo.jax._frontend import JaxFrontend
from hvdgloo.jax._primitive import on_host
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.types import DType, ReduceOp
from tests.jax.support import on_ranks
from tests.support.selection import extended
from tests.support.threads import at_once

LOWERINGS = pytest.mark.parametrize("callbacks", [False, True], ids=["calls", "callbacks"], indirect=True)
SIZE = 3
pytestmark = pytest.mark.usefixtures("callbacks")


@pytest.fixture(autouse=True)
def callbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdgloo.jax import _primitive as primitive

    if getattr(request, "param", False):
        monkeypatch.setattr(primitive, "_uses_callbacks", lambda: True)


def of_rank(rank: int, shape: tuple[int, ...] = (6, 2)) -> np.ndarray:
    """Return small whole numbers, exact in every type."""
    return (np.arange(np.prod(shape)).reshape(shape) + 3 * rank) % 5


EVERYONES = np.stack([of_rank(rank) for rank in range(SIZE)])
REDUCTIONS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.AVERAGE: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.PRODUCT: np.prod,
}


def everywhere(frontend: JaxFrontend, function: Callable[[Any], Any], array: Any, expected: Any) -> None:
    """See that a function returns what is expected, eagerly and compiled, in the array's type; and leaves the array."""
    before = np.asarray(array).copy()
    for call in (function, jax.jit(function)):
        result = call(array)
        assert isinstance(result, jax.Array)
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(result.astype(np.float64)), expected)
        np.testing.assert_array_equal(np.asarray(array), before)


@LOWERINGS
@pytest.mark.parametrize(
    "dtype", [DType.FLOAT32, *extended(*(each for each in DType if each is not DType.FLOAT32))], ids=str
)
def test_every_reduction_of_every_type(dtype: DType) -> None:
    def body(frontend: JaxFrontend) -> None:
        array = jnp.asarray(of_rank(frontend.rank())).astype(dtype_of(dtype))
        for op, reduce in REDUCTIONS.items():
            if dtype is DType.BOOL and op is ReduceOp.AVERAGE:
                continue
            expected = reduce(np.asarray(EVERYONES.astype(bool) if dtype is DType.BOOL else EVERYONES), axis=0)
            expected = expected if dtype.is_floating else np.trunc(expected)
            expected = expected.astype(bool) if dtype is DType.BOOL else expected
            if op is ReduceOp.AVERAGE and dtype.is_floating:
                expected = np.asarray(jnp.asarray(expected).astype(array.dtype).astype(np.float64))
            everywhere(frontend, lambda x, op=op: frontend.allreduce(x, op=op), array, expected)

    on_ranks(body, SIZE)


@LOWERINGS
@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.BFLOAT16, *extended(DType.BOOL, DType.INT8)], ids=str)
def test_collectives_that_move_rows(dtype: DType) -> None:
    def body(frontend: JaxFrontend) -> None:
        rank = frontend.rank()
        values = EVERYONES.astype(bool) if dtype is DType.BOOL else EVERYONES
        array = jnp.asarray(values[rank]).astype(dtype_of(dtype))
        everywhere(frontend, frontend.allgather, array, np.concatenate(values))
        for root in range(SIZE):
            everywhere(frontend, lambda x, root=root: frontend.broadcast(x, root), array, values[root])
        everywhere(frontend, frontend.alltoall, array, np.concatenate(values[:, 2 * rank : 2 * rank + 2]))
        splits = [1, 3, 0]
        begin = sum(splits[:rank])
        parts = np.concatenate(values[:, begin : begin + splits[rank]])
        everywhere(frontend, lambda x: frontend.alltoall(x, splits)[0], array, parts)
        assert jax.jit(lambda x: frontend.alltoall(x, splits)[1])(array).tolist() == [splits[rank]] * SIZE
        if dtype is not DType.BOOL:
            mine = values.sum(axis=0)[2 * rank : 2 * rank + 2]
            everywhere(frontend, lambda x: frontend.reducescatter(x, op=ReduceOp.SUM), array, mine)
            uneven = np.split(values.sum(axis=0)[:4], [2, 3])[rank]
            everywhere(frontend, lambda x: frontend.reducescatter(x[:4], op=ReduceOp.SUM), array, uneven)

    on_ranks(body, SIZE, "local")


@pytest.mark.parametrize("backend", ["local", "shm", *extended("gloo", "hierarchical", "tree")])
def test_large_and_empty_arrays_on_every_plane(backend: str) -> None:
    def body(frontend: JaxFrontend) -> None:
        for shape in ((300, 1001), (0, 4), ()):
            array = jnp.full(shape, frontend.rank() + 1.0)
            everywhere(frontend, lambda x: frontend.allreduce(x, op=ReduceOp.SUM), array, np.full(shape, 3.0))

    on_ranks(body, 2, backend)


@LOWERINGS
def test_trees_travel_as_groups(callbacks: None) -> None:
    def body(frontend: JaxFrontend) -> None:
        rank = frontend.rank()
        tree = {"a": jnp.full((4,), rank * 1.0), "b": [jnp.full((2, 2), rank), None], "c": 2.0 * rank}
        for call in (lambda function: function, jax.jit):
            mean = call(frontend.allreduce)(tree)
            assert jax.tree.map(lambda x: np.asarray(x).ravel()[0].item(), mean) == {"a": 0.5, "b": [0, None], "c": 1.0}
            root = call(lambda tree: frontend.broadcast(tree, 1, name="tree"))(tree)
            assert jax.tree.map(lambda x: np.asarray(x).ravel()[0].item(), root) == {"a": 1.0, "b": [1, None], "c": 2.0}
            rows = {"a": tree["a"], "b": tree["b"]}
            assert jax.tree.map(jnp.shape, call(frontend.allgather)(rows)) == {"a": (8,), "b": [(4, 2), None]}
            assert jax.tree.map(jnp.shape, call(frontend.reducescatter)(rows)) == {"a": (2,), "b": [(1, 2), None]}
            assert call(frontend.allreduce)({}) == {}
            assert call(lambda tree: frontend.broadcast(tree, 0))({}) == {}

    on_ranks(body)


@LOWERINGS
def test_scan_cond_while_and_remat() -> None:
    def body(frontend: JaxFrontend) -> None:
        x = jnp.arange(4.0) + frontend.rank()
        mean = np.arange(4.0) + 0.5

        def scanned(x: Any) -> Any:
            return jax.lax.scan(lambda c, _: (frontend.allreduce(c, name="again") * 2, None), x, length=3)[0]

        def looped(x: Any) -> Any:
            return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: frontend.allreduce(c) + 1, x)

        def remat(x: Any) -> Any:
            return jax.checkpoint(lambda x: jnp.sin(frontend.allreduce(x)).sum())(x)

        np.testing.assert_allclose(jax.jit(scanned)(x), mean * 8)
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: scanned(x).sum()))(x), np.full(4, 8.0))
        chosen = jax.jit(lambda x: jax.lax.cond(x.sum() > -1, frontend.allreduce, lambda c: c, x))
        np.testing.assert_allclose(chosen(x), mean)
        np.testing.assert_allclose(jax.jit(looped)(x), mean + 5)
        np.testing.assert_allclose(jax.jit(jax.grad(remat))(x), np.cos(mean))

    on_ranks(body)


@LOWERINGS
def test_elementwise_collectives_keep_a_vmapped_axis() -> None:
    def body(frontend: JaxFrontend) -> None:
        x = jnp.arange(6.0).reshape(2, 3) + frontend.rank()
        for axis in (0, 1):
            both = jax.vmap(lambda x: frontend.allreduce([x, jnp.ones(())])[0], axis, axis)
            np.testing.assert_allclose(jax.jit(both)(x), np.arange(6.0).reshape(2, 3) + 0.5)
        with pytest.raises(InvalidArgumentError, match=r"allgather cannot be inside jax\.vmap"):
            jax.jit(jax.vmap(frontend.allgather))(x)

    on_ranks(body)


@LOWERINGS
def test_calls_run_in_the_order_of_the_program_whatever_uses_their_results() -> None:
    """The compiler is free to order what does not depend on each other, and does it differently on each rank."""

    def body(frontend: JaxFrontend) -> None:
        rank = frontend.rank()
        x = jnp.arange(4.0) + rank
        large = jnp.full((300, 300), 1 / 300)

        def function(x: Any, large: Any) -> Any:
            for _ in range(20 if rank == 0 else 0):  # the second call could begin long before the first one
                large = large @ large
            ones = jnp.ones(3) * (large[0, 0] * 300)
            first, second = frontend.allreduce(x @ x * ones), frontend.allreduce(x[:3])
            frontend.allreduce(x * 0.0)  # unused
            third = frontend.allreduce(x, op=ReduceOp.SUM)[:3]
            return first + 10 * second + third if rank == 0 else jnp.tanh(third) * 0 + third + 10 * second + first

        squares = np.mean([np.sum((np.arange(4.0) + other) ** 2) for other in range(2)])
        expected = squares + 10 * (np.arange(3.0) + 0.5) + 2 * np.arange(3.0) + 1
        for _ in range(5):
            np.testing.assert_allclose(jax.jit(function)(x, large), expected, rtol=1e-5)

    on_ranks(body)


@LOWERINGS
def test_eager_calls_do_not_overtake_compiled_ones() -> None:
    """All are unnamed: their numbers are counted as they run."""

    def body(frontend: JaxFrontend) -> None:
        big = jnp.ones((400, 400)) * (frontend.rank() + 1)

        @jax.jit
        def slow(x: Any) -> Any:
            for _ in range(4):
                x = x @ x / 400
            return frontend.allreduce(x[0, 0], op=ReduceOp.SUM)

        for count in range(5):
            compiled = slow(big)
            eager = frontend.allreduce(jnp.float64(count), op=ReduceOp.SUM)
            assert float(eager) == 2 * count
            assert float(compiled) == 1 + 2.0**16

    on_ranks(body)


def test_two_threads_of_a_rank_run_a_compiled_function_each() -> None:
    """Ranks start them in different orders; calls with names need none among threads."""

    def body(frontend: JaxFrontend) -> None:
        def run(name: str) -> list[float]:
            function = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: frontend.allreduce(x, name=name) + 1, x))
            return function(jnp.full(3, float(frontend.rank()))).tolist()

        assert at_once(*(partial(run, name) for name in ("ab" if frontend.rank() else "ba"))) == [[20.5] * 3] * 2

    on_ranks(body)


@LOWERINGS
def test_ranks_that_disagree_get_an_error_and_go_on() -> None:
    def body(frontend: JaxFrontend) -> None:
        x = jnp.ones(3 + frontend.rank())
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(jax.jit(lambda x: frontend.allreduce(x, name="differs"))(x))
        ours = recall(str(caught.value))
        assert isinstance(ours, MismatchError)
        assert "(4,) on rank 1" in str(ours)
        frontend.barrier()
        assert jax.jit(frontend.allreduce)(jnp.ones(2)).tolist() == [1.0, 1.0]

    on_ranks(body)


@LOWERINGS
def test_rows_that_differ_between_ranks_are_an_error_when_compiled() -> None:
    def body(frontend: JaxFrontend) -> None:
        rows = jnp.ones((1 + frontend.rank(), 2))
        assert frontend.allgather(rows).shape == (3, 2)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Pad the arrays to the same number of rows"):
            jax.block_until_ready(jax.jit(frontend.allgather)(rows))
        frontend.barrier()
        splits = [[1, 1], [2, 0]][frontend.rank()]
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(must be the same on all ranks|result has shape)"):
            jax.block_until_ready(jax.jit(lambda x: frontend.alltoall(x, splits)[0])(jnp.ones((2, 2))))

    on_ranks(body)


def test_the_text_of_a_call_is_the_same_in_each_process() -> None:
    from hvdgloo.jax import _execution as execution
    from hvdgloo.types import Collective, TensorSpec

    spec = TensorSpec(DType.BFLOAT16, (3, 2))
    operation = CollectiveSpec(Collective.ALLTOALL, prescale=0.1)
    call = execution.Call("hvdgloo.jax._frontend", operation, 'a "name"', False, (spec,), (spec,), (1, 2), (2, 2))
    assert execution._parsed(call.text.encode()) == call


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda f, x: f.barrier(), "cannot be part of a function that JAX traces"),
        (lambda f, x: f.join(), "cannot be part of a function that JAX traces"),
        (lambda f, x: f.broadcast_object(1), "cannot be part of a function that JAX traces"),
        (lambda f, x: f.alltoall(x, x.astype(int))[0], "they cannot be computed in it"),
        (lambda f, x: f.allgather(x.sum()), "needs a first dimension"),
        (lambda f, x: f.allreduce(x + 1j), r"complex128.*jax\.numpy\.stack"),
        (lambda f, x: f.allreduce(x.astype(jnp.int4)), "int4 cannot be sent"),
        (lambda f, x: f.allreduce(x.astype(jnp.float8_e4m3fn)), "float8_e4m3fn cannot be sent"),
        (lambda f, x: f.allreduce(jax.random.key(1)), r"key_data"),
        (
            lambda f, x: jax.grad(lambda x: f.allreduce(x, op=ReduceOp.ADASUM).sum())(x),
            "Adasum allreduce has no gradient",
        ),
        (
            lambda f, x: jax.grad(lambda x: jax.grad(lambda x: f.allreduce(x, op=ReduceOp.MAX) ** 2)(x))(x[0]),
            "a second time",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_tracing(call: Callable[[JaxFrontend, Any], Any], text: str) -> None:
    def body(frontend: JaxFrontend) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            jax.jit(lambda x: call(frontend, x))(jnp.ones(2))

    on_ranks(body, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: jax.jvp(f.allreduce, (x,), (x,)),
        lambda f, x: jax.jacfwd(f.allgather)(x),
        lambda f, x: jax.hessian(lambda x: (f.allreduce(x) ** 2).sum())(x),
    ],
    ids=["jvp", "jacfwd", "hessian"],
)
def test_forward_mode_is_refused(call: Callable[[JaxFrontend, Any], Any]) -> None:
    def body(frontend: JaxFrontend) -> None:
        with pytest.raises(InvalidArgumentError, match="no derivatives in forward mode"):
            call(frontend, jnp.ones(2))
        # Of what is compiled as a whole, JAX itself says so.
        with pytest.raises((InvalidArgumentError, TypeError), match=r"forward.mode"):
            jax.jit(lambda x: call(frontend, x))(jnp.ones(2))

    on_ranks(body, 1)


@pytest.mark.parametrize("call", ["allgather", "reducescatter", "alltoall"])
def test_collectives_of_rows_are_refused_in_vmap(call: str) -> None:
    def body(frontend: JaxFrontend) -> None:
        with pytest.raises(InvalidArgumentError, match=rf"{call} cannot be inside jax\.vmap; call it outside"):
            jax.vmap(getattr(frontend, call))(jnp.ones((2, 3)))

    on_ranks(body, 1)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_functions_for_other_devices_are_refused(platform: str) -> None:
    def body(frontend: JaxFrontend) -> None:
        traced = jax.jit(frontend.allreduce).trace(jnp.ones(2))
        with pytest.raises(InvalidArgumentError, match=rf"compiled for {platform} has a collective.*jax\.device_put"):
            traced.lower(lowering_platforms=(platform,))

    on_ranks(body, 1)


class Elsewhere:
    """An array that this process's CPU cannot read."""

    def __init__(self, platform: str, is_fully_addressable: bool) -> None:
        self.shape, self.dtype, self.is_fully_addressable = (2,), np.dtype(np.float32), is_fully_addressable
        self._platform = platform

    def devices(self) -> list[Any]:
        return [types.SimpleNamespace(platform=self._platform)]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (Elsewhere("gpu", True), r"on a device of platform gpu; .*jax\.device_put"),
        (Elsewhere("tpu", True), r"on a device of platform tpu; .*jax\.device_put"),
        (Elsewhere("cpu", False), r"leave out jax\.distributed\.initialize"),
    ],
    ids=["gpu", "tpu", "other processes"],
)
def test_arrays_elsewhere_are_refused(array: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JaxAdapter, "owns", lambda self, tensor: True)
    with pytest.raises(InvalidArgumentError, match=text):
        JaxAdapter().export(array)


def test_several_processes_in_one_program_of_jax_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def body(frontend: JaxFrontend) -> None:
        with pytest.raises(InvalidArgumentError, match=r"leave out jax\.distributed\.initialize"):
            jax.jit(frontend.allreduce)(jnp.ones(2))

    on_ranks(body, 1)


@LOWERINGS
def test_a_function_of_the_process_changes_arrays_in_place_and_may_wait() -> None:
    def body(frontend: JaxFrontend) -> None:
        numpy = Frontend(NumpyAdapter(), frontend._context)

        def reduce(arrays: Any) -> None:
            for index, array in enumerate(arrays):
                numpy.allreduce_(array, name=f"array {index}", op=ReduceOp.SUM)

        def step(x: Any) -> Any:
            whole, half, none = on_host(reduce, [x, x.astype(jnp.bfloat16), x[:0]])
            return whole * 2, half, none

        given = jnp.full(3000, 1.0 + frontend.rank())
        for call in (step, jax.jit(step)):
            assert [each.tolist() for each in call(given)] == [[6.0] * 3000, [3.0] * 3000, []]
        assert given[0] == 1 + frontend.rank()

    on_ranks(body)


def test_an_error_of_a_function_of_the_process_is_the_compiled_functions() -> None:
    def fail(arrays: Any) -> None:
        raise MismatchError("ranks disagree", name="x")

    def body(frontend: JaxFrontend) -> None:
        for call in (lambda x: on_host(fail, [x])[0], jax.jit(lambda x: on_host(fail, [x])[0])):
            with pytest.raises(MismatchError, match="ranks disagree"), translated():
                jax.block_until_ready(call(jnp.ones(2)))
        with pytest.raises(InvalidArgumentError, match=r"inside jax\.vmap"):
            jax.vmap(lambda x: on_host(fail, [x])[0])(jnp.ones((2, 2)))

    on_ranks(body, 1)
