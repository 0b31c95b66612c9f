"""Where ``hvdgloo-run`` and ``hvdgloo-rendezvous`` begin: before anything that takes long to import."""

from __future__ import annotations

from typing import NoReturn

from hvdgloo._platform.interrupts import end_at_once


def run() -> NoReturn:
    """``hvdgloo-run``."""
    end_at_once()
    from hvdgloo.runner.cli.main import command

    command()


def rendezvous() -> int:
    """``hvdgloo-rendezvous``; returns the exit status."""
    end_at_once()
    from hvdgloo.rendezvous._cli import main

    return main()
