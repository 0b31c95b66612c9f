"""hvdgloo: Horovod's API for synchronous data-parallel training, without MPI and without compiling anything.

Import the front-end of your framework, e.g. ``import hvdgloo.torch as hvd``; launch with ``hvdgloo-run``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdgloo.version import __version__

if TYPE_CHECKING:
    from hvdgloo.run import RunModule

    run: RunModule

__all__ = ["__version__"]

_FRONT_END_NAMES = frozenset({
    "init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "DistributedOptimizer",
    "Average", "Sum",
})  # fmt: skip
"""Names that programs look for here first; every front-end has all of them."""


def __getattr__(name: str) -> Any:
    # The launcher is imported where it is used: workers do not need it.
    if name == "run":
        import importlib

        return importlib.import_module("hvdgloo.run")
    text = f"module 'hvdgloo' has no attribute {name!r}"
    if name in _FRONT_END_NAMES:
        text += (
            "; import your framework's front-end instead: import hvdgloo.torch as hvd "
            "(or hvdgloo.tensorflow, .keras, .jax, .mxnet, .numpy)"
        )
    raise AttributeError(text)
