"""The server's Prometheus metrics, in a registry of their own: a process may hold several servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Metrics:
    """Counts requests; everything else is read from the service when somebody asks.

    Args:
        workers: for each epoch, how many workers are in and how many should come.
        counts: of what the service holds, by name.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self, workers: Callable[[], Mapping[int, tuple[int, int]]], counts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "hvdgloo_rendezvous_requests",
            "Requests that were let in, by method, route and status",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "hvdgloo_rendezvous_request_seconds",
            "From a request's head to its answer, long polls' waits included",
            ["route"],
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
            registry=self._registry,
        )
        self._refused = Counter(
            "hvdgloo_rendezvous_refused",
            "Requests that were turned away at the gate (signature, size, slow body), by status",
            ["status"],
            registry=self._registry,
        )
        self._registry.register(_State(workers, counts))

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _State(Collector):
    def __init__(
        self, workers: Callable[[], Mapping[int, tuple[int, int]]], counts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._workers = workers
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        arrived = GaugeMetricFamily("hvdgloo_rendezvous_workers", "Workers that are in", labels=["epoch"])
        expected = GaugeMetricFamily(
            "hvdgloo_rendezvous_workers_expected", "Workers that should come", labels=["epoch"]
        )
        for epoch, (present, size) in sorted(self._workers().items()):
            arrived.add_metric([str(epoch)], present)
            expected.add_metric([str(epoch)], size)
        yield arrived
        yield expected
        for name, count in self._counts().items():
            yield GaugeMetricFamily(f"hvdgloo_rendezvous_{name}", f"Number of {name.replace('_', ' ')}", value=count)
