"""The observations that an agent collects from its workers and its host, and the times at which it passes them on."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hvdgloo._observe.samples import CODEC, LIMIT, ORDERS, HostSample, TraceOrder
from hvdgloo.runner.agent import observing
from hvdgloo.runner.agent.observing import OBSERVER_VARIABLE, Observing
from hvdgloo.runner.protocol.frames import Frame, Observe, Observed, Traced, TraceSteps, Tracing

AGENT_ID = "0123456789abcdef" * 2 + ".3"


class Stream:
    """The agent's channel to a launcher that reads at once, unless told otherwise."""

    def __init__(self) -> None:
        self.pending = 0
        self.lost = False
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def of(self, kind: type[Frame]) -> list[Any]:
        return [frame for frame in self.sent if type(frame) is kind]


class Clock:
    """``time.monotonic`` of the module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(observing, "time", clock)
    return clock


class Host:
    """The agent's part under test, with what it works with."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stream = Stream()
        self.selector = selectors.DefaultSelector()
        self.observing = Observing(self.selector, cast(Any, self.stream))
        self.address = self.observing.attend(AGENT_ID, os.environ)[OBSERVER_VARIABLE]
        self.folder = Path(self.address).parent

    def order(self, frame: Frame) -> None:
        self.observing.handlers[type(frame)](frame)

    def report(self, data: bytes) -> None:
        """As a worker does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
            worker.sendto(data, self.address)

    def turn(self, seconds: float = 0.0) -> None:
        """A turn of the agent's loop, after this time."""
        self.clock.now += seconds
        for key, _ in self.selector.select(0):
            key.data()
        self.observing.tick()

    @property
    def observed(self) -> list[bytes]:
        return [data for frame in self.stream.of(Observed) for data in frame.observations]


@pytest.fixture
def host(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own names are too long for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        host = Host(clock)
        yield host
        host.observing.close()
        host.selector.close()


def ask_a_worker_for_a_trace(host: Host) -> None:
    """Number 1, of one step. The worker has been asked, and has not written it yet."""
    host.order(Observe(host=False))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.bind(str(host.folder / "4711"))
        host.order(TraceSteps(1, 1))


def test_nothing_is_there_before_the_job_is_observed(host: Host) -> None:
    with pytest.raises(FileNotFoundError):
        host.report(b"one")
    assert not host.folder.exists()
    assert host.observing.deadline is None
    host.turn(100.0)
    assert host.stream.sent == []


def test_what_workers_report_goes_out_once_a_second(host: Host) -> None:
    host.order(Observe(host=False))
    assert stat.S_IMODE(host.folder.stat().st_mode) == 0o700
    host.report(b"one")
    host.report(b"two")
    host.turn()
    assert host.observed == [b"one", b"two"], "the first goes at once"
    assert len(host.stream.sent) == 1
    host.report(b"three")
    host.turn(0.5)
    assert len(host.stream.sent) == 1
    assert host.observing.deadline == host.clock.now + 0.5
    host.report(b"four")
    host.turn(0.5)
    assert host.stream.sent[1:] == [Observed([b"three", b"four"])]
    host.turn(1.0)
    host.turn(1.0)
    assert len(host.stream.sent) == 2, "no rank had anything to say"
    assert host.observing.deadline is None


def test_what_is_too_long_is_not_passed_on(host: Host) -> None:
    host.order(Observe(host=False))
    host.report(bytes(LIMIT))
    host.report(bytes(LIMIT + 1))
    host.turn()
    assert [len(data) for data in host.observed] == [LIMIT]


def test_what_is_empty_is_not_passed_on_and_tiny_ones_are_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "_MOST", 10_000)
    host.order(Observe(host=False))
    host.stream.pending = 2 * 1024 * 1024
    for _ in range(5):
        for _ in range(100):
            host.report(b"")
            host.report(b"x")
            host.turn()
    host.stream.pending = 0
    host.turn(1.0)
    assert set(host.observed) == {b"x"}
    assert 50 < len(host.observed) < 200


def test_a_slow_stream_costs_bounded_memory(host: Host) -> None:
    host.order(Observe(host=False))
    host.stream.pending = 2 * 1024 * 1024
    for number in range(80):
        host.report(bytes([number]) * 100_000)
        host.turn(1.0)
    assert host.stream.sent == []
    host.stream.pending = 0
    host.turn(1.0)
    assert sum(map(len, host.observed)) <= 4 * 1024 * 1024
    assert host.observed[0][0] == 0


def test_the_host_is_measured_while_workers_are_at_work(host: Host) -> None:
    host.order(Observe(host=True))
    host.turn(1.0)
    (sample,) = map(CODEC.decode, host.observed)
    assert isinstance(sample, HostSample)
    assert sample.cores == os.cpu_count()
    assert 0 < sample.memory < sample.memory_total
    host.turn(5.0)
    assert len(host.observed) == 1, "no rank has done anything meanwhile"
    host.report(b"a worker's")
    host.turn()
    host.turn(1.0)
    assert len(host.observed) == 3
    host.turn(10.0)
    assert len(host.observed) == 4, "a sign of life"


def test_who_looks_for_the_progress_only_has_no_host_measured(host: Host) -> None:
    host.order(Observe(host=False))
    host.turn(20.0)
    assert host.observed == []
    host.order(Observe(host=True))
    host.turn(1.0)
    assert len(host.observed) == 1


def test_workers_are_asked_for_traces_which_are_passed_on(host: Host) -> None:
    host.order(Observe(host=False))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.bind(str(host.folder / "4711"))
        (host.folder / "4712").touch()  # its process has ended
        host.order(TraceSteps(7, 10))
        worker.settimeout(20)
        assert ORDERS.decode(worker.recv(4096)) == TraceOrder(7, 10, str(host.folder))
    assert host.stream.sent == [Tracing(7, 1)]
    (host.folder / "trace.7.2.json.part").write_bytes(b"not complete")
    host.turn(1.0)
    assert len(host.stream.sent) == 1
    trace = os.urandom(1_000_000)
    (host.folder / "trace.7.2.json.part").write_bytes(trace)
    os.rename(host.folder / "trace.7.2.json.part", host.folder / "trace.7.2.json")
    assert host.observing.deadline is not None
    host.turn(1.0)
    pieces = host.stream.of(Traced)
    assert b"".join(piece.data for piece in pieces) == trace
    assert {(piece.number, piece.rank) for piece in pieces} == {(7, 2)}
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert not (host.folder / "trace.7.2.json").exists()


def test_a_trace_does_not_fill_the_stream(host: Host) -> None:
    ask_a_worker_for_a_trace(host)
    (host.folder / "trace.1.0.json").write_bytes(bytes(100))
    host.stream.pending = 2 * 1024 * 1024
    host.turn(1.0)
    assert host.stream.of(Traced) == []
    host.stream.pending = 0
    host.turn(1.0)
    assert host.stream.of(Traced)[-1].last


def test_waiting_for_traces_or_for_the_launcher_takes_no_time_of_the_processor(host: Host) -> None:
    ask_a_worker_for_a_trace(host)
    for _ in range(3):
        host.turn(1.0)
        assert host.observing.deadline == host.clock.now + 1.0, "workers say nothing, and trace"
    host.report(b"one")
    host.turn()
    (host.folder / "trace.1.0.json").write_bytes(bytes(100))
    host.stream.pending = 2 * 1024 * 1024
    host.report(b"two")
    host.turn(1.0)
    assert host.observing.deadline is None, "the loop turns when there is room again"
    host.stream.pending = 0
    host.turn()
    assert host.observed == [b"one", b"two"]
    assert host.stream.of(Traced)[-1].last


def test_a_folder_that_the_system_has_removed_is_no_harm(host: Host) -> None:
    ask_a_worker_for_a_trace(host)
    shutil.rmtree(host.folder)
    host.turn(1.0)
    host.order(TraceSteps(2, 1))
    assert host.stream.sent == [Tracing(1, 1), Tracing(2, 0)]


def test_without_workers_to_ask_the_answer_says_so(host: Host) -> None:
    host.order(TraceSteps(1, 10))
    host.order(Observe(host=False))
    host.order(TraceSteps(2, 10))
    assert host.stream.sent == [Tracing(1, 0), Tracing(2, 0)]


def test_at_the_end_the_last_words_are_passed_on_and_nothing_is_left(host: Host) -> None:
    host.order(Observe(host=False))
    host.report(b"one")
    host.turn()
    host.report(b"the last")
    host.observing.close()
    assert host.observed == [b"one", b"the last"]
    assert not host.folder.exists()
    assert not host.selector.get_map()


def test_without_a_private_folder_workers_are_told_of_no_observer(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    monkeypatch.setattr("hvdgloo._platform.runtime.SHORT", str(tmp_path / "missing"))
    host = Host(clock)
    assert host.address == ""
    host.order(Observe(host=True))
    host.turn(1.0)
    assert host.stream.sent == []
    host.selector.close()
