"""Parsers for the values of the launcher's own flags, for argparse and for configuration files."""

from __future__ import annotations

import argparse

from hvdgloo.config import parse_listener
from hvdgloo.runner.job.hostlist import MOST_WORKERS


def positive(text: str) -> int:
    """Parse a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Parse a whole number, at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, not {text!r}")
    return int(text)


def natural(text: str) -> int:
    """Parse a rank."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank")
    return int(text)


def ranks(text: str) -> frozenset[int]:
    """Parse ranks and ranges of ranks: ``0,4-7``."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = (_rank(first), _rank(last if dash else first))
        if low is None or high is None or low > high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 0 or 0,4-7")
        found.update(range(low, high + 1))
    return frozenset(found)


def _rank(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) < MOST_WORKERS else None


def some_seconds(text: str) -> float:
    """Parse a number of seconds greater than 0."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds greater than 0")
    return value


def seconds(text: str) -> float:
    """Parse a number of seconds from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def page_address(text: str) -> tuple[str, int]:
    """Parse the address and the port of a page, each of which may be missing; port 0 stands for any."""
    try:
        return parse_listener(f"127.0.0.1:{text.removeprefix(':')}" if text.removeprefix(":").isdigit() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
