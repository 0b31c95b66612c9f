"""``python -m hvdgloo.runner.agent``: the process that a transport starts on each host."""

from __future__ import annotations

import os
import sys

from hvdgloo.runner.agent.agent import main

if __name__ == "__main__":
    # Use os._exit, because the forked agent shares this stack frame, and neither process has anything to clean up.
    sys.stderr.flush()
    os._exit(main())
