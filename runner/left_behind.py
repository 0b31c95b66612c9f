"""Files that a job has left, for the end of its summary: their paths, how to open them, and what they lack."""

from __future__ import annotations

import glob
import os
import shlex
from dataclasses import replace

from hvdgloo.runner.console.console import Console
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.launch_result import LaunchResult

_CLOCKS = 5.0  # seconds by which a file server's clock may differ from ours


def with_files(report: LaunchResult, spec: LaunchSpec, console: Console, *, elsewhere: str) -> LaunchResult:
    """Add the files other than the page's to a report.

    Args:
        elsewhere: the host of rank 0, unless it is this machine.
    """
    files, unwritten = [], list(console.unwritten)
    first = report.outcome.first
    if first is not None and (folder := console.folder(first.rank)):
        files.append(f"the output of {'all ranks' if first.rank is None else f'rank {first.rank}'} is in {folder}")
    if spec.config.first_timeline:
        path = os.path.join(spec.cwd, spec.config.first_timeline)
        if found := _traces(path, console.opened):
            from hvdgloo._observe.merging import incomplete

            files.append(_opened(found, path))
            unwritten += [f"the timeline {each}: {reason}" for each in found if (reason := incomplete(each))]
        elif elsewhere and not report.outcome.exit_code:
            files.append(f"the timeline is in {path} on host {elsewhere}; open it in ui.perfetto.dev")
    return replace(report, files=tuple(files), unwritten=tuple(unwritten))


def _traces(path: str, began: float) -> list[str]:
    """Return the job's traces on this machine, in the order of ranks."""
    names = glob.glob(glob.escape(path).replace(glob.escape("{rank}"), "*"))
    fresh = [name for name in names if os.path.isfile(name) and os.path.getmtime(name) >= began - _CLOCKS]
    return sorted(fresh, key=lambda name: (len(name), name))


def _opened(found: list[str], path: str) -> str:
    """Describe where traces are and how to open them."""
    if len(found) == 1:
        return f"the timeline is in {found[0]}; open it in ui.perfetto.dev"
    names = "*".join(shlex.quote(part) if part else "" for part in path.split("{rank}"))
    return (
        f"the timelines of {len(found)} ranks are in {path}; put them into one file for ui.perfetto.dev with "
        f"hvdgloo-run timeline merge all.json {names}"
    )
