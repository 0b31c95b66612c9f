"""Code that runs on the hosts: steps of a workload with one setting after another, and the recording of a program.

Gradients are made up and no time is spent computing: a rank sleeps where the program would compute, as it does if a GPU
computes.
"""

from __future__ import annotations

import os
import runpy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np

from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._engine.engine import Engine
from hvdgloo._engine.messages import Request
from hvdgloo._engine.settings import Choice
from hvdgloo._engine.tuning import Axis, search
from hvdgloo._job import process
from hvdgloo.runner.tuning.workload import Workload, of_steps
from hvdgloo.types import Collective, ReduceOp, WireFormat

BUCKETS = tuple(mib << 20 for mib in (1, 2, 4, 8, 16, 25, 50, 100))
FUSION = tuple(mib << 20 for mib in (1, 4, 16, 32, 64))
HIERARCHICAL = tuple(kib << 10 for kib in (32, 128, 512, 2048))
CYCLES = (0.0, 0.001, 0.005)

SWEEP = tuple(1 << exponent for exponent in range(10, 27, 2))
"""Sizes in bytes for which a data plane's speed is shown."""

_SWEEP_SECONDS = 0.25  # for each size
_MOST_STEPS, _SHORTEST = 10, 1e-4
_PAIRS, _LOOKS = 6, 2
_WIRES = (WireFormat.FULL, WireFormat.BF16, WireFormat.INT8, WireFormat.INT4)
_CROSSING, _TURNS = 0.15, (3, 9)  # share of the time for --wire; the fewest and the most turns of its values
_RECORDED, _WARM_UP = 6, 2  # steps of a program


@dataclass(frozen=True)
class Setup:
    """Settings that can be tried within one job: sizes in bytes, times in seconds."""

    gradient_bucket: int
    fusion_threshold: int
    cycle_time: float
    hierarchical_threshold: int
    inline_threshold: int

    @property
    def choice(self) -> Choice:
        return Choice(self.fusion_threshold, self.cycle_time, self.hierarchical_threshold, self.inline_threshold)


@dataclass(frozen=True)
class Found:
    """The best settings for one workload.

    Attributes:
        sent: the tensors of each step: the workload, or its first part if a whole step takes too long.
        part: the share of the workload's bytes that was sent.
        start, start_seconds: settings of the beginning, and a step's median time with them.
        best, best_seconds: settings to use, and a step's median time with them.
        tried: every setup with its median time, in the order of the first measurement.
    """

    sent: Workload
    part: float
    start: Setup
    start_seconds: float
    best: Setup
    best_seconds: float
    tried: tuple[tuple[Setup, float], ...]


@dataclass(frozen=True)
class Measured:
    """The results of a job.

    Attributes:
        plane: the data plane of the set of all ranks.
        ranks, hosts: their numbers.
        sweep: seconds of an allreduce by its size in bytes.
        found: the results for each workload.
        wires: with ``searching``, seconds of a step of the first workload with its best settings, by the value of
            ``--wire``; empty if gradients cannot be encoded, or do not leave the host.
    """

    plane: str
    ranks: int
    hosts: int
    sweep: dict[int, float]
    found: tuple[Found, ...]
    wires: Mapping[str, float] = field(default_factory=dict)


def measure(workloads: Sequence[Workload], seconds: float, bucket: int, *, searching: bool) -> Measured | None:
    """Measure a data plane on all ranks. Collective; rank 0 returns the result, and the others None.

    Args:
        seconds: approximate duration.
        bucket: initial size of the gradients' buckets, in bytes.
        searching: also try settings.
    """
    import hvdgloo.numpy as hvd

    hvd.init()
    try:
        context = process.current()
        plane = context.engine._groups[0].host
        crosses = searching and hvd.cross_size() > 1 and plane.encoding is not None and not plane.encodes_not
        crosses = hvd.broadcast_object(crosses, name="tune.crosses")  # not every local rank exists on other hosts
        deadline = time.monotonic() + seconds * (1 - _CROSSING if crosses else 1)
        sweep = _sweep(hvd, 0.2 * seconds)
        start = Setup(bucket, *astuple(context.engine.start_settings))
        found, wires = [], {}
        for number, workload in enumerate(workloads):
            bench = _Bench(hvd, context.engine, workload, f"tune.{number}")
            left = max(0.0, deadline - time.monotonic()) / (len(workloads) - number)
            bench.settle(start, left)
            best, gain = bench.search(start, left) if searching else (start, 1.0)
            if not searching:
                bench.steps_for(start, left)
                bench.sample(start)
            middle = {setup: statistics.median(times) for setup, times in bench.times.items()}
            before = middle[start]
            part = bench.sent.nbytes / workload.nbytes
            found.append(Found(bench.sent, part, start, before, best, before / gain, tuple(middle.items())))
            if crosses and number == 0:
                wires = bench.cross(best, _CROSSING * seconds)
        if hvd.rank() != 0:
            return None
        return Measured(plane.backend.name, hvd.size(), hvd.cross_size(), sweep, tuple(found), wires)
    finally:
        hvd.shutdown()


def _sweep(hvd: Any, seconds: float) -> dict[int, float]:
    """Measure the seconds of a blocking allreduce for each size; sizes for which there is no time are left out."""
    found = {}
    end = time.monotonic() + seconds
    for size in SWEEP:
        array = np.zeros(size // 4, np.float32)
        times: list[float] = []
        begun = time.monotonic()
        while True:
            # Rank 0 decides whether to continue, a few steps in advance.
            for _ in range(4):
                at = time.perf_counter()
                hvd.allreduce(array, op=hvd.Sum, name="tune.sweep")
                times.append(time.perf_counter() - at)
            now = time.monotonic()
            more = now < min(end, begun + _SWEEP_SECONDS) and len(times) < 200
            if not hvd.broadcast_object(more, name="tune.more"):
                break
        found[size] = statistics.median(times[1:])
        if hvd.broadcast_object(time.monotonic() > end, name="tune.end"):
            break
    return found


def _samples(axes: Sequence[Axis]) -> int:
    """Return the number of samples that a search takes: about three per candidate, and the comparisons if all are
    needed."""
    return sum(3 * len(values) for _, values in axes) + 2 * _PAIRS * _LOOKS


_OPERATIONS: dict[WireFormat | None, CollectiveSpec] = {None: CollectiveSpec(Collective.ALLREDUCE)}
_OPERATIONS |= {wire: CollectiveSpec(Collective.ALLREDUCE, ReduceOp.AVERAGE, wire=wire) for wire in _WIRES}


class _Bench:
    """Steps of a workload. All ranks call the same methods; rank 0 decides.

    Args:
        label: the beginning of the tensors' names.
    """

    def __init__(self, hvd: Any, engine: Engine, workload: Workload, label: str) -> None:
        self._hvd, self._engine, self._workload = hvd, engine, workload
        self._frontend = hvd.FRONTEND
        self._memory = np.zeros(workload.nbytes // 4 + len(workload.sizes), np.float32)
        self._labels: defaultdict[tuple[int, ...], str] = defaultdict(lambda: f"{label}.{len(self._labels)}")
        self._steps = 3
        self.times: dict[Setup, list[float]] = {}

    @property
    def sent(self) -> Workload:
        """The tensors of a step."""
        return self._workload

    def settle(self, start: Setup, seconds: float) -> None:
        """Measure how long steps take. If the times at which gradients become ready are unknown, they are spread evenly
        over the time that it takes to send them; if there are too many gradients to try all settings within
        ``seconds``, the last ones are left out.
        """
        if not self._workload.delays:
            self._workload = replace(self._workload, delays=(0.0,) * len(self._workload.sizes))
            self._step(start)
            pace = float(self._agreed(self._step(start), "pace"))
            # A sample has at least two steps, each of which takes up to twice as long as if all were sent at once.
            share = seconds / (4 * _samples(self._axes(start)) * max(pace, _SHORTEST))
            self._workload = self._workload.first(round(share * self._workload.nbytes))
            every = min(1.0, share) * pace / len(self._workload.sizes)
            delays = tuple(number * every for number in range(len(self._workload.sizes)))
            self._workload = replace(self._workload, delays=delays)
        for _ in range(2):
            self._step(start)

    def steps_for(self, start: Setup, seconds: float) -> None:
        """Choose the number of steps per sample for the available time; the first step of each sample does not
        count."""
        wanted = round(seconds / max(self.sample(start), _SHORTEST)) - 1
        self._steps = int(self._agreed(max(1, min(_MOST_STEPS, wanted)), "steps"))

    def search(self, start: Setup, seconds: float) -> tuple[Setup, float]:
        """Search for a better setup than ``start`` for about ``seconds``; return it and its gain."""
        axes = self._axes(start)
        self.steps_for(start, seconds / _samples(axes))
        running = search(start, axes, most=sum(len(values) for _, values in axes), pairs=_PAIRS, looks=_LOOKS)
        score = None
        while True:
            try:
                setup = next(running) if score is None else running.send(score)
            except StopIteration as end:
                best, gain = end.value
                return best, gain
            score = 1 / self.sample(setup)

    def sample(self, setup: Setup) -> float:
        """Return the median time of some steps with a setup, in seconds; all ranks return rank 0's."""
        if self._hvd.rank() == 0:
            self._engine.tune(setup.choice)
        self._hvd.barrier()
        self._step(setup)
        seconds = statistics.median([self._step(setup) for _ in range(self._steps)])
        seconds = float(self._agreed(seconds, "seconds"))
        self.times.setdefault(setup, []).append(seconds)
        return seconds

    def cross(self, setup: Setup, seconds: float) -> dict[str, float]:
        """Return the time of a step by the form in which gradients cross between hosts, for about ``seconds``. Forms
        take turns, and the medians of their ratios count."""
        # Zeros are encoded in another way than gradients. Averages of the same values on all ranks remain what they
        # are.
        self._memory[:] = np.random.default_rng(1).standard_normal(self._memory.size, np.float32)
        if self._hvd.rank() == 0:
            self._engine.tune(setup.choice)
        self._hvd.barrier()
        end = time.monotonic() + seconds
        turns: list[list[float]] = []
        while True:
            turn = []
            for wire in _WIRES:
                if not turns:
                    self._step(setup, wire)  # memory is allocated
                turn.append(self._step(setup, wire))
            turns.append(turn)
            more = len(turns) < _TURNS[0] or (len(turns) < _TURNS[1] and time.monotonic() < end)
            if not self._agreed(more, "more"):
                break
        middle = statistics.median([turn[0] for turn in turns])
        return {
            wire.value: middle * statistics.median([turn[place] / turn[0] for turn in turns])
            for place, wire in enumerate(_WIRES)
        }

    def _agreed(self, value: Any, what: str) -> Any:
        return self._hvd.broadcast_object(value, name=f"tune.{what}")

    def _axes(self, start: Setup) -> list[Axis]:
        axes: list[Axis] = []
        if self._workload.in_buckets:
            buckets = {tuple(self._workload.sent(size)): size for size in (*reversed(BUCKETS), start.gradient_bucket)}
            axes.append(("gradient_bucket", sorted(buckets.values())))
        else:
            axes.append(("fusion_threshold", FUSION))
        if start.hierarchical_threshold:
            axes.append(("hierarchical_threshold", HIERARCHICAL))
        if not self._workload.in_buckets:
            axes.append(("cycle_time", CYCLES))
        return axes

    def _step(self, setup: Setup, wire: WireFormat | None = None) -> float:
        """Return the seconds of a step.

        Args:
            wire: average, in this form between hosts; None adds up, as all other measurements do.
        """
        sent = self._workload.sent(setup.gradient_bucket)
        label = self._labels[tuple(nbytes for nbytes, _ in sent)]
        handles, end = [], 0
        begun = time.perf_counter()
        for number, (nbytes, last) in enumerate(sent):
            begin, end = end, end + max(1, nbytes // 4)
            ahead = begun + self._workload.delays[last] - time.perf_counter()
            if ahead > _SHORTEST:
                time.sleep(ahead)
            name = f"{label}.{number}" if wire is None else f"{label}.{wire.value}.{number}"
            handles.append(self._frontend.start(_OPERATIONS[wire], [self._memory[begin:end]], name, in_place=True))
        for handle in handles:
            handle.result()
        return time.perf_counter() - begun


# Recording of a user's program.


class _Enough(BaseException):
    """Enough steps were recorded. Not an Exception, so that the program does not handle it."""


@dataclass
class _Recorder:
    steps: list[list[tuple[str, int, float]]] = field(default_factory=lambda: [[]])
    done: bool = False

    def note(self, request: Request) -> None:
        """Record a submitted operation."""
        if self.done:
            raise _Enough
        if request.collective is not Collective.ALLREDUCE or ".noname." in request.name:
            return
        names = {name for name, _, _ in self.steps[-1]}
        if request.name in names:
            if len(self.steps) == _WARM_UP + _RECORDED:
                self.done = True
                raise _Enough
            self.steps.append([])
        self.steps[-1].append((request.name, request.nbytes, time.perf_counter()))

    def workload(self) -> Workload | None:
        """Return the recorded workload; None if no operation was repeated."""
        complete = self.steps[min(_WARM_UP, len(self.steps) - 2) : -1] if len(self.steps) > 1 else []
        if not complete or not complete[-1]:
            return None
        return of_steps(complete, in_buckets="hvdgloo.torch" in sys.modules)


def record(argv: Sequence[str], *, module: bool) -> Workload | None:
    """Run a program until some steps have been recorded; return None if it ends before that.

    Args:
        argv: file, or name of the module, and its arguments.

    Raises:
        SystemExit: the program failed before that. Its error is shown, as if Python ran it itself.
    """
    recorder = _Recorder()
    sys.argv[:] = list(argv)
    if not module and not getattr(sys.flags, "safe_path", False):  # the latter since Python 3.11
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    with _watched(recorder):
        try:
            if module:
                runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(argv[0]), run_name="__main__")
        except _Enough:
            pass
        except SystemExit as end:
            if end.code and not recorder.done:
                raise
        except Exception as error:  # noqa: BLE001 - as where Python runs it itself
            if not recorder.done:  # frameworks make errors of their own of what their callbacks raise
                own = _of_program(error.__traceback__)
                sys.excepthook(type(error), error.with_traceback(own), own)
                sys.last_value = error  # as the interpreter leaves it, for the code that informs the other ranks
                sys.exit(1)
        if process.is_initialized():
            process.shutdown()
    return recorder.workload()


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames that started the program from a traceback."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    return trace


@contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    launch = Engine.launch

    def watched(self: Engine, persistent: Any, *args: Any, **kwargs: Any) -> None:
        recorder.note(persistent.request)
        launch(self, persistent, *args, **kwargs)

    Engine.launch = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.launch = launch  # type: ignore[method-assign]
