"""A rank reports what it counts to its observers: at most once per interval, and nothing when nothing changes."""

from __future__ import annotations

import itertools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdgloo._job.reporting import Reporting
from hvdgloo._net.event_loop import WakeUp
from hvdgloo._observe import reporter as reporter_module
from hvdgloo._observe import samples
from hvdgloo._observe.counters import Counters
from hvdgloo._observe.outlets import AgentOutlet, ServerOutlet
from hvdgloo._observe.reporter import RankInEpoch, Reporter, Sampler
from hvdgloo._observe.tracing import LONGEST_SECONDS, PATIENCE, STEPLESS_SECONDS, StepTracer
from hvdgloo.errors import ConfigError, RendezvousError
from tests.support.threads import Task

DEADLINE = 30.0


class Rank:
    """The rank's interface that a Reporter needs."""

    def __init__(self, rank: int = 0) -> None:
        self.place = RankInEpoch(rank, 2, 0)
        self.pending = "", 0.0
        self.overdue: tuple[Sequence[samples.Missing], Sequence[tuple[int, str]]] = (), ()
        self.traced: list[str] = []
        self.cycle_time = 0.0

    def planes(self) -> Sequence[samples.Plane]:
        return [samples.Plane("gloo", 0, "cpu", "hosts h1 and h2")]

    def gpu(self) -> int:
        return -1

    def settings(self) -> dict[str, Any] | None:
        return {"params.cycle_time_ms": self.cycle_time}

    def oldest_pending(self) -> tuple[str, float]:
        return self.pending

    def missing(self, least: float) -> tuple[Sequence[samples.Missing], Sequence[tuple[int, str]]]:
        return self.overdue

    def start_trace(self, path: str) -> bool:
        self.traced.append(path)
        Path(path).write_text("[]")
        return True

    def stop_trace(self) -> None:
        self.traced.append("stopped")


class Agent:
    """The observer: the other end of the socket."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "agent")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(DEADLINE)

    def receive(self) -> samples.Observation:
        return samples.CODEC.decode(self.socket.recv(samples.LIMIT))

    def until(self, holds: Callable[[samples.Sample], bool]) -> samples.Sample:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            said = self.receive()
            if isinstance(said, samples.Sample) and holds(said):
                return said
        raise AssertionError("no such sample came")

    def close(self) -> None:
        self.socket.close()
        os.unlink(self.path)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    if agent.socket.fileno() >= 0:
        agent.close()


@pytest.fixture
def begun() -> Iterator[Callable[..., Reporter]]:
    begun: list[Reporting] = []

    def begin(counters: Counters, path: str, rank: Rank | None = None, interval: float = 0.02) -> Reporter:
        made: queue.SimpleQueue[Reporter] = queue.SimpleQueue()

        def make(wake_up: WakeUp) -> Reporter:
            reporter = Reporter(counters, rank or Rank(), AgentOutlet(path), interval, wake_up)
            made.put(reporter)
            return reporter

        begun.append(Reporting(make, 0.0, lambda: True))
        return made.get(timeout=30)

    yield begin
    for reporting in begun:
        reporting.close()


def work(counters: Counters, operations: int = 1) -> None:
    counters.latest = time.monotonic()
    counters.carried("gloo", 0).ended(0.0, operations, 100 * operations)
    if counters.asleep:
        counters.wake()


def test_what_is_counted_is_handed_on(agent: Agent, begun: Callable[..., Reporter]) -> None:
    counters, rank = Counters(), Rank(0)
    counters.engine_begins(coordinates=True)
    assert counters.lateness is not None
    counters.step()
    counters.lateness.came_last(1, 0.25)
    counters.step()
    work(counters, 3)
    rank.overdue = [samples.Missing("x", 2.0, [1], 1)], [(1, "in f")]
    begun(counters, agent.path, rank)
    sample = agent.until(lambda sample: sample.operations == 3)
    assert (sample.rank, sample.size, sample.pid, sample.bytes) == (0, 2, os.getpid(), 300)
    assert sample.steps.count == 2
    assert sample.flows == [samples.Flow("gloo", 0, 3, 300, 0.0)]
    assert sample.lateness is not None
    assert sample.lateness.ranks == [samples.Late(1, 1, 0.25, 1, 0.25)]
    assert sample.missing == rank.overdue[0]
    assert sample.stacks == rank.overdue[1]
    assert sample.planes == rank.planes()
    assert sample.settings == rank.settings()
    assert sample.cpu_seconds > 0
    assert sample.memory > 1 << 20
    assert abs(sample.at - time.time()) < DEADLINE


def test_what_the_program_logs_is_reported_by_rank_0_alone() -> None:
    counters = Counters()
    counters.log({"loss": 2.0}, step=3, steps=10)
    counters.log({"loss": 1.0, "accuracy": 0.5})
    counters.count_save("commit")
    counters.count_save("commit")
    sample = Sampler(counters, Rank(0)).sample(1.0, settings=False)
    assert [*sample.logged] == [("loss", 1.0), ("accuracy", 0.5)]
    assert sample.progress == samples.Progress(step=3, steps=10)
    decoded = samples.CODEC.decode(samples.CODEC.encode(sample))
    assert isinstance(decoded, samples.Sample)
    assert (decoded.logged, decoded.progress, decoded.saves) == (sample.logged, sample.progress, sample.saves)
    assert [(saves.kind, saves.count) for saves in sample.saves] == [("commit", 2)]
    assert abs(sample.saves[0].ended - time.time()) < DEADLINE
    other = Sampler(counters, Rank(1)).sample(1.0, settings=False)
    assert (other.logged, other.progress, other.saves) == ((), None, ())


def test_a_number_that_is_logged_while_nothing_else_happens_is_reported(
    agent: Agent, begun: Callable[..., Reporter]
) -> None:
    counters = Counters()
    begun(counters, agent.path)
    assert isinstance(agent.receive(), samples.Sample)
    counters.log({"loss": 1.0})
    while not (sample := agent.receive()).logged:  # type: ignore[union-attr]
        assert isinstance(sample, samples.Sample)
    assert [*sample.logged] == [("loss", 1.0)]  # type: ignore[union-attr]


def test_what_is_logged_first_is_reported_more_closely_than_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, clock = Counters(), [1000.0]
    monkeypatch.setattr("hvdgloo._observe.counters.time.time", lambda: clock[0])
    sampler = Sampler(counters, Rank(0))

    def log(now: float, value: float) -> None:
        clock[0] = now
        counters.log({"loss": value})

    for n in range(31):  # each 40 ms
        log(1000.0 + 0.04 * n, float(n))
        assert counters.early[-1] == (clock[0], {"loss": float(n)}), "the job may end here"
    early = sampler.sample(1.0, settings=False).early
    assert early is not None
    assert early.at[0] == 1000.0
    assert early.at[-1] == clock[0], "the last one is the latest"
    assert early.values[-1] == {"loss": 30.0}
    steps = [later - before for before, later in itertools.pairwise(early.at)]
    assert all(0.03 < step < 0.13 for step in steps), steps
    assert Sampler(counters, Rank(1)).sample(1.0, settings=False).early is None
    for n in range(1000):
        log(1010.0 + n, 0.5)
    assert counters.early_is_complete
    complete = sampler.sample(2.0, settings=True).early
    assert complete is not None
    assert len(complete.at) == 64
    assert sampler.sample(3.0, settings=False).early is None, "it changes no more"
    assert sampler.sample(4.0, settings=False, last=True).early == complete


def test_many_names_are_reported_closely_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, clock = Counters(), [1000.0]
    monkeypatch.setattr("hvdgloo._observe.counters.time.time", lambda: clock[0])
    for n in range(100):
        clock[0] += 1.0
        counters.log({f"class {name}": float(n) for name in range(64)})
    early = Sampler(counters, Rank(0)).sample(1.0, settings=True).early
    assert early is not None
    assert len(early.at) == 9
    assert len(samples.CODEC.encode(Sampler(counters, Rank(0)).sample(1.0, settings=True))) < 32 * 1024


def test_a_commit_is_reported_while_nothing_else_happens(agent: Agent, begun: Callable[..., Reporter]) -> None:
    counters = Counters()
    begun(counters, agent.path)
    assert isinstance(agent.receive(), samples.Sample)
    counters.count_save("commit")
    while not (sample := agent.receive()).saves:  # type: ignore[union-attr]
        assert isinstance(sample, samples.Sample)
    assert [saves.kind for saves in sample.saves] == ["commit"]  # type: ignore[union-attr]


def test_a_number_that_is_logged_by_an_idle_rank_wakes_its_reporter() -> None:
    counters = Counters()
    woken: list[bool] = []
    counters.wake_reader = lambda: woken.append(True)
    counters.asleep = True
    counters.log({"loss": 1.0})
    assert woken == [True]
    assert Sampler(counters, Rank(0)).works(time.monotonic())  # so it is not asleep again before it has reported


def test_settings_are_said_at_first_and_when_they_have_changed() -> None:
    counters, rank = Counters(), Rank(0)
    sampler = Sampler(counters, rank)
    sampler.sample(1.0, settings=True)
    assert sampler.sample(2.0, settings=False).settings is None
    rank.cycle_time = 5.0
    assert sampler.sample(3.0, settings=False).settings == {"params.cycle_time_ms": 5.0}
    assert sampler.sample(4.0, settings=False).settings is None


def test_a_working_rank_is_reported_on_no_more_than_once_per_interval(
    agent: Agent, begun: Callable[..., Reporter]
) -> None:
    counters, interval = Counters(), 0.05
    stop = threading.Event()

    def body() -> None:
        while not stop.is_set():
            work(counters)

    thread = Task(body)
    try:
        began = time.monotonic()
        begun(counters, agent.path, Rank(1), interval)
        count = 0
        while time.monotonic() - began < 20 * interval:
            agent.until(lambda sample: True)
            count += 1
        assert 1 < count <= (time.monotonic() - began) / interval + 2
    finally:
        stop.set()
        thread.result(DEADLINE)


def test_an_idle_rank_sleeps_and_is_woken_by_what_it_does(agent: Agent, begun: Callable[..., Reporter]) -> None:
    counters = Counters()
    reporter = begun(counters, agent.path, Rank(1))
    assert agent.until(lambda sample: True).doing == "starting"
    end = time.monotonic() + DEADLINE
    while not counters.asleep:
        assert time.monotonic() < end
        time.sleep(0.001)
    looks, plain = [], reporter._look
    reporter._look = lambda *given, **more: (looks.append(given), plain(*given, **more))[1]  # type: ignore[method-assign]
    agent.socket.settimeout(10 * reporter._interval)
    with pytest.raises(TimeoutError):
        agent.receive()
    assert looks == []
    agent.socket.settimeout(DEADLINE)
    work(counters)
    assert agent.until(lambda sample: sample.operations == 1).operations == 1
    assert looks


def test_what_happens_just_before_it_sleeps_is_not_missed(
    agent: Agent, begun: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "LOOK_SECONDS", 3600.0)

    class JustInTime(Counters):
        """A rank that does something at the very moment in which its reporter lies down."""

        __slots__ = ("_asleep",)

        @property
        def asleep(self) -> bool:
            return self._asleep

        @asleep.setter
        def asleep(self, value: bool) -> None:
            if value and not self.latest:
                self.latest = time.monotonic()
                self.carried("gloo", 0).ended(0.0, 1, 100)
            self._asleep = value

    begun(JustInTime(), agent.path, Rank(1))
    assert agent.until(lambda sample: sample.operations == 1).doing != "starting"


def test_without_an_observer_no_sample_is_taken_and_a_later_one_is_told_everything(
    tmp_path: Path, begun: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    plain = Sampler.sample

    def counted(self: Sampler, now: float, **more: bool) -> samples.Sample:
        made.append(now)
        return plain(self, now, **more)

    monkeypatch.setattr(Sampler, "sample", counted)
    counters = Counters()
    work(counters)
    asked = threading.Event()
    is_open = AgentOutlet.is_open
    monkeypatch.setattr(AgentOutlet, "is_open", lambda self: (is_open(self), asked.set())[0])
    begun(counters, str(tmp_path / "agent"))
    for _ in range(3):
        asked.clear()
        assert asked.wait(DEADLINE)
    assert made == []
    for _ in range(2):
        agent = Agent(tmp_path)
        assert agent.until(lambda sample: True).settings is not None
        agent.close()


def test_without_an_observer_an_idle_rank_is_not_kept_awake(
    tmp_path: Path, begun: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "LOOK_SECONDS", 3600.0)
    asleep = threading.Event()

    class Selector(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 1800:
                asleep.set()
            return super().select(timeout)

    monkeypatch.setattr(reporter_module, "_Selector", Selector)
    counters = Counters()
    counters.note("stall", "some ranks wait")
    begun(counters, str(tmp_path / "agent"))
    assert asleep.wait(DEADLINE)
    agent = Agent(tmp_path)
    work(counters)
    said = agent.receive()
    while not isinstance(said, samples.Note):
        said = agent.receive()
    assert said.text == "some ranks wait", "an observer that comes later is told"
    agent.close()


def test_what_is_to_be_said_once_is_said_once(agent: Agent, begun: Callable[..., Reporter]) -> None:
    counters = Counters()
    begun(counters, agent.path, Rank(1))
    agent.receive()
    counters.note("stall", "some ranks wait")
    said = agent.receive()
    while not isinstance(said, samples.Note):
        said = agent.receive()
    assert (said.rank, said.kind, said.text) == (1, "stall", "some ranks wait")
    work(counters)
    later = [agent.receive() for _ in range(1)]
    assert not any(isinstance(said, samples.Note) for said in later)


def test_the_last_totals_are_said_at_the_end(agent: Agent) -> None:
    counters = Counters()
    reporting = Reporting(
        lambda wake_up: Reporter(counters, Rank(1), AgentOutlet(agent.path), 3600.0, wake_up), 0.0, lambda: True
    )
    agent.receive()
    work(counters, 7)
    reporting.close()
    assert agent.until(lambda sample: sample.operations == 7)
    assert not (Path(agent.path).parent / str(os.getpid())).exists()


def test_a_blocked_rank_says_so_and_what_it_waits_for(agent: Agent, begun: Callable[..., Reporter]) -> None:
    class Operation:
        name = "allreduce.x"
        ordered = 0.0

    counters, rank = Counters(), Rank(1)
    work(counters)
    rank.pending = "allreduce.x", time.monotonic() - 5.0
    counters.blocked_since, counters.blocked_in = time.monotonic(), Operation()
    begun(counters, agent.path, rank)
    sample = agent.until(lambda sample: sample.doing == "waiting")
    assert sample.pending == "allreduce.x"
    assert 5.0 <= sample.pending_seconds < 5.0 + DEADLINE
    Operation.ordered = time.monotonic()
    assert agent.until(lambda sample: sample.doing == "communicating")


class TestTraces:
    def test_the_next_steps_are_traced_from_one_steps_end_to_anothers(
        self, agent: Agent, begun: Callable[..., Reporter], tmp_path: Path
    ) -> None:
        counters, rank = Counters(), Rank(1)
        counters.step()
        begun(counters, agent.path, rank)
        agent.receive()
        order = samples.ORDERS.encode(samples.TraceOrder(7, 2, str(tmp_path)))
        agent.socket.sendto(order, str(tmp_path / str(os.getpid())))
        self.wait(lambda: counters.on_step is not None)
        assert rank.traced == []
        counters.step()
        self.wait(lambda: rank.traced == [str(tmp_path / "trace.7.1.part")])

        def ends() -> bool:
            counters.step()  # a step that ends while the trace begins is not one of those that are traced
            return (tmp_path / "trace.7.1.json").exists()

        self.wait(ends)
        assert rank.traced[1:] == ["stopped"]
        assert counters.on_step is None

    @staticmethod
    def wait(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.002)

    def tracer(self, counters: Counters, rank: Rank) -> StepTracer:
        return StepTracer(counters, 1, rank.start_trace, rank.stop_trace, lambda: None)

    def test_it_has_as_many_steps_as_were_asked_for(self, tmp_path: Path) -> None:
        counters, rank = Counters(), Rank(1)
        counters.step()
        tracer = self.tracer(counters, rank)
        tracer.order(samples.TraceOrder(7, 2, str(tmp_path)), 100.0)
        tracer.advance(100.0)
        assert rank.traced == [], "the trace begins where a step ends"
        for _ in range(2):
            counters.step()
            tracer.advance(100.1)
            assert rank.traced == [str(tmp_path / "trace.7.1.part")]
        counters.step()
        assert tracer.advance(100.2) is None
        assert rank.traced[1:] == ["stopped"]
        assert (tmp_path / "trace.7.1.json").exists()

    def test_without_steps_it_is_of_a_few_seconds_and_rank_0_says_so(self, tmp_path: Path) -> None:
        for number in (0, 1):
            counters, rank = Counters(), Rank(number)
            tracer = StepTracer(counters, number, rank.start_trace, rank.stop_trace, lambda: None)
            tracer.order(samples.TraceOrder(1, 10, str(tmp_path)), 100.0)
            assert tracer.advance(100.0) == 100.0 + STEPLESS_SECONDS
            assert tracer.advance(100.0 + STEPLESS_SECONDS) is None
            assert (tmp_path / f"trace.1.{number}.json").exists()
            said = [text for _, _, text in counters.notes]
            assert said == ["rank 0 ends no steps, so trace 1 is of 3 s and not of 10 steps"][number:]

    @pytest.mark.parametrize(("last_step", "patience"), [(0.1, PATIENCE), (5.0, 15.0), (100.0, LONGEST_SECONDS)])
    def test_a_job_that_has_stopped_making_steps_is_not_waited_for(
        self, last_step: float, patience: float, tmp_path: Path
    ) -> None:
        """Such as one whose rank 0 writes a checkpoint; how long a step may last depends on the last one."""
        counters = Counters()
        counters.steps, counters.last_step = 7, last_step
        tracer = self.tracer(counters, Rank(1))
        tracer.order(samples.TraceOrder(1, 10, str(tmp_path)), 100.0)
        begins = 100.0 + patience
        assert tracer.advance(100.0) == begins
        assert tracer.advance(begins) == begins + STEPLESS_SECONDS
        assert tracer.advance(begins + STEPLESS_SECONDS) is None
        assert (tmp_path / "trace.1.1.json").exists()

    def test_a_rank_whose_part_ends_hands_over_what_it_has(self, tmp_path: Path) -> None:
        tracer = self.tracer(Counters(), Rank(1))
        tracer.order(samples.TraceOrder(1, 10, str(tmp_path)), 100.0)
        tracer.advance(100.0)
        tracer.close()
        assert (tmp_path / "trace.1.1.json").exists()

    def test_who_cannot_says_so_and_may_be_asked_again(self, tmp_path: Path) -> None:
        counters, rank = Counters(), Rank(1)
        tracer = self.tracer(counters, rank)

        def refused(path: str) -> bool:
            raise ConfigError("the disk is full")

        tracer._start = refused
        tracer.order(samples.TraceOrder(1, 10, str(tmp_path)), 100.0)
        assert tracer.advance(100.0) is None
        tracer._start = lambda path: False
        tracer.order(samples.TraceOrder(2, 10, str(tmp_path)), 100.0)
        assert tracer.advance(100.0) is None
        tracer._start = rank.start_trace
        tracer.order(samples.TraceOrder(3, 10, str(tmp_path)), 100.0)
        tracer.advance(100.0)
        tracer.order(samples.TraceOrder(4, 10, str(tmp_path)), 100.0)
        assert [text for _, _, text in counters.notes] == [
            "rank 1 cannot write trace 1: the disk is full",
            "rank 1 cannot write trace 2: its part of the job has ended",
            "rank 1 has not finished trace 3 yet",
        ]


def test_a_server_that_shows_nothing_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(data: bytes) -> bool:
        raise RendezvousError("not there")

    for refuses in (lambda data: False, fails):
        outlet = ServerOutlet(refuses)
        assert outlet.is_open()
        assert not outlet.send(b"x")
        assert not outlet.is_open()
        assert outlet._closed_until > time.monotonic() + 30
    taken: list[bytes] = []
    outlet = ServerOutlet(lambda data: (taken.append(data), True)[1])
    assert outlet.send(b"x")
    assert outlet.is_open()
    assert taken == [b"x"]


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_job_that_ends_at_once_is_reported_on_only_if_it_is_observed(agent: Agent, looked_at: bool) -> None:
    made: list[Reporter] = []

    def make(wake_up: WakeUp) -> Reporter:
        made.append(Reporter(counters, Rank(1), AgentOutlet(agent.path), 3600.0, wake_up))
        return made[-1]

    counters = Counters()
    work(counters, 7)
    Reporting(make, 3600.0, lambda: looked_at).close()
    assert len(made) == looked_at
    if looked_at:
        assert agent.until(lambda sample: sample.operations == 7)


def test_a_reporter_that_ends_leaves_the_next_one_its_socket(agent: Agent) -> None:
    first, second = AgentOutlet(agent.path), AgentOutlet(agent.path)
    assert first.is_open()
    assert second.is_open()
    first.close()
    agent.socket.sendto(samples.ORDERS.encode(samples.TraceOrder(1, 2, "")), second._own)
    assert [order.number for order in second.orders()] == [1]
    second.close()
    assert not os.path.exists(second._own)


def test_a_tracer_that_ends_leaves_the_next_one_its_steps(tmp_path: Path) -> None:
    counters, rank = Counters(), Rank(1)
    first, second = (StepTracer(counters, 1, rank.start_trace, rank.stop_trace, lambda: None) for _ in range(2))
    first.order(samples.TraceOrder(1, 10, str(tmp_path)), 100.0)
    second.order(samples.TraceOrder(2, 10, str(tmp_path)), 100.0)
    first.close()
    assert counters.on_step == second._stepped
    second.close()
    assert counters.on_step is None


def test_a_rank_that_fails_does_not_wait_long_for_a_server_that_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for its failure; one that ends as it should gives its last words more time."""
    monkeypatch.setattr("hvdgloo._job.reporting._JOIN_SECONDS", 1.0)
    monkeypatch.setattr("hvdgloo._job.reporting._FAILING_SECONDS", 0.1)
    released = threading.Event()
    begun = threading.Event()

    def never(data: bytes) -> bool:
        begun.set()
        released.wait(DEADLINE)
        return True

    def closing(*, failing: bool, at_once: bool) -> float:
        begun.clear()
        counters = Counters()
        work(counters)
        reporting = Reporting(
            lambda wake_up: Reporter(counters, Rank(1), ServerOutlet(never), 3600.0, wake_up),
            0.0,
            lambda: True,
            at_once=at_once,
        )
        assert begun.wait(DEADLINE)
        started = time.monotonic()
        reporting.close(failing=failing)
        return time.monotonic() - started

    try:
        orderly = closing(failing=False, at_once=False)
        assert closing(failing=True, at_once=False) < orderly / 2
        assert closing(failing=True, at_once=True) > orderly / 2, "what an agent takes, it takes at once"
    finally:
        released.set()
