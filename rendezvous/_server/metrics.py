"""The server's Prometheus metrics: counted in plain numbers, and put into Prometheus' format on request.

Its library is imported at the first such request: most jobs end without one.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, math.inf)


class _Count:
    """A counter, and the time of its first count."""

    def __init__(self) -> None:
        self.created = time.time()
        self.value = 0


class _Distribution:
    """A histogram of durations."""

    def __init__(self) -> None:
        self.created = time.time()
        self.counts = [0] * len(_BOUNDS)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds


class Metrics:
    """Counts requests; everything else is read from the service on request.

    Args:
        epochs: returns the epochs as ``/v1/status`` shows them.
        counts: numbers of the service's contents, by name.
    """

    def __init__(
        self, epochs: Callable[[], Sequence[Mapping[str, Any]]], counts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._epochs = epochs
        self._counts = counts
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, str], _Count] = {}
        self._seconds: dict[str, _Distribution] = {}
        self._refused: dict[str, _Count] = {}

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests.setdefault((method, route, str(status)), _Count()).value += 1
            self._seconds.setdefault(route, _Distribution()).observe(seconds)

    def refused(self, status: int) -> None:
        with self._lock:
            self._refused.setdefault(str(status), _Count()).value += 1

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and that format's content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry()  # of its own: a process may hold several servers
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for Prometheus' registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        requests = CounterMetricFamily(
            "hvdgloo_rendezvous_requests",
            "Requests that were admitted, by method, route and status",
            labels=["method", "route", "status"],
        )
        seconds = HistogramMetricFamily(
            "hvdgloo_rendezvous_request_seconds",
            "From a request's head to its answer, long polls' waits included",
            labels=["route"],
        )
        refused = CounterMetricFamily(
            "hvdgloo_rendezvous_refused",
            "Requests that were turned away at the gate (signature, size, slow body), by status",
            labels=["status"],
        )
        with self._lock:
            for labels, count in self._requests.items():
                requests.add_metric(labels, count.value, created=count.created)
            for route, times in self._seconds.items():
                sums = itertools.accumulate(times.counts)
                buckets = [
                    ("+Inf" if bound == math.inf else repr(bound), float(n))
                    for bound, n in zip(_BOUNDS, sums, strict=True)
                ]
                seconds.add_metric([route], buckets, times.total)
                seconds.add_sample(f"{seconds.name}_created", {"route": route}, times.created)
            for status, count in self._refused.items():
                refused.add_metric([status], count.value, created=count.created)
        yield from (requests, seconds, refused)
        arrived = GaugeMetricFamily("hvdgloo_rendezvous_workers", "Workers that are in", labels=["epoch"])
        expected = GaugeMetricFamily(
            "hvdgloo_rendezvous_workers_expected", "Workers that should come", labels=["epoch"]
        )
        for epoch in self._epochs():
            arrived.add_metric([str(epoch["epoch"])], epoch["arrived"])
            expected.add_metric([str(epoch["epoch"])], epoch["expected"])
        yield arrived
        yield expected
        for name, number in self._counts().items():
            yield GaugeMetricFamily(f"hvdgloo_rendezvous_{name}", f"Number of {name.replace('_', ' ')}", value=number)
