"""Where ``hvdgloo-run`` and ``hvdgloo-rendezvous`` begin: before anything that takes long to import."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

from hvdgloo._platform.interrupts import end_at_once


def run() -> NoReturn:
    """``hvdgloo-run``."""
    end_at_once()
    _print_any_text()
    from hvdgloo.runner.cli.main import command

    command()


def rendezvous() -> int:
    """``hvdgloo-rendezvous``; returns the exit status."""
    end_at_once()
    _print_any_text()
    from hvdgloo.rendezvous._cli import main

    return main()


def _print_any_text() -> None:
    """Have standard output spell out what its encoding lacks, as standard error does: a path may hold any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
