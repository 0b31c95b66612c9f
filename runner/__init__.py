"""The launcher: starts the workers of a job, watches over them, and leaves nothing behind.

``hvdgloo-run`` (``cli``) and ``hvdgloo.run.run`` both describe a job as a ``LaunchSpec`` and give it to
``launch.launch``. On each host one agent (``agent``) starts the workers; launcher and agents exchange frames
(``protocol``) over the agent's standard input and output, and nothing else.
"""

from __future__ import annotations

__all__: list[str] = []
