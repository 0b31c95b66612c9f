"""The job's Prometheus metrics: their names and labels keep Prometheus' conventions, their values are the ranks'."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvdgloo._observe import metrics
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.samples import OuterSteps, Sample
from tests.support.observed import MIB, SimulatedJob
from tests.support.pages import ROOT

LABELS = {
    "rank",
    "host",
    "plane",
    "process_set",
    "part",
    "cause",
    "state",
    "gpu",
    "model",
    "job_id",
    "version",
    "le",
    "name",
}


def values(observatory: Observatory) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text, content_type = metrics.text(observatory)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(observatory: Observatory, name: str, **labels: str) -> float:
    return values(observatory)[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def job() -> SimulatedJob:
    job = SimulatedJob(4, 2, gpus=True, logs=True, meets_every=8)
    job.advance(30)
    (host, last), *_ = job.observatory.samples()
    job.observatory.observe(host, msgspec.structs.replace(last, outer=OuterSteps(3, 100, 0.5, 8, job.now)))
    return job


def problems(text: str) -> list[str]:
    """Return the complaints of ``promtool check metrics`` (prometheus/util/promlint), and of its parser."""
    found = []
    for family in text_string_to_metric_families(text):
        names = {sample.name for sample in family.samples} or {family.name}
        name = family.name + ("_total" if family.type == "counter" else "")

        def wrong(what: str, name: str = name) -> None:
            found.append(f"{name}: {what}")

        if not family.documentation:
            wrong("no help text")
        if family.type == "counter" and not all(one.endswith("_total") for one in names):
            wrong('counters should end with "_total"')
        if family.type != "counter" and family.name.endswith("_total"):
            wrong('only counters should end with "_total"')
        if family.type not in ("histogram", "summary") and re.search(r"_(bucket|count|sum)$", family.name):
            wrong("a suffix of histograms")
        if re.search(r"[A-Z:]", family.name) or not re.fullmatch(r"[a-z_][a-z0-9_]*", family.name):
            wrong("not in lower case with underscores")
        if re.search(r"_(gauge|counter|histogram|summary|metric)(_|$)", family.name):
            wrong("names its type")
        words = family.name.split("_")
        if {"milliseconds", "ms", "minutes", "hours", "percent", "kib", "mib", "gib", "kb", "mb", "mhz", "s", "sec"} & {
            *words
        }:
            wrong("no base unit, or an abbreviated one")
        units = {"seconds", "bytes", "ratio", "hertz"}
        if units & set(words) and words[-1] not in units:
            wrong("the unit is not at the end")
        for sample in family.samples:
            for label in sample.labels:
                if not re.fullmatch(r"[a-z_]+", label) or label in family.name.split("_")[-1:]:
                    wrong(f"label {label}")
    return found


def test_names_keep_prometheus_s_conventions(job: SimulatedJob) -> None:
    text = metrics.text(job.observatory)[0].decode()

    assert problems(text) == []
    assert text.count("# TYPE") > 30


@pytest.mark.parametrize(
    "text",
    [
        "# HELP a_count x\n# TYPE a_count gauge\na_count 1\n",
        "# TYPE a_seconds gauge\na_seconds 1\n",
        "# HELP a_total x\n# TYPE a_total gauge\na_total 1\n",
        "# HELP aSeconds x\n# TYPE aSeconds gauge\naSeconds 1\n",
        "# HELP a_ms x\n# TYPE a_ms gauge\na_ms 1\n",
        "# HELP a_seconds_waited x\n# TYPE a_seconds_waited gauge\na_seconds_waited 1\n",
        "# HELP a_gauge x\n# TYPE a_gauge gauge\na_gauge 1\n",
        '# HELP a_rank x\n# TYPE a_rank gauge\na_rank{rank="1"} 1\n',
    ],
)
def test_names_that_break_the_conventions_are_found(text: str) -> None:
    assert len(problems(text)) == 1


def test_labels_are_the_same_everywhere(job: SimulatedJob) -> None:
    labels = {label for _, labels in values(job.observatory) for label, _ in labels}

    assert labels == LABELS


def test_values_are_what_ranks_and_hosts_have_counted(job: SimulatedJob) -> None:
    of = job.observatory
    steps = 270

    assert value(of, "hvdgloo_steps_total", rank="3", host="h2") == steps
    assert value(of, "hvdgloo_operations_total", rank="0", host="h1") == steps * 3
    assert (
        value(of, "hvdgloo_plane_bytes_total", rank="1", host="h1", plane="gloo", process_set="0") == steps * 24 * MIB
    )
    assert value(of, "hvdgloo_step_seconds_total", rank="0", host="h1", part="waiting") == pytest.approx(
        (steps - 1) * 0.014
    )
    assert value(of, "hvdgloo_step_seconds_total", rank="3", host="h2", part="waiting") == 0.0
    assert value(of, "hvdgloo_operation_seconds_total", rank="0", host="h1", cause="negotiation") == pytest.approx(
        (steps - 1) * 0.014
    )
    assert value(of, "hvdgloo_host_cpu_stolen_ratio", host="h2") == 0.12
    assert value(of, "hvdgloo_host_up", host="h1") == 1.0
    assert value(of, "hvdgloo_gpu_clock_hertz", host="h1", gpu="0", model="NVIDIA H100") == 1.98e9
    assert value(of, "hvdgloo_ranks", state="computing") == 4
    assert value(of, "hvdgloo_job_size") == 4
    assert value(of, "hvdgloo_straggler_ratio", rank="3", host="h2") > 0.8
    assert value(of, "hvdgloo_job_info", job_id="simulated", state="running", version="0.0") == 1.0


def test_waits_are_a_histogram_whose_sum_is_the_time_that_was_lost(job: SimulatedJob) -> None:
    of = job.observatory
    caused = sum(number for (name, _), number in values(of).items() if name == "hvdgloo_caused_wait_seconds_total")
    bounds = [
        (float(dict(labels)["le"]), number)
        for (name, labels), number in values(of).items()
        if name == "hvdgloo_round_wait_seconds_bucket"
    ]

    assert value(of, "hvdgloo_round_wait_seconds_count") == 270
    assert value(of, "hvdgloo_round_wait_seconds_sum") == pytest.approx(caused) == pytest.approx(270 * 0.013, rel=0.1)
    assert sorted(bounds)[-1] == (float("inf"), 270)
    assert dict(bounds)[0.0064] < 30 < 240 < dict(bounds)[0.0256]
    assert [number for _, number in sorted(bounds)] == sorted(number for _, number in bounds)


def test_a_job_of_which_nothing_is_known_yet_has_metrics() -> None:
    observatory = Observatory(job="j", command="c", started=1.0, versions={})

    assert value(observatory, "hvdgloo_job_size") == 0
    assert problems(metrics.text(observatory)[0].decode()) == []


def test_names_of_hosts_may_be_anything() -> None:
    odd = 'h"1\\\n\udcff'
    observatory = Observatory(job="j", command="c", started=1.0, versions={})
    observatory.observe(odd, Sample(rank=0, size=1, epoch=0, pid=1, at=1.0, operations=5))
    observatory.tick()

    assert value(observatory, "hvdgloo_operations_total", rank="0", host='h"1\\\n\\xff') == 5


def test_every_metric_is_documented(job: SimulatedJob) -> None:
    page = (ROOT / "docs/observing.md").read_text(encoding="utf-8")
    families = text_string_to_metric_families(metrics.text(job.observatory)[0].decode())
    names = {family.name + {"counter": "_total", "info": "_info"}.get(family.type, "") for family in families}
    assert len(names) > 30
    assert names == set(re.findall(r"`(hvdgloo_\w+)`", page))


def logged_loss(observatory: Observatory) -> float:
    return values(observatory)["hvdgloo_logged_value", frozenset({("name", "loss")})]


def test_numbers_and_progress_of_the_program_are_metrics() -> None:
    job = SimulatedJob(2, 1, slow=None, logs=True)
    assert not any(name.startswith(("hvdgloo_logged", "hvdgloo_progress")) for name, _ in values(job.observatory))
    job.advance(30)
    shown = job.observatory.snapshot().job
    assert shown.progress is not None
    assert logged_loss(job.observatory) == shown.logged["loss"]
    assert value(job.observatory, "hvdgloo_progress_ratio") == shown.progress.share
    assert value(job.observatory, "hvdgloo_progress_remaining_seconds") == shown.progress.remaining
    assert value(job.observatory, "hvdgloo_progress_epoch") == shown.progress.epoch
    nothing = job.observatory.samples()[0][1]
    job.observatory.observe("h1", msgspec.structs.replace(nothing, logged=[("loss", math.nan)]))
    job.observatory.tick()
    assert math.isnan(logged_loss(job.observatory))
    assert problems(metrics.text(job.observatory)[0].decode()) == []
