"""The job's Prometheus metrics, made on request from the latest samples of its ranks and hosts.

Its library is imported at the first such request: most jobs end without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hvdgloo._observe import view
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.samples import Causes, Gpu, HostSample, Lateness, OuterSteps, Sample, Steps

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    Family = type[CounterMetricFamily] | type[GaugeMetricFamily]

_FIRST_BOUND = 1e-4
"""First bound of ``Lateness.waits``, in seconds; each further one is twice the one before."""

_OF_RANKS: list[tuple[str, str, Callable[[Sample], float]]] = [
    ("hvdgloo_operations_total", "Tensors that collectives have carried", lambda sample: sample.operations),
    ("hvdgloo_tensor_bytes_total", "Bytes of those tensors", lambda sample: sample.bytes),
    ("hvdgloo_steps_total", "Training steps that have ended", lambda sample: sample.steps.count),
    ("hvdgloo_process_cpu_seconds_total", "Processor time of the rank's process", lambda sample: sample.cpu_seconds),
    ("hvdgloo_process_resident_memory_bytes", "Resident memory of the rank's process", lambda sample: sample.memory),
    ("hvdgloo_pending_seconds", "Time for which the rank has waited for an operation", lambda s: s.pending_seconds),
]
"""Name, help, value; labels are rank and host. The name says whether it is a counter."""

_OUTER_STEPS: list[tuple[str, str, Callable[[OuterSteps], float]]] = [
    ("hvdgloo_outer_steps_total", "Outer steps that have ended", lambda outer: outer.count),
    ("hvdgloo_outer_step_bytes_total", "Bytes of the changes that the rank sent in them", lambda outer: outer.bytes),
    ("hvdgloo_outer_step_seconds_total", "Time for which they kept the rank from inner steps", lambda o: o.seconds),
    ("hvdgloo_outer_step_last_timestamp_seconds", "End of the last one, since 1970", lambda outer: outer.ended),
]
"""The same for ranks that make outer steps."""

_STEP_PARTS: list[tuple[str, Callable[[Steps], float]]] = [
    ("computing", lambda steps: max(0.0, steps.seconds - steps.waiting - steps.communicating)),
    ("waiting", lambda steps: steps.waiting),
    ("communicating", lambda steps: steps.communicating),
]

_CAUSES: list[tuple[str, Callable[[Causes], float]]] = [
    ("negotiation", lambda causes: causes.negotiation),
    ("queue", lambda causes: causes.queue),
    ("data", lambda causes: causes.data),
    ("copy", lambda causes: causes.copy),
    ("wire", lambda causes: causes.wire),
]

_OF_HOSTS: list[tuple[str, str, Callable[[HostSample], float]]] = [
    ("hvdgloo_host_cores", "Processor cores", lambda host: host.cores),
    ("hvdgloo_host_cpu_ratio", "Share of all cores that was busy", lambda host: host.cpu),
    ("hvdgloo_host_cpu_stolen_ratio", "Share that a hypervisor gave to others", lambda host: host.stolen),
    ("hvdgloo_host_cpu_throttled_ratio", "Share of time held back by a control group's limit", lambda h: h.throttled),
    ("hvdgloo_host_memory_used_bytes", "Memory in use", lambda host: host.memory),
    ("hvdgloo_host_memory_size_bytes", "Memory of the host", lambda host: host.memory_total),
    (
        "hvdgloo_host_memory_pressure_ratio",
        "Share of time spent waiting for memory",
        lambda h: h.memory_pressure,
    ),
    ("hvdgloo_host_network_received_bytes_total", "By all interfaces but loopback", lambda host: host.received),
    ("hvdgloo_host_network_sent_bytes_total", "By all interfaces but loopback", lambda host: host.sent),
    ("hvdgloo_host_disk_read_bytes_total", "By all disks", lambda host: host.read),
    ("hvdgloo_host_disk_written_bytes_total", "By all disks", lambda host: host.written),
]
"""The same with the label host."""

_OF_GPUS: list[tuple[str, str, Callable[[Gpu], float]]] = [
    ("hvdgloo_gpu_utilization_ratio", "Share of time in which a kernel ran", lambda gpu: gpu.use),
    ("hvdgloo_gpu_memory_used_bytes", "Memory in use", lambda gpu: gpu.memory),
    ("hvdgloo_gpu_memory_size_bytes", "Memory of the GPU", lambda gpu: gpu.memory_total),
    ("hvdgloo_gpu_clock_hertz", "Clock of the processors", lambda gpu: gpu.clock * 1e6),
]
"""The same with the labels host, gpu and model."""


def text(observatory: Observatory) -> tuple[bytes, str]:
    """Return all metrics in Prometheus' text format, and that format's content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(observatory))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    """The source of metrics for Prometheus' registry."""

    def __init__(self, observatory: Observatory) -> None:
        self._observatory = observatory

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families that have samples."""
        return (family for family in self._families() if family.samples)

    def _families(self) -> Iterator[Metric]:
        observatory = self._observatory
        snapshot = observatory.snapshot(curves=False)
        yield from _of_job(snapshot)
        yield from _of_ranks(snapshot, observatory.samples())
        yield from _of_hosts(snapshot, observatory.host_samples())
        lateness = observatory.lateness()
        if lateness is not None:
            hosts = dict(zip(snapshot.ranks.rank, snapshot.ranks.host, strict=True))
            names = {rank: snapshot.hosts[host].name for rank, host in hosts.items()}
            yield from _of_lateness(lateness, names)


def _family(name: str, help: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind: Family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, help, labels=labels)


def _of_job(snapshot: view.Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import InfoMetricFamily

    job = snapshot.job
    info = InfoMetricFamily("hvdgloo_job", "The job")
    info.add_metric([], {"job_id": job.id, "state": job.state, "version": job.versions.get("hvdgloo", "")})
    yield info
    values = [
        ("hvdgloo_job_start_time_seconds", "When the job was started, since 1970", job.started),
        ("hvdgloo_job_size", "Ranks", job.size),
        ("hvdgloo_job_epoch", "Of an elastic job: how often its ranks have changed", job.epoch),
    ]
    for name, help_text, value in values:
        family = _family(name, help_text, [])
        family.add_metric([], value)
        yield family
    states = _family("hvdgloo_ranks", "Ranks by what each does", ["state"])
    for index, state in enumerate(view.STATES):
        states.add_metric([state], snapshot.ranks.state.count(index))
    yield states
    logged = _family("hvdgloo_logged_value", "Numbers that the program logs, by name", ["name"])
    for name, logged_value in job.logged.items():
        logged.add_metric([name], math.nan if logged_value is None else logged_value)
    yield logged
    progress = job.progress or view.Progress()
    for name, help_text, known in (
        ("hvdgloo_progress_ratio", "Share of the training that is done, as the program tells it", progress.share),
        (
            "hvdgloo_progress_remaining_seconds",
            "Time until the training's end, at its speed so far",
            progress.remaining,
        ),
        ("hvdgloo_progress_epoch", "Epoch of the training, from 0, as the program tells it", progress.epoch),
    ):
        family = _family(name, help_text, [])
        if known is not None:
            family.add_metric([], known)
        yield family


def _of_ranks(snapshot: view.Snapshot, samples: list[tuple[str, Sample]]) -> Iterator[Metric]:
    for name, help_text, value in _OF_RANKS:
        family = _family(name, help_text, ["rank", "host"])
        for host, sample in samples:
            family.add_metric([str(sample.rank), host], value(sample))
        yield family
    for name, help_text, of_outer in _OUTER_STEPS:
        family = _family(name, help_text, ["rank", "host"])
        for host, sample in samples:
            if sample.outer.count:
                family.add_metric([str(sample.rank), host], of_outer(sample.outer))
        yield family
    steps = _family(
        "hvdgloo_step_seconds_total",
        "Time of training steps, by what the thread that makes them was at: computing, waiting for other ranks, or "
        "communicating",
        ["rank", "host", "part"],
    )
    before_first = _family(
        "hvdgloo_step_before_first_seconds_total",
        "From each step's begin to its first submission",
        ["rank", "host"],
    )
    causes = _family(
        "hvdgloo_operation_seconds_total",
        "Time of collective operations, summed over operations that overlap, by what it went to",
        ["rank", "host", "cause"],
    )
    flows = [
        _family(name, help_text, ["rank", "host", "plane", "process_set"])
        for name, help_text in (
            ("hvdgloo_plane_operations_total", "Tensors that a data plane has carried"),
            ("hvdgloo_plane_bytes_total", "Bytes of those tensors"),
            ("hvdgloo_plane_busy_seconds_total", "Time in which at least one bucket was on the plane"),
            ("hvdgloo_plane_wire_bytes_total", "Bytes of those tensors as they crossed between hosts"),
            ("hvdgloo_plane_wire_error_ratio", "Relative error of encoded gradients, from samples"),
        )
    ]
    for host, sample in samples:
        labels = [str(sample.rank), host]
        for part, of_steps in _STEP_PARTS:
            steps.add_metric([*labels, part], of_steps(sample.steps))
        before_first.add_metric(labels, sample.steps.before_first)
        for cause, of_causes in _CAUSES:
            causes.add_metric([*labels, cause], of_causes(sample.causes))
        for flow in sample.flows:
            totals = flow.operations, flow.bytes, flow.seconds, flow.wire_bytes, flow.wire_error
            for family, total in zip(flows, totals, strict=True):
                family.add_metric([*labels, flow.plane, str(flow.process_set)], total)
    yield from (steps, before_first, causes, *flows)
    rates = _family(
        "hvdgloo_straggler_ratio",
        "Share of the last steps that a rank was last in",
        ["rank", "host"],
    )
    for straggler in snapshot.stragglers:
        rates.add_metric([str(straggler.rank), straggler.host], straggler.share)
    yield rates


def _of_lateness(lateness: Lateness, hosts: dict[int, str]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    count = _family("hvdgloo_came_last_total", "Steps (or operations) to which a rank came last", ["rank", "host"])
    seconds = _family(
        "hvdgloo_caused_wait_seconds_total", "For how long the first to come waited then", ["rank", "host"]
    )
    for late in lateness.ranks:
        labels = [str(late.rank), hosts.get(late.rank, "")]
        count.add_metric(labels, late.count)
        seconds.add_metric(labels, late.seconds)
    yield from (count, seconds)
    waits = HistogramMetricFamily(
        "hvdgloo_round_wait_seconds", "How long the first rank waited for the last one, for each step (or operation)"
    )
    buckets: list[tuple[str, float]] = []
    total = 0
    for index, number in enumerate(lateness.waits):
        total += number
        last = index == len(lateness.waits) - 1
        buckets.append(("+Inf" if last else f"{_FIRST_BOUND * 2**index:g}", float(total)))
    if buckets:
        waits.add_metric([], buckets, sum(late.seconds for late in lateness.ranks))
        yield waits


def _of_hosts(snapshot: view.Snapshot, samples: dict[str, HostSample]) -> Iterator[Metric]:
    up = _family("hvdgloo_host_up", "1 while the host is part of the job, 0 once it is lost or has left", ["host"])
    for host in snapshot.hosts:
        up.add_metric([host.name], host.state == "up")
    yield up
    for name, help_text, value in _OF_HOSTS:
        family = _family(name, help_text, ["host"])
        for host_name, sample in samples.items():
            family.add_metric([host_name], value(sample))
        yield family
    for name, help_text, of_gpu in _OF_GPUS:
        family = _family(name, help_text, ["host", "gpu", "model"])
        for host_name, sample in samples.items():
            for gpu in sample.gpus:
                family.add_metric([host_name, str(gpu.index), gpu.name], of_gpu(gpu))
        yield family
