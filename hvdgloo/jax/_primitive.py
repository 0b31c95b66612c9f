"""The JAX primitive that a collective becomes in a function that JAX transforms or compiles.

It has an ordered effect of its own: in a compiled function, a token that each call takes and returns keeps the calls in
the order in which the function was written. So all ranks start the same collectives in the same order even if their
functions differ otherwise, and calls whose results are unused run, too.

This is the only module that imports JAX's private modules, which have no public names for effects and tokens.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch, effects
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from hvdgloo._job import process
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.jax import _execution as execution
from hvdgloo.jax import _ffi as ffi
from hvdgloo.jax._adapter import CPU_ONLY, ONE_CONTROLLER, ONE_PROCESS_PER_DEVICE, JaxAdapter
from hvdgloo.jax._execution import Call, HostCall

_logger = logging.getLogger(__name__)

_adapter = JaxAdapter()

TARGET = "hvdgloo_collective"


class CollectiveEffect(effects.Effect):  # type: ignore[misc]
    """The effect of a collective on the other ranks."""

    def __str__(self) -> str:
        return "hvdgloo"


_EFFECT = CollectiveEffect()
for _kinds in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.shardable_ordered_effects,  # JAX would refuse several devices; ``_lower`` does, and says what to do
):
    _kinds.add_type(CollectiveEffect)

collective_p = Primitive("hvdgloo")
collective_p.multiple_results = True


def collective(call: Call | HostCall, arrays: Sequence[Any]) -> list[Any]:
    """Make a collective a part of the function that is being transformed or compiled."""
    return list(collective_p.bind(*arrays, call=call))


def on_host(function: Callable[[Sequence[Any]], None], arrays: Sequence[Any]) -> list[Any]:
    """Return what a function of this process makes of arrays: at once, or whenever the function that is traced runs.

    Args:
        function: changes the arrays, numpy's, in place. It may wait for other ranks.
        arrays: on any device.
    """
    if is_traced(arrays):
        return collective(HostCall(function, [_adapter.describe(array) for array in arrays]), arrays)
    wait_for_compiled()
    made = [np.array(array) for array in arrays]
    function(made)
    return [jnp.asarray(array) for array in made]


def is_traced(arrays: Sequence[Any]) -> bool:
    """Return whether JAX is tracing a function: a collective of these arrays then belongs into that function."""
    return any(isinstance(array, core.Tracer) for array in arrays) or not core.trace_state_clean()


def wait_for_compiled() -> None:
    """Wait until the functions that this thread has called have run their collectives.

    Eager calls would otherwise overtake these, and ranks would number their calls differently. A function that has
    failed is forgotten: its results raise the error, but JAX would also raise it, by the function's token,
    from each later function that has a collective.
    """
    tokens = dispatch.runtime_tokens
    if tokens.current_tokens or tokens.output_runtime_tokens:
        with suppress(jax.errors.JaxRuntimeError):
            raise_failures()


def raise_failures() -> None:
    """Wait as ``wait_for_compiled`` does, but raise the error of a function that has failed.

    Raises:
        jax.errors.JaxRuntimeError: the error.
    """
    try:
        dispatch.runtime_tokens.block_until_ready()
    finally:
        dispatch.runtime_tokens.clear()


def _wait_at_most(seconds: float) -> None:
    """Wait for compiled functions whose results are not used, before the job ends."""
    end = time.monotonic() + seconds
    pause = 0.0001
    while not _are_ready() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _are_ready() -> bool:
    tokens = dispatch.runtime_tokens.current_tokens.values()
    return all(token._buf.is_ready() for token in tokens)


process.before_shutdown(_wait_at_most)
# At exit JAX waits for what ``shutdown()`` ends, so that must come first; then errors are forgotten, which JAX would
# print.
atexit.register(wait_for_compiled)
process.shut_down_first_at_exit()


def _uses_callbacks() -> bool:
    with _choosing:  # the cache has no lock, and a second registration of a handler fails
        return _chosen()


_choosing = threading.Lock()


@functools.cache
def _chosen() -> bool:
    problem = ffi.problem()
    if problem:
        _logger.warning(
            "collectives in compiled functions run as callbacks, which takes longer: this version of jaxlib cannot "
            "call them directly (%s)",
            problem,
        )
    else:
        ffi.register(TARGET, execution.execute)
    return bool(problem)


def _abstract(*arrays: Any, call: Call | HostCall) -> tuple[list[Any], set[Any]]:
    return [core.ShapedArray(like.shape, like.dtype) for like in execution.like(call.results)], {_EFFECT}


@functools.lru_cache(maxsize=1024)
def _compiled(call: Call | HostCall) -> Any:
    return jax.jit(lambda *arrays: collective_p.bind(*arrays, call=call))


def _run(*arrays: Any, call: Call | HostCall) -> Any:
    return _compiled(call)(*arrays)


def _lower(ctx: Any, *arrays: Any, call: Call | HostCall) -> Any:
    module = ctx.module_context
    platforms = {*(ctx.platforms or module.platforms)}
    on_cpu = platforms == {"cpu"}
    if not on_cpu and isinstance(call, Call):
        raise InvalidArgumentError(
            f"a function compiled for {', '.join(sorted(platforms))} has a collective; {CPU_ONLY}"
        )
    if jax.process_count() > 1:
        raise InvalidArgumentError(ONE_CONTROLLER)
    mesh = getattr(module.axis_context, "mesh", None)  # of pmap and shard_map
    devices = module.axis_context.num_devices if mesh is None else mesh.size
    if devices > 1:
        raise InvalidArgumentError(
            f"a function compiled for {devices} devices has a collective; {ONE_PROCESS_PER_DEVICE}"
        )
    token = ctx.tokens_in.get(_EFFECT)
    if not on_cpu or _uses_callbacks():
        function = functools.partial(execution.execute_arrays, call)
        results, token, _ = mlir.emit_python_callback(
            ctx, function, token, list(arrays), ctx.avals_in, ctx.avals_out, has_side_effect=True
        )
    else:
        count = len(arrays)
        aliases = {index + 1: index + 1 for index in range(count)} if call.in_place else None  # after the token
        rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True, operand_output_aliases=aliases)
        inner = ctx.replace(
            avals_in=[core.abstract_token, *ctx.avals_in], avals_out=[core.abstract_token, *ctx.avals_out]
        )
        module.add_keepalive(call)
        token, *results = rule(inner, token, *arrays, call=call.text)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_EFFECT: token})))
    return results


collective_p.def_impl(_run)
collective_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(collective_p, _lower)


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, call: Call | HostCall) -> tuple[list[Any], list[Any]]:
    """Let one call do for all elements of an axis what each element of the arrays asks for."""
    whole = call.resized([array.shape for array in arrays])
    return list(collective_p.bind(*arrays, call=whole)), list(axes)


batching.primitive_batchers[collective_p] = _batch
