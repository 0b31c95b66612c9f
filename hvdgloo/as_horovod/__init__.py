"""A directory for PYTHONPATH in which ``horovod`` is hvdgloo: ``hvdgloo-run --as-horovod``.

The agents put it there, each of which knows where hvdgloo is on its host. DataLoader workers and interpreters that the
program starts inherit it like any variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "HVDGLOO_AS_HOROVOD"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the additions to a worker's environment if it asks for them by ``HVDGLOO_AS_HOROVOD``; otherwise none."""
    if environ.get(VARIABLE, "").strip().lower() not in ("1", "true", "yes", "on"):
        return {}
    path = [os.path.dirname(os.path.abspath(__file__)), environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part)}
