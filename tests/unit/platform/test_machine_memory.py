"""The kernel's part in the end of a process by SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdgloo._platform import machine
from hvdgloo._platform.machine import MemoryWatch
from hvdgloo.runner.job.advice import advise_on_signal

KILL = "6,339,5140900,-;Memory cgroup out of memory: Killed process {} (python3) total-vm:8123456kB, anon-rss:1kB\n"
ANOTHER = "the kernel ended a process for lack of memory at that time, most likely this one"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """Counters, by name of file; absent at first."""
    counters: dict[str, int | None] = {}
    monkeypatch.setattr(machine, "_counter", lambda path, name: counters.get(path.rpartition("/")[2]))
    return counters


def test_the_log_names_it(tmp_path: Path, counts: dict[str, int | None]) -> None:
    log = tmp_path / "kmsg"
    log.write_text(KILL.format(12))
    watch = MemoryWatch(str(log))
    counts["vmstat"] = 0
    assert watch.account(12) == "", "that was before"
    with log.open("a") as file:
        file.write("6,340,5140901,-;eth0: link up\n" + KILL.format(4711))
    assert watch.account(4711) == "the kernel ended it for lack of memory"
    with log.open("a") as file:
        file.write(KILL.format(7))
    assert watch.account(4711) == ANOTHER, "in a container it has another number there"
    assert watch.account(4711) == "", "each is told once"
    watch.close()


@pytest.mark.parametrize("file", ["vmstat", "memory.events"])
def test_a_counter_grows(file: str, tmp_path: Path, counts: dict[str, int | None]) -> None:
    counts[file] = 3
    watch = MemoryWatch(str(tmp_path / "none"))
    assert watch.account(1) == ""
    counts[file] = 4
    assert watch.account(1) == ANOTHER
    assert watch.account(1) == ""


def test_where_nothing_can_be_read_it_was_most_likely_memory(tmp_path: Path, counts: dict[str, int | None]) -> None:
    text = MemoryWatch(str(tmp_path / "none")).account(1)
    assert text.startswith("most likely by the kernel for lack of memory, ")


def test_what_to_do() -> None:
    for text in ("the kernel ended it for lack of memory", ANOTHER):
        assert "run fewer workers on that host" in advise_on_signal(f"was killed by signal 9 (SIGKILL); {text}")
    assert advise_on_signal("was killed by signal 9 (SIGKILL)") == ""
    assert advise_on_signal("exited with status 1") == ""
    negative = "the kernel reports no lack of memory, so a user or another program did it"
    assert advise_on_signal(f"the agent on host h1 was killed by signal 9 (SIGKILL): {negative}") == ""
