"""The event loop: woken from another thread or a signal handler, at its deadline, and never by what was closed."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from hvdgloo._net.event_loop import EventLoop, WakeUp
from tests.support.threads import Task


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def test_another_thread_has_it_call_something(loop: EventLoop) -> None:
    called: list[int] = []
    entered = threading.Event()

    def other() -> None:
        assert entered.wait(10)
        loop.call_soon(lambda: called.append(threading.get_ident()))

    thread = Task(other)
    entered.set()
    begun = time.monotonic()
    while not called:
        loop.turn(begun + 60)
    assert time.monotonic() - begun < 30
    assert called == [threading.get_ident()]
    thread.result(10)


def test_a_signal_handler_has_it_call_something(loop: EventLoop) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: loop.call_soon(lambda: called.append(number)))
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        begun = time.monotonic()
        while not called:
            loop.turn(begun + 60)
    finally:
        timer.join(10)
        signal.signal(signal.SIGUSR1, before)
    assert called == [signal.SIGUSR1]
    assert time.monotonic() - begun < 30


def test_a_turn_ends_at_its_deadline(loop: EventLoop) -> None:
    until = time.monotonic() + 0.1
    loop.turn(until)
    assert until <= time.monotonic() + 0.001
    assert time.monotonic() < until + 30
    loop.turn(time.monotonic() - 5)  # one that has passed is no error


def test_calls_are_made_in_order_and_so_are_those_that_they_ask_for(loop: EventLoop) -> None:
    called: list[str] = []

    def first() -> None:
        called.append("first")
        loop.call_soon(lambda: called.append("third"))

    loop.call_soon(first)
    loop.call_soon(lambda: called.append("second"))
    loop.turn(time.monotonic() + 60)
    assert called == ["first", "second", "third"]


def test_what_is_to_come_first_does_and_keeps_its_own_order(loop: EventLoop) -> None:
    called: list[str] = []

    def first() -> None:
        called.append("soon 1")
        loop.call_first(lambda: called.append("first 2"))

    loop.call_soon(first)
    loop.call_soon(lambda: called.append("soon 2"))
    loop.call_first(lambda: called.append("first 0"))
    loop.call_first(lambda: called.append("first 1"))
    loop.turn(0.0)
    assert called == ["first 0", "first 1", "soon 1", "first 2", "soon 2"]


def test_a_writer_is_served_as_long_as_that_is_wanted(loop: EventLoop) -> None:
    reading, writing = os.pipe()

    class Flushed:
        send_fd = writing
        times = 0

        def flush(self) -> None:
            self.times += 1

    writer = Flushed()
    try:
        for wanted, times in ((False, 0), (True, 1), (True, 2), (False, 2), (False, 2), (True, 3), (False, 3)):
            loop.watch_writes(writer, wanted=wanted)
            loop.turn(0)
            assert writer.times == times
    finally:
        os.close(reading)
        os.close(writing)


class TestWakeUp:
    def test_it_is_readable_until_it_is_cleared(self) -> None:
        wake_up = WakeUp()
        with selectors.DefaultSelector() as selector:
            selector.register(wake_up, selectors.EVENT_READ)
            assert not selector.select(0)
            for _ in range(100_000):  # more than a pipe holds
                wake_up.wake()
            assert selector.select(0)
            while selector.select(0):
                wake_up.clear()
            wake_up.clear()  # with nothing there it does no harm
        wake_up.close()

    def test_once_closed_it_writes_into_no_other_descriptor(self) -> None:
        wake_up = WakeUp()
        descriptors = wake_up.descriptors
        wake_up.close()
        pipes = [os.pipe() for _ in descriptors]  # which get the same numbers
        try:
            assert {*descriptors} <= {fd for pipe in pipes for fd in pipe}
            wake_up.wake()
            wake_up.close()
            for reading, _ in pipes:
                os.set_blocking(reading, False)
                with pytest.raises(BlockingIOError):
                    os.read(reading, 1)
            assert wake_up.descriptors == [-1, -1]
        finally:
            for pipe in pipes:
                for descriptor in pipe:
                    os.close(descriptor)
