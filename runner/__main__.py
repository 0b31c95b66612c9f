"""``python -m hvdgloo.runner`` is ``hvdgloo-run``."""

from __future__ import annotations

import sys

from hvdgloo.runner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
