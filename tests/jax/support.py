"""Ranks as threads that use JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdgloo._job.context import Context
from hvdgloo.jax._adapter import JaxAdapter
from hvdgloo.jax._frontend import JaxFrontend
from tests.support.world import World


def frontend_of(context: Context) -> JaxFrontend:
    """Return a rank's Frontend."""
    return JaxFrontend(JaxAdapter(), lambda: context)


def on_ranks(body: Callable[[JaxFrontend], Any], size: int = 2, backend: str = "inline", **settings: Any) -> list[Any]:
    """Call a function with each rank's Frontend, and return the results in rank order."""
    with World(size, backend, **settings) as world:
        return world.run(lambda context: body(frontend_of(context)))


def caching_in(folder: Path) -> dict[str, str]:
    """Return the variables with which programs share their compiled functions, however small these are."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
