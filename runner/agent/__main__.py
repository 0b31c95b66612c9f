"""``python -m hvdgloo.runner.agent``: the process that a transport starts on each host."""

from __future__ import annotations

import os
import sys

from hvdgloo.runner.agent.agent import main

if __name__ == "__main__":
    # Not sys.exit: the forked agent shares this stack frame, and neither has anything to clean up.
    sys.stderr.flush()
    os._exit(main())
