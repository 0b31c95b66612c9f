"""The launcher's treatment of signals while it runs, and afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hvdgloo.runner.signals import COMMAND_LINE_SIGNALS, LIBRARY_SIGNALS, passed_on


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in COMMAND_LINE_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def handlers() -> list[object]:
    return [signal.getsignal(signum) for signum in COMMAND_LINE_SIGNALS]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_comes_when_all_is_cleaned_up_changes_nothing(signum: signal.Signals) -> None:
    """The exit status is the first one's: the second must not kill what only has a summary left to print."""
    seen: list[int] = []
    with passed_on(COMMAND_LINE_SIGNALS, seen.append) as came:
        signal.raise_signal(signum)
        assert not came()
        signal.raise_signal(signum)
        assert came()
    assert seen == [signum, signum]
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)


def test_afterwards_all_is_as_before() -> None:
    before = handlers()
    with passed_on(COMMAND_LINE_SIGNALS, lambda _: None):
        signal.raise_signal(signal.SIGUSR1)
    assert handlers() == before
    with passed_on(LIBRARY_SIGNALS, lambda _: None):
        signal.raise_signal(signal.SIGINT)
    assert handlers() == before


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with passed_on(COMMAND_LINE_SIGNALS, lambda _: pytest.fail("it was ignored")):
        signal.raise_signal(signal.SIGHUP)
