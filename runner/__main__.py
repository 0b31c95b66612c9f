"""``python -m hvdgloo.runner`` is ``hvdgloo-run``."""

from __future__ import annotations

from hvdgloo._commands import run

if __name__ == "__main__":
    run()
