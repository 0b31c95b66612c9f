"""Rates at the moment: differences of totals over the last few seconds."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from hvdgloo._observe import view
from hvdgloo._observe.samples import HostSample, Sample, Steps
from hvdgloo._observe.series import brief

_SPAN = 3.0
"""Rates are means over about this many seconds: less would jump, more would lag behind."""

_SILENCE = 2.5
"""Intervals of silence after which a process counts as idle: it sends nothing while nothing happens."""

_HOST_SPAN = 10.0


@dataclasses.dataclass(frozen=True)
class Rates:
    """A rank's rates at the moment; 0 where a rate is not known.

    Attributes:
        flows: plane and process set to bytes per second.
        step_seconds, waiting, communicating, before_first: seconds in each step.
        cpu: cores in use.
    """

    steps_per_second: float = 0.0
    step_seconds: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    before_first: float = 0.0
    bytes_per_second: float = 0.0
    flows: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    cpu: float = 0.0

    def ended(self) -> Rates:
        """Return the rates of a process that has ended: the parts of its steps stay."""
        return Rates(0.0, self.step_seconds, self.waiting, self.communicating, self.before_first)

    @property
    def computing(self) -> float:
        """Seconds of each step that were neither waiting nor communicating."""
        return max(0.0, self.step_seconds - self.waiting - self.communicating)


class Window:
    """The last few samples of one rank's process.

    Of the steps it keeps what was last known: a step may take longer than the window.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._first: Sample | None = None
        self._interval = 1.0
        self.heard = 0.0
        """Time of the last sample, by this process's clock."""
        self._stepped = 0.0  # time of the last sample with a new step
        self._steps = Rates()

    def goes_on(self, sample: Sample) -> bool:
        """Return whether a sample comes from the same process: its totals are not smaller."""
        last = self.last
        return last is None or (
            last.pid == sample.pid
            and last.at <= sample.at
            and last.operations <= sample.operations
            and last.bytes <= sample.bytes
            and last.steps.count <= sample.steps.count
        )

    def put(self, sample: Sample, now: float) -> None:
        """Add the next sample, of the same process."""
        previous = self._samples[-1] if self._samples else None
        self._first = self._first or sample
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[1].at >= _SPAN:
            self._samples.popleft()
        if previous is None:
            self._steps = _of_steps(Steps(), sample.steps) or self._steps  # of its life so far
        else:
            self._interval = max(1.0, min(60.0, sample.at - previous.at))
        if previous is None or sample.steps.count > previous.steps.count:
            self._stepped = now
        self.heard = now
        self._steps = _of_steps(self._samples[0].steps, sample.steps) or self._steps

    @property
    def has_rates(self) -> bool:
        """True if there are two samples to compare; before that, only steps are known."""
        return len(self._samples) > 1

    @property
    def last(self) -> Sample | None:
        """Latest sample."""
        return self._samples[-1] if self._samples else None

    def rates(self, now: float) -> Rates:
        """Return the rates at ``now`` (by the clock of ``put``)."""
        if not self.has_rates:
            return self._steps
        first, last = self._samples[0], self._samples[-1]
        quiet = _SILENCE * self._interval
        steps = self._steps
        if now - self._stepped > quiet + 3 * steps.step_seconds:
            steps = dataclasses.replace(steps, steps_per_second=0.0)
        return steps if now - self.heard > quiet else _traffic(first, last, steps)

    def whole(self) -> Rates:
        """Return the means over all steps of the process, and over all the time for which it was observed."""
        first, last = self._first, self.last
        if first is None or last is None:
            return Rates()
        return _traffic(first, last, _of_steps(Steps(), last.steps) or Rates())


def _traffic(first: Sample, last: Sample, steps: Rates) -> Rates:
    """Return the mean rates between two samples, together with the rates of steps."""
    elapsed = last.at - first.at
    if elapsed <= 0:
        return steps
    before = {(flow.plane, flow.process_set): flow.bytes for flow in first.flows}
    return dataclasses.replace(
        steps,
        bytes_per_second=(last.bytes - first.bytes) / elapsed,
        flows={
            (flow.plane, flow.process_set): max(0, flow.bytes - before.get((flow.plane, flow.process_set), 0)) / elapsed
            for flow in last.flows
        },
        cpu=max(0.0, (last.cpu_seconds - first.cpu_seconds) / elapsed),
    )


def _of_steps(before: Steps, after: Steps) -> Rates | None:
    """Return the mean step between two totals; None without a step whose time is known (the first one's is not)."""
    if before.count == 0 and after.count > 1:
        before = Steps(count=1)  # ``seconds`` begins with the end of the first step
    count, seconds = after.count - before.count, after.seconds - before.seconds
    if count <= 0 or before.count == 0 or seconds <= 0:
        return None
    return Rates(
        steps_per_second=count / seconds,
        step_seconds=seconds / count,
        waiting=max(0.0, after.waiting - before.waiting) / count,
        communicating=max(0.0, after.communicating - before.communicating) / count,
        before_first=max(0.0, after.before_first - before.before_first) / count,
    )


class HostWindow:
    """The last few samples of one host."""

    def __init__(self) -> None:
        self._samples: deque[HostSample] = deque()

    def put(self, sample: HostSample) -> None:
        """Add the next sample; smaller totals (the host was rebooted) start a new window."""
        if self._samples and (sample.at < self.last.at or sample.received < self.last.received):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[1].at >= _HOST_SPAN:
            self._samples.popleft()

    @property
    def last(self) -> HostSample:
        """Latest sample; there must be one."""
        return self._samples[-1]

    def mean(self) -> HostSample:
        """Return the latest sample, with means over the last 10 s where stragglers are judged by them."""
        samples = self._samples
        return HostSample(
            at=self.last.at,
            cores=self.last.cores,
            cpu=_mean([sample.cpu for sample in samples]),
            stolen=_mean([sample.stolen for sample in samples]),
            throttled=_mean([sample.throttled for sample in samples]),
            memory=self.last.memory,
            memory_total=self.last.memory_total,
            memory_pressure=_mean([sample.memory_pressure for sample in samples]),
            gpus=self.last.gpus,
        )

    def show(self, name: str, state: str) -> view.Host:
        """Return the host as readers see it."""
        if not self._samples:
            return view.Host(name, state)
        last = self.last
        begin = next(sample for sample in self._samples if last.at - sample.at <= _SPAN)
        if begin is last and len(self._samples) > 1:
            begin = self._samples[-2]
        elapsed = last.at - begin.at

        def rate(total: int, before: int) -> float:
            return brief(max(0, total - before) / elapsed) if elapsed > 0 else 0.0

        return view.Host(
            name,
            state,
            cores=last.cores,
            cpu=brief(last.cpu),
            stolen=brief(last.stolen),
            throttled=brief(last.throttled),
            memory=last.memory,
            memory_total=last.memory_total,
            memory_pressure=brief(last.memory_pressure),
            received=rate(last.received, begin.received),
            sent=rate(last.sent, begin.sent),
            read=rate(last.read, begin.read),
            written=rate(last.written, begin.written),
            gpus=[view.Gpu(**{**msgspec.structs.asdict(gpu), "use": brief(gpu.use)}) for gpu in last.gpus],
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
