"""The launcher: starts the workers of a job, watches over them, and leaves nothing behind.

``hvdgloo-run`` (``cli``) and ``hvdgloo.run.run`` both describe a job as a ``LaunchSpec`` and give it to
``launch.launch``. On each host one agent (``agent``) starts the workers; launcher and agents exchange frames
(``protocol``) over the agent's standard input and output, and nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    # ``from horovod.runner import run``: Horovod's programs have it from here. The launcher's own modules do not use
    # it, so it is imported on request.
    if name == "run":
        return importlib.import_module("hvdgloo.run")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
