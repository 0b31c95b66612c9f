"""Functions that tests have workers call. Workers import this module, so it imports nothing slow."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

import hvdgloo.numpy as hvd

FOREVER = 600.0


class Counter:
    """Keeps a number, and knows where it is."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        hvd.init()
        self.value = start + hvd.rank()
        self.step = step

    def count(self) -> int:
        self.value += self.step
        return self.value


class Broken:
    """Cannot be made on rank 1."""

    def __init__(self) -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("this cannot be made")


def places() -> tuple[int, ...]:
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def total(value: float) -> Any:
    hvd.init()
    return hvd.allreduce(np.full(3, value * (hvd.rank() + 1)), op=hvd.Sum)


def shares_memory() -> bool:
    """Tell whether ranks of this host share a memory segment."""
    total(1.0)
    with open("/proc/self/maps") as maps:
        return "hvdgloo" in maps.read()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def greet(word: str) -> None:
    hvd.init()
    _say(f"{word} from {hvd.rank()}")


def surroundings() -> dict[str, str]:
    return {**os.environ, "cwd": os.getcwd(), "pid": str(os.getpid())}


def fail(rank: int | None = None) -> int:
    hvd.init()
    if rank in (None, hvd.rank()):
        raise KeyError("no such thing")
    return hvd.rank()


def fail_while_others_wait() -> None:
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("no such thing")
    total(1.0)


def leave() -> None:
    hvd.init()
    if hvd.rank() == 1:
        raise SystemExit(3)


def hang(started: str) -> None:
    """Never return; make a file once all ranks are here."""
    total(1.0)
    _say("hanging")
    with open(f"{started}.{hvd.rank()}", "w"):
        pass
    time.sleep(FOREVER)


def wait_for_file(started: str, enough: str) -> int:
    """Make a file once all ranks are here, and return the rank once the other file was made elsewhere."""
    total(1.0)
    with open(f"{started}.{hvd.rank()}", "w"):
        pass
    while not os.path.exists(enough):
        time.sleep(0.01)
    return hvd.rank()


def kill(rank: int) -> None:
    total(1.0)
    if hvd.rank() == rank:
        _say("about to end")
        os.kill(os.getpid(), signal.SIGKILL)
    total(1.0)


def outlive() -> tuple[int, list[int]]:
    """Train until those who were the first two are no longer the ones who train.

    Returns:
        this process's id, and the first two's.
    """
    hvd.init()
    folder = os.environ["FOLDER"]

    @hvd.elastic.run
    def train(state: Any) -> list[int]:
        while True:
            here = hvd.allgather_object(os.getpid())
            if not state.first:
                state.first = here if len(here) == 2 else []
            elif here == state.first:
                with open(f"{folder}/two", "w"):  # both have committed it
                    pass
            else:
                return list(state.first)
            state.commit()
            time.sleep(0.05)  # a step

    return os.getpid(), train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, first=[]))


def grow() -> int:
    """Train until there are two workers; ask for the second one after the first step."""
    hvd.init()
    folder = os.environ["FOLDER"]

    @hvd.elastic.run
    def train(state: Any) -> int:
        while hvd.size() < 2:
            state.step += 1
            with open(f"{folder}/more", "w"):
                pass
            time.sleep(0.05)  # a step
            state.commit()
        return hvd.size()

    result: int = train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
    return result
