"""Entry points of ``hvdgloo-run`` and ``hvdgloo-rendezvous``, which run before anything slow is imported."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

from hvdgloo._platform.interrupts import end_at_once


def run() -> NoReturn:
    """Run ``hvdgloo-run``."""
    end_at_once()
    _print_any_text()
    from hvdgloo.runner.cli.main import command

    command()


def rendezvous() -> int:
    """Run ``hvdgloo-rendezvous`` and return its exit status."""
    end_at_once()
    _print_any_text()
    from hvdgloo.rendezvous._cli import main

    return main()


def _print_any_text() -> None:
    """Have standard output escape characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold any bytes
