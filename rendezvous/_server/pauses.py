"""Requests that wait for other clients, as generators whose caller decides how to wait.

A thread of the pool waits itself. The front's thread, which must never wait, puts the generator aside and resumes it
when its pause is over. So the long polls of a thousand workers need neither a thousand threads nor a hand-over between
threads for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from hvdgloo.rendezvous._store import Latch

T = TypeVar("T")

HangUpWatch = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Makes a context to be entered during a wait on this thread; its argument is called if the client hangs up."""


@dataclass(frozen=True, eq=False)
class Pause:
    """A request's wait for an event; the generator is then sent whether the event happened.

    Attributes:
        latch: released by the event.
        seconds: longest time to wait.
        hang_up: to be called if the client disconnects meanwhile; it releases the latch.
    """

    latch: Latch
    seconds: float
    hang_up: Callable[[], None]


Steps = Generator[Pause, bool, T]
"""A request that is being answered: yields each Pause, is sent whether its latch was released, and returns a T."""


def waited(steps: Steps[T], watch: HangUpWatch) -> T:
    """Run a request with all its pauses on this thread, and return its result.

    Args:
        steps: the request; its exceptions are passed on.
        watch: watches the client during the pauses.
    """
    try:
        pause = next(steps)
        while True:
            with watch(pause.hang_up):
                released = pause.latch.wait(pause.seconds)
            pause = steps.send(released)
    except StopIteration as end:
        answer: T = end.value
        return answer
