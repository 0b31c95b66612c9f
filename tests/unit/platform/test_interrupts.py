"""Sections that Ctrl-C does not interrupt: they are finished before it raises."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hvdgloo._platform import interrupts
from tests.support.threads import Task


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end() -> None:
    held = interrupts.hold()
    inner = interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    interrupts.release(inner)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release(held)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_one_does_not_wait() -> None:
    held = interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release(held)


def test_the_program_s_own_handler_is_called() -> None:
    came = []
    signal.signal(signal.SIGINT, lambda signum, frame: came.append(signum))
    held = interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    assert not came
    interrupts.release(held)
    assert came == [signal.SIGINT]


def test_who_ignores_it_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert interrupts.hold() is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_signal_s_handler_that_raises_meanwhile_leaves_ctrl_c_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = interrupts.hold()
    answers, plain = iter([TimeoutError(), None]), interrupts._signal.signal

    def set_handler(signum: int, handler: object) -> None:  # which lets other handlers run first
        answer = next(answers)
        if answer is not None:
            raise answer
        plain(signum, handler)

    monkeypatch.setattr(interrupts._signal, "signal", set_handler)
    with pytest.raises(TimeoutError):
        interrupts.release(held)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_nothing_to_hold() -> None:
    assert Task(interrupts.hold).result() is None


def test_a_forked_child_is_interrupted_as_ever() -> None:
    held = interrupts.hold()
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
    assert os.waitpid(child, 0)[1] == 0
    interrupts.release(held)
