"""The number of TensorFlow's threads that wait for collectives. If all do, a stall report says so.

A ``tf.function`` waits in the thread that TensorFlow computes it with. Functions that several Python threads call share
these threads, so on different ranks they may all wait for different collectives.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdgloo._platform import stall_causes

_lock = threading.Lock()
_waiting = 0


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that may wait for other ranks in one of TensorFlow's threads, to count it meanwhile."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        global _waiting
        with _lock:
            _waiting += 1
        try:
            return function(*args)
        finally:
            with _lock:
                _waiting -= 1

    return call


def all_wait() -> str | None:
    """Return a stall report's sentence if no thread is left; None if one is."""
    threads = inter_op_threads() if _waiting else 0
    if not threads or _waiting < threads:
        return None
    every = "only inter-op thread waits" if threads == 1 else f"{threads} inter-op threads all wait"
    return (
        f"TensorFlow's {every} for collectives. If other Python threads call functions with collectives, theirs cannot "
        "begin: call tf.config.threading.set_inter_op_parallelism_threads(n) at the start of the program, with n at "
        "least the number of such threads."
    )


def inter_op_threads() -> int:
    """Return the number of threads in which TensorFlow computes functions."""
    chosen: int = tf.config.threading.get_inter_op_parallelism_threads()
    if chosen > 0:
        return chosen
    # What TensorFlow does on its own.
    named = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


stall_causes.register(all_wait)
