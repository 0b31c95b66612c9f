"""hvdgloo's errors out of functions that JAX has compiled, which raise JAX's error with our text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import jax

from hvdgloo._platform.error_tokens import recall
from hvdgloo.jax._primitive import raise_failures, wait_for_compiled

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def translated() -> Iterator[None]:
    """Raise hvdgloo's own errors from the compiled functions that are called in a ``with`` block.

    The block ends when their collectives have. Without it, a collective's failure is JAX's ``JaxRuntimeError``, raised
    wherever a result is used.

    Raises:
        HvdglooError: a collective of a function failed; the cause is JAX's error.
    """
    try:
        yield
        raise_failures()
    except Exception as error:
        wait_for_compiled()
        ours = recall(str(error))
        if ours is None:
            raise
        raise ours from error


def errors_of(function: Callable[P, R]) -> Callable[P, R]:
    """Return a compiled function that raises hvdgloo's own errors, as ``translated`` does; it waits for its results."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with translated():
            results = function(*args, **kwargs)
            jax.block_until_ready(results)
        return results

    return call
