"""XLA's custom calls handled by Python."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hvdgloo.jax import _ffi as ffi
from hvdgloo.jax import _primitive as primitive
from tests.support.threads import Task, at_once


def compiled(name: str, execute: Callable[[ffi.Call], Any], arrays: int = 1) -> Callable[..., Any]:
    """Return a compiled function that makes one call, whose results are like its arguments."""
    ffi.register(name, execute)

    def run(*given: Any) -> Any:
        like = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given]
        return jax.ffi.ffi_call(name, like, has_side_effect=True)(*given, text="text")

    return jax.jit(run)


def copy(call: ffi.Call, nbytes: int, arrays: int = 1) -> None:
    for source, target in zip(call.arguments(arrays), call.results(arrays), strict=True):
        ctypes.memmove(target, source, nbytes)


def test_this_version_of_jaxlib_is_understood() -> None:
    assert ffi.problem() == ""


def test_a_call_gets_memory_and_text() -> None:
    seen: list[bytes] = []

    def execute(call: ffi.Call) -> None:
        seen.append(call.text())
        copy(call, 12, 2)

    first, second = compiled("test_memory", execute)(jnp.arange(3, dtype=np.int32), jnp.ones(3, np.float32))
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [1.0, 1.0, 1.0]
    assert seen == [b"text"]


def test_empty_arrays_have_an_address_that_is_not_read() -> None:
    (result,) = compiled("test_empty", lambda call: copy(call, 0))(jnp.zeros((0, 3)))
    assert result.shape == (0, 3)


def test_what_a_call_raises_is_the_functions_error() -> None:
    def execute(call: ffi.Call) -> None:
        raise KeyboardInterrupt("stop, with ümlauts")

    with pytest.raises(jax.errors.JaxRuntimeError, match="stop, with ümlauts"):
        jax.block_until_ready(compiled("test_raises", execute)(jnp.ones(1)))


@pytest.mark.parametrize("error", [None, "it went wrong"])
def test_a_call_may_end_later_in_another_thread(error: str | None) -> None:
    begun, futures = threading.Event(), []

    def execute(call: ffi.Call) -> ffi.Future:
        copy(call, 8)
        futures.append(call.future())
        begun.set()
        return futures[0]

    function = compiled(f"test_later_{error is None}", execute)
    later = Task(lambda: jax.block_until_ready(function(jnp.full(1, 7.0)))[0].tolist())
    assert begun.wait(20)
    assert later.thread.is_alive()
    futures[0].set(error)
    if error is None:
        assert later.result() == [7.0]
    else:
        failure = later.failure()
        assert isinstance(failure, jax.errors.JaxRuntimeError)
        assert error in str(failure)


def test_a_thousand_futures_leave_nothing_behind() -> None:
    alive: weakref.WeakSet[ffi.Future] = weakref.WeakSet()

    def execute(call: ffi.Call) -> ffi.Future:
        copy(call, 1 << 16)
        future = call.future()
        alive.add(future)
        threading.Thread(target=future.set).start()
        return future

    function = compiled("test_many", execute)
    array = jnp.zeros(1 << 13)

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(200):
        jax.block_until_ready(function(array))
    before = resident()
    for _ in range(1000):
        jax.block_until_ready(function(array))
    gc.collect()
    assert len(alive) <= 2
    assert resident() - before < 30 * 2**20  # of 65 MB that passed


def test_another_layout_is_a_reason_not_to_use_it() -> None:
    def newer(call: ffi.Call) -> ffi.Future:
        raise RuntimeError("its interface has another layout")

    def wrong(call: ffi.Call) -> Any:
        copy(call, 4)

    assert "its interface has another layout" in ffi.problem_of(newer, "test_newer")
    assert ffi.problem_of(wrong, "test_wrong") == "the self-test's result is 38"


def test_without_it_collectives_are_callbacks_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ffi, "problem", lambda: "version 1.0")
    uses = primitive._chosen.__wrapped__
    with caplog.at_level(logging.WARNING, logger="hvdgloo"):
        assert uses()
    assert [record.getMessage() for record in caplog.records] == [
        "collectives in compiled functions run as callbacks, which takes longer: this version of jaxlib cannot "
        "call them directly (version 1.0)"
    ]


def test_two_threads_that_compile_their_first_collective_at_once_register_one_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second_is_here, registered = threading.Event(), []

    class Observed:
        """The lock, which tells when the second thread is about to wait for it."""

        def __init__(self) -> None:
            self._lock, self._count = threading.Lock(), itertools.count()

        def __enter__(self) -> None:
            if next(self._count) == 1:
                second_is_here.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    asked = itertools.count()

    def problem() -> str:
        if next(asked) == 1:
            second_is_here.set()
        assert second_is_here.wait(20)
        return ""

    monkeypatch.setattr(primitive, "_choosing", Observed())
    monkeypatch.setattr(primitive, "_chosen", functools.cache(primitive._chosen.__wrapped__))
    monkeypatch.setattr(ffi, "problem", problem)
    monkeypatch.setattr(ffi, "register", lambda name, execute: registered.append(name))
    found = at_once(*[primitive._uses_callbacks] * 2, timeout=30)
    assert (found, registered) == ([False, False], [primitive.TARGET])
