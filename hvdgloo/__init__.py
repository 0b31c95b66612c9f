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


def __getattr__(name: str) -> Any:
    # The launcher is imported where it is used: workers do not need it.
    if name == "run":
        import importlib

        return importlib.import_module("hvdgloo.run")
    raise AttributeError(f"module 'hvdgloo' has no attribute {name!r}")
