"""Draw docs/images/grafana.png: the results of the dashboard's queries for a simulated job, evaluated by Prometheus.

    python docs/draw_dashboard.py

It needs ``prometheus`` and ``promtool`` (Debian's package prometheus) and matplotlib. The job's metrics are written
into a database of Prometheus, as if they had been scraped every 5 s, and each panel's queries are asked of it. So this
also shows that Prometheus accepts them: it fails if a query fails, or if a panel stays empty.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "docs"))

import generate_dashboard  # noqa: E402

from hvdgloo._observe import metrics, words  # noqa: E402
from tests.support.observed import SimulatedJob  # noqa: E402

TARGET = ROOT / "docs/images/grafana.png"
INSTANCE = "trainer:9100"
_MINUTES, _SCRAPE, _STEP = 20, 5, 15
_DEADLINE = 60.0


def history(begin: float) -> Iterator[str]:
    """Yield simulated scrapes in OpenMetrics' format: a rank becomes slow, and another one stalls."""
    job = SimulatedJob(8, 2, slow=None, gpus=True, started=begin)
    series: dict[str, list[str]] = {}
    for second in range(0, 60 * _MINUTES, _SCRAPE):
        if second == 7 * 60:
            job.slow, job.lag = 5, 0.03
        if second == 14 * 60:
            job.stall(2)
        if second == 15 * 60 + 30:
            job.resume()
        job.advance(_SCRAPE)
        for line in metrics.text(job.observatory)[0].decode().splitlines():
            if not line.startswith("#"):
                series.setdefault(line.partition("{")[0].partition(" ")[0], []).append(_stamped(line, job.now))
    for lines in series.values():  # a metric's lines must be together
        yield from lines
    yield "# EOF\n"


def _stamped(line: str, now: float) -> str:
    labelled, _, value = line.rpartition(" ")
    name, _, labels = labelled.partition("{")
    others = labels.rstrip("}")
    return f'{name}{{instance="{INSTANCE}"{"," if others else ""}{others}}} {value} {now}\n'


@contextlib.contextmanager
def prometheus(folder: str, begin: float) -> Iterator[str]:
    """Run a Prometheus that has that history, and yield its address."""
    text = Path(folder, "metrics.txt")
    text.write_text("".join(history(begin)), encoding="utf-8")
    database = Path(folder, "data")
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(database)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    Path(folder, "prometheus.yml").write_text("{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={database}",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        deadline = time.monotonic() + _DEADLINE
        while True:
            try:
                with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
                    break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait()


def curves(address: str, query: str, begin: float) -> list[dict[str, Any]]:
    """Return the curves of a query over the history, each with its labels (``metric``) and ``values``."""
    for variable, value in (("$instance", INSTANCE), ("$host", ".*"), ("$__rate_interval", "1m")):
        query = query.replace(variable, value)
    wanted = {"query": query, "start": begin + 90, "end": begin + 60 * _MINUTES, "step": _STEP}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(wanted)}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def draw(address: str, begin: float) -> None:
    """Draw all panels, placed as in Grafana."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = generate_dashboard.dashboard()["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    pyplot.rcParams.update({"font.size": 6.5, "axes.edgecolor": "#888", "axes.linewidth": 0.5})
    figure = pyplot.figure(figsize=(12, height * 0.3), facecolor="#f4f5f5")
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_axes(
            (
                (place["x"] + 1.1) / 24,
                1 - (place["y"] + place["h"] - 0.9) / height,
                (place["w"] - 1.4) / 24,
                (place["h"] - 2) / height,
            )
        )
        axes.set_title(panel["title"], loc="left", fontsize=7.5, fontweight="bold")
        shown = 0
        for target in panel["targets"]:
            found = curves(address, target["expr"], begin)
            shown += len(found)
            _draw_target(axes, panel, target, found, begin)
        if not shown:
            raise SystemExit(f"nothing on the panel {panel['title']!r}")
        if panel["type"] == "timeseries":
            axes.legend(loc="upper center", fontsize=5, frameon=False, ncols=min(shown, 5), columnspacing=1)
            axes.set_ylim(0, 1.3 * axes.get_ylim()[1] or 1)
            axes.set_xlabel("minutes", fontsize=5, labelpad=1)
            axes.yaxis.set_major_formatter(lambda value, _, panel=panel: _number(value, panel))
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, dpi=110)


def _draw_target(axes: Any, panel: dict[str, Any], target: dict[str, Any], found: list[Any], begin: float) -> None:
    kind = panel["type"]
    if kind == "stat":
        axes.axis("off")
        axes.text(0.5, 0.4, _number(float(found[0]["values"][-1][1]), panel), ha="center", va="center", fontsize=18)
    elif kind == "bargauge":
        names = [_legend(target, curve) for curve in found]
        axes.barh(names, [float(curve["values"][-1][1]) for curve in found], height=0.4, color="#f2495c")
        axes.set_yticks([])
        for row, name in enumerate(names):
            axes.text(0.02, row, name, va="center")
        axes.set_xlim(0, 1)
        axes.set_ylim(-1, len(names))
        axes.xaxis.set_major_formatter(lambda value, _: words.share(value))
    elif kind == "heatmap":
        found.sort(key=lambda curve: float(curve["metric"]["le"]))
        rows = [[float(value) for _, value in curve["values"]] for curve in found if curve["metric"]["le"] != "+Inf"]
        counts = [rows[0]] + [
            [high - low for low, high in zip(before, row, strict=True)] for before, row in itertools.pairwise(rows)
        ]
        axes.imshow(counts, aspect="auto", origin="lower", cmap="YlOrRd", extent=(1.5, _MINUTES, 0, len(counts)))
        axes.set_yticks([4.5, 8.5, 12.5], ["1.6 ms", "26 ms", "410 ms"])
    else:
        below: dict[float, float] = {}
        for curve in found:
            points = [(float(at), float(value)) for at, value in curve["values"]]
            minutes = [(at - begin) / 60 for at, _ in points]
            values = [value for _, value in points]
            if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal":
                bottom = [below.get(at, 0.0) for at, _ in points]
                top = [low + value for low, value in zip(bottom, values, strict=True)]
                axes.fill_between(minutes, bottom, top, alpha=0.6, linewidth=0.3, label=_legend(target, curve))
                below.update((at, high) for (at, _), high in zip(points, top, strict=True))
            else:
                axes.plot(minutes, values, linewidth=0.8, label=_legend(target, curve))


def _legend(target: dict[str, Any], curve: dict[str, Any]) -> str:
    text: str = target["legendFormat"]
    for label, value in curve["metric"].items():
        text = text.replace(f"{{{{{label}}}}}", value)
    return text


def _number(value: float, panel: dict[str, Any]) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if unit == "Bps":
        return f"{words.size(value)}/s"
    if unit == "hertz":
        return f"{words.number(value / 1e9)} GHz"
    return {"percentunit": words.share, "s": words.duration}.get(unit, words.number)(value)


def main() -> None:
    begin = float(int(time.time() // 3600) * 3600 - 7200)
    with tempfile.TemporaryDirectory() as folder, prometheus(folder, begin) as address:
        draw(address, begin)


if __name__ == "__main__":
    main()
