"""Write docs/grafana.json, a Grafana dashboard of a job's metrics: ``python docs/generate_dashboard.py``.

A test compares the file with this script's output, and the names in it with the existing metrics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("grafana.json")

_JOB = 'instance="$instance"'
_ON_HOSTS = f'{_JOB}, host=~"$host"'
_RATE = "[$__rate_interval]"

_LARGE, _SMALL = 12, 6
_WIDTH, _HEIGHT, _STAT_HEIGHT = 24, 8, 4

Target = tuple[str, str]
"""A query in PromQL, and the name of its curves."""


def text() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def dashboard() -> dict[str, Any]:
    """Return the dashboard that Grafana imports."""
    panels = _placed([*_stats(), *_of_steps(), *_of_waits(), *_of_hosts()])
    return {
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "title": "hvdgloo job",
        "uid": "hvdgloo-job",
        "tags": ["hvdgloo"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("instance", "Job", "label_values(hvdgloo_job_info, instance)", several=False),
                _variable("host", "Host", f"label_values(hvdgloo_host_up{{{_JOB}}}, host)", several=True),
            ]
        },
        "panels": panels,
    }


def _stats() -> list[dict[str, Any]]:
    return [
        _panel("Ranks", "stat", [(f"hvdgloo_job_size{{{_JOB}}}", "")], "none", _SMALL),
        _panel("Steps per second", "stat", [(f"min(rate(hvdgloo_steps_total{{{_JOB}}}{_RATE}))", "")], "none", _SMALL),
        _panel(
            "Bytes per second",
            "stat",
            [(f"sum(rate(hvdgloo_tensor_bytes_total{{{_JOB}}}{_RATE}))", "")],
            "Bps",
            _SMALL,
        ),
        _panel(
            "Waiting for other ranks",
            "stat",
            [
                (
                    f'sum(rate(hvdgloo_step_seconds_total{{{_JOB}, part="waiting"}}{_RATE}))'
                    f" / sum(rate(hvdgloo_step_seconds_total{{{_JOB}}}{_RATE}))",
                    "",
                )
            ],
            "percentunit",
            _SMALL,
        ),
    ]


def _of_steps() -> list[dict[str, Any]]:
    return [
        _panel(
            "Steps per second of each rank",
            "timeseries",
            [(f"rate(hvdgloo_steps_total{{{_ON_HOSTS}}}{_RATE})", "rank {{rank}} ({{host}})")],
            "none",
        ),
        _panel(
            "A step's time, mean of all ranks",
            "timeseries",
            [
                (
                    f"sum by (part) (rate(hvdgloo_step_seconds_total{{{_ON_HOSTS}}}{_RATE}))"
                    f" / on () group_left sum(rate(hvdgloo_steps_total{{{_ON_HOSTS}}}{_RATE}))",
                    "{{part}}",
                )
            ],
            "s",
            stacked=True,
        ),
        _panel(
            "Bytes per second by plane",
            "timeseries",
            [(f"sum by (plane) (rate(hvdgloo_plane_bytes_total{{{_ON_HOSTS}}}{_RATE}))", "{{plane}}")],
            "Bps",
            stacked=True,
        ),
        _panel(
            "Where an operation's time goes",
            "timeseries",
            [
                (
                    f"sum by (cause) (rate(hvdgloo_operation_seconds_total{{{_ON_HOSTS}}}{_RATE}))"
                    f" / on () group_left sum(rate(hvdgloo_operations_total{{{_ON_HOSTS}}}{_RATE}))",
                    "{{cause}}",
                )
            ],
            "s",
            stacked=True,
        ),
    ]


def _of_waits() -> list[dict[str, Any]]:
    return [
        _panel(
            "Who makes others wait: seconds lost in each second",
            "timeseries",
            [
                (
                    f"topk(10, rate(hvdgloo_caused_wait_seconds_total{{{_JOB}}}{_RATE}))",
                    "rank {{rank}} ({{host}})",
                )
            ],
            "s",
        ),
        _panel(
            "How long the first rank waited for the last one",
            "heatmap",
            [(f"sum by (le) (increase(hvdgloo_round_wait_seconds_bucket{{{_JOB}}}{_RATE}))", "{{le}}")],
            "s",
        ),
        _panel(
            "Stragglers: share of the last steps that a rank was last in",
            "bargauge",
            [(f"hvdgloo_straggler_ratio{{{_JOB}}}", "rank {{rank}} ({{host}})")],
            "percentunit",
        ),
        _panel(
            "Stalls: for how long ranks have waited for an operation",
            "timeseries",
            [(f"max by (host) (hvdgloo_pending_seconds{{{_ON_HOSTS}}})", "{{host}}")],
            "s",
        ),
        _panel(
            "Ranks by what they do",
            "timeseries",
            [(f"hvdgloo_ranks{{{_JOB}}}", "{{state}}")],
            "none",
            stacked=True,
        ),
    ]


def _of_hosts() -> list[dict[str, Any]]:
    return [
        _panel(
            "Processors of hosts",
            "timeseries",
            [
                (f"hvdgloo_host_cpu_ratio{{{_ON_HOSTS}}}", "{{host}} busy"),
                (f"hvdgloo_host_cpu_stolen_ratio{{{_ON_HOSTS}}}", "{{host}} stolen"),
                (f"hvdgloo_host_cpu_throttled_ratio{{{_ON_HOSTS}}}", "{{host}} throttled"),
            ],
            "percentunit",
        ),
        _panel(
            "Memory of hosts",
            "timeseries",
            [
                (
                    f"hvdgloo_host_memory_used_bytes{{{_ON_HOSTS}}} / hvdgloo_host_memory_size_bytes{{{_ON_HOSTS}}}",
                    "{{host}} in use",
                ),
                (f"hvdgloo_host_memory_pressure_ratio{{{_ON_HOSTS}}}", "{{host}} pressure"),
            ],
            "percentunit",
        ),
        _panel(
            "Network of hosts",
            "timeseries",
            [
                (f"rate(hvdgloo_host_network_received_bytes_total{{{_ON_HOSTS}}}{_RATE})", "{{host}} received"),
                (f"rate(hvdgloo_host_network_sent_bytes_total{{{_ON_HOSTS}}}{_RATE})", "{{host}} sent"),
            ],
            "Bps",
        ),
        _panel(
            "GPUs",
            "timeseries",
            [(f"hvdgloo_gpu_utilization_ratio{{{_ON_HOSTS}}}", "{{host}} GPU {{gpu}}")],
            "percentunit",
        ),
        _panel(
            "Clocks of GPUs",
            "timeseries",
            [(f"hvdgloo_gpu_clock_hertz{{{_ON_HOSTS}}}", "{{host}} GPU {{gpu}}")],
            "hertz",
        ),
    ]


def _variable(name: str, label: str, query: str, *, several: bool) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": several,
        "multi": several,
        **({"current": {"text": "All", "value": "$__all"}} if several else {}),
    }


def _panel(
    title: str, kind: str, targets: list[Target], unit: str, width: int = _LARGE, *, stacked: bool = False
) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    custom = {"fillOpacity": 30 if stacked else 0, "stacking": {"mode": "normal" if stacked else "none"}}
    return {
        "title": title,
        "type": kind,
        "datasource": source,
        "gridPos": {"h": _STAT_HEIGHT if kind == "stat" else _HEIGHT, "w": width, "x": 0, "y": 0},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, **({"custom": custom} if kind == "timeseries" else {})},
            "overrides": [],
        },
        "options": {"calculate": False, "yAxis": {"unit": unit}} if kind == "heatmap" else {},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": source,
                "expr": expression,
                "legendFormat": legend,
                "format": "heatmap" if kind == "heatmap" else "time_series",
                "instant": kind == "bargauge",
            }
            for number, (expression, legend) in enumerate(targets)
        ],
    }


def _placed(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number panels, and arrange them in rows from left to right."""
    x = y = 0
    for number, panel in enumerate(panels, 1):
        place = panel["gridPos"]
        if x + place["w"] > _WIDTH:
            x, y = 0, y + panels[number - 2]["gridPos"]["h"]
        place["x"], place["y"] = x, y
        x += place["w"]
        panel["id"] = number
    return panels


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
