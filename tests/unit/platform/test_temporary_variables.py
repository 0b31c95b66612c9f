"""Environment variables for a moment: C code sees them, whatever else reads the environment stays whole."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from hvdgloo._platform.temporary_variables import TemporaryVariables
from tests.support.environment import LIBC, entries, seen_by_c
from tests.support.launching import run_command


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables that a test may set: one that the user has set, and one that is not set."""
    monkeypatch.setenv("HVDGLOO_T_OF_THE_USER", "a user's own, which is longer")
    return {"HVDGLOO_T_OF_THE_USER": "0", "HVDGLOO_T_UNKNOWN": "0"}


def test_c_code_sees_them_within_and_what_the_user_has_set_afterwards(values: dict[str, str]) -> None:
    variables = TemporaryVariables(values)
    variables.make_room()
    before = dict(os.environ)
    for _ in range(3):
        with variables.set():
            assert {name: seen_by_c(name) for name in values} == values
            assert dict(os.environ) == before
        assert seen_by_c("HVDGLOO_T_OF_THE_USER") == before["HVDGLOO_T_OF_THE_USER"]
        assert seen_by_c("HVDGLOO_T_UNKNOWN") is None
    assert dict(os.environ) == before


def test_no_entry_is_added_moved_or_removed(values: dict[str, str]) -> None:
    variables = TemporaryVariables(values)
    variables.make_room()
    variables.make_room()
    before = entries()
    with variables.set():
        within = entries()
    assert len(before) == len(within)
    assert sum(one != other for one, other in zip(before, within, strict=True)) == 1  # what the user has set


@pytest.mark.parametrize("has_room", [False, True])
def test_they_are_seen_though_there_was_never_room_or_it_was_taken(values: dict[str, str], has_room: bool) -> None:
    variables = TemporaryVariables(values)
    if has_room:
        variables.make_room()
        LIBC.unsetenv(b"hVDGLOO_T_UNKNOWN")
    with variables.set():
        assert {name: seen_by_c(name) for name in values} == values
    assert seen_by_c("HVDGLOO_T_UNKNOWN") is None


def test_what_the_program_sets_meanwhile_stays(values: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    variables = TemporaryVariables(values)
    variables.make_room()
    with variables.set():
        for name in values:
            monkeypatch.setenv(name, "later")
    assert {name: seen_by_c(name) for name in values} == dict.fromkeys(values, "later")
    with variables.set():
        assert {name: seen_by_c(name) for name in values} == values
    assert {name: seen_by_c(name) for name in values} == dict.fromkeys(values, "later")


def test_one_thread_at_a_time_sets_them(values: dict[str, str]) -> None:
    """Else the second would restore what the first has set."""
    variables = TemporaryVariables(values)
    inside, leave, second = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with variables.set():
            inside.set()
            assert leave.wait(10)

    def other() -> None:
        with variables.set():
            second.set()

    threads = [threading.Thread(target=each) for each in (first, other)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert not second.wait(0.05)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert second.is_set()
    assert seen_by_c("HVDGLOO_T_UNKNOWN") is None


READING = """
import ctypes, threading, time
from hvdgloo._platform.temporary_variables import TemporaryVariables
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
variables = TemporaryVariables({f"HVDGLOO_T_{number}": "0" for number in range(9)})
variables.make_room()
over = threading.Event()
def read():
    while not over.is_set():
        assert libc.getenv(b"FILLS_NOTHING") is None
readers = [threading.Thread(target=read) for _ in range(3)]
for reader in readers:
    reader.start()
until = time.monotonic() + 1.0
while time.monotonic() < until:
    with variables.set():
        assert libc.getenv(b"HVDGLOO_T_8") == b"0"
over.set()
for reader in readers:
    reader.join()
print("done")
"""


def test_other_threads_may_read_the_environment_meanwhile() -> None:
    large = {f"FILLS_{number}": "" for number in range(20000)}  # getenv reads for long, and its array is easily moved
    done = run_command([sys.executable, "-c", READING], env={**os.environ, **large}, timeout=50)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
