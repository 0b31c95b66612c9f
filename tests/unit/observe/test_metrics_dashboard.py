"""The Grafana dashboard asks for metrics and labels that there are, and says which metrics it leaves out."""

from __future__ import annotations

import json
import re

from prometheus_client.parser import text_string_to_metric_families

from hvdgloo._observe import metrics
from tests.support.observed import SimulatedJob
from tests.support.pages import ROOT, generated

NOT_SHOWN = {
    "hvdgloo_came_last_total",
    "hvdgloo_gpu_memory_size_bytes",
    "hvdgloo_gpu_memory_used_bytes",
    "hvdgloo_host_cores",
    "hvdgloo_host_disk_read_bytes_total",
    "hvdgloo_host_disk_written_bytes_total",
    "hvdgloo_job_epoch",
    "hvdgloo_job_start_time_seconds",
    "hvdgloo_plane_busy_seconds_total",
    "hvdgloo_plane_operations_total",
    "hvdgloo_plane_wire_bytes_total",
    "hvdgloo_plane_wire_error_ratio",
    "hvdgloo_process_cpu_seconds_total",
    "hvdgloo_process_resident_memory_bytes",
    "hvdgloo_step_before_first_seconds_total",
}
DASHBOARD = (ROOT / "docs/grafana.json").read_text(encoding="utf-8")


def labels() -> dict[str, set[str]]:
    """Metric to its labels, and those that Prometheus adds."""
    job = SimulatedJob(4, 2, gpus=True)
    job.advance(10)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text(job.observatory)[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    return found


def queries() -> list[str]:
    """All of PromQL that is in it."""
    dashboard = json.loads(DASHBOARD)
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return found


def test_the_file_is_what_its_script_writes() -> None:
    assert generated("dashboard") == DASHBOARD


def test_it_asks_for_metrics_and_labels_that_there_are() -> None:
    known = labels()
    asked = set()
    for query in queries():
        names = re.findall(r"hvdgloo_\w+", query)
        assert names, query
        asked |= {*names}
        for name in names:
            assert name in known, query
        for name, matchers in re.findall(r"(hvdgloo_\w+)\{(.*?)\}", query):
            assert set(re.findall(r"(\w+)=", matchers)) <= known[name], query
        for grouped in re.findall(r"by \((\w+)\)", query):
            assert all(grouped in known[name] for name in names[:1]), query

    shown = {name.removesuffix("_bucket") for name in asked}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known}
    assert families - shown == NOT_SHOWN


def test_curves_are_named_by_labels_that_they_have() -> None:
    known = labels()
    for panel in json.loads(DASHBOARD)["panels"]:
        for target in panel["targets"]:
            grouped = re.search(r"by \((\w+)\)", target["expr"])
            name = re.findall(r"hvdgloo_\w+", target["expr"])[0]
            available = {grouped[1]} if grouped else known[name]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= available, target


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_counters_are_shown_as_rates() -> None:
    for query in queries():
        for counter in re.findall(r"(\w+\()?hvdgloo_\w+_(?:total|bucket)\b", query):
            assert counter in ("rate(", "increase("), query
