"""``horovodrun``: ``hvdgloo-run --as-horovod`` under the name that scripts know."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from hvdgloo import as_horovod
from hvdgloo._platform.interrupts import end_at_once

_OURS = (Path(__file__).with_name("horovod.py"), Path(as_horovod.__file__).with_name("horovod") / "__init__.py")


def main() -> int:
    """Run this process's command line; returns the exit status.

    It refuses where ``import horovod`` gives Horovod itself, whose command this one has then replaced.
    """
    end_at_once()
    spec = importlib.util.find_spec("horovod")
    if spec is not None and spec.origin is not None and Path(spec.origin) not in _OURS:
        sys.stderr.write(
            f"horovodrun: Horovod itself is installed ({spec.origin}), and so is hvdgloo-horovod, whose command this "
            "is: run `pip uninstall horovod hvdgloo-horovod`, and install the one that you want. Or leave both, and "
            "use `hvdgloo-run --as-horovod`.\n"
        )
        return 1
    os.environ.setdefault(as_horovod.VARIABLE, "1")
    from hvdgloo.runner.cli.main import main as hvdgloo_run

    return hvdgloo_run()
