"""``python -m hvdgloo.runner`` is ``hvdgloo-run``."""

from __future__ import annotations

from hvdgloo.runner.cli.main import command

if __name__ == "__main__":
    command()
