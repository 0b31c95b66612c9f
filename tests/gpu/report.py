"""The report of ``make test-gpu``: one file that a user can send, with all that is needed to judge its results."""

from __future__ import annotations

import functools
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from hvdgloo.version import __version__
from tests.support.launching import run_command

NAME = "gpu-report.md"
_TIME = 20.0


@dataclass
class Results:
    """The results of a session's tests.

    Attributes:
        tests: for each test its name, its outcome in a word, the seconds it took, and why it failed or was skipped.
        notes: measurements by the name of what was measured.
    """

    tests: list[tuple[str, str, float, str]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    found = {"hvdgloo": __version__, "Python": sys.version.split()[0], "system": platform.platform()}
    try:
        import torch
    except ImportError:
        return {**found, "torch": "not installed"}
    found["torch"] = torch.__version__
    found["CUDA of torch"] = str(torch.version.cuda)
    found["ROCm of torch"] = str(torch.version.hip)
    from hvdgloo._backends import gpu

    code = gpu.nccl_version()
    found["NCCL"] = f"{code // 10000}.{code // 100 % 100}.{code % 100}" if code else "none"
    return found


def gpus() -> list[str]:
    """Each visible GPU in a line."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    lines = []
    for index in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(index)
        size = known.total_memory / (1 << 30)
        lines.append(f"{index}: {known.name}, {size:.1f} GiB, compute capability {known.major}.{known.minor}")
    return lines


@functools.cache
def topology() -> str:
    """Return how the GPUs are connected, in their driver's words."""
    for command in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo"]):
        if shutil.which(command[0]):
            done = run_command(command, timeout=_TIME)
            return done.stdout.rstrip() or done.stderr.rstrip()
    return "neither nvidia-smi nor rocm-smi is installed"


def text(
    results: Results, versions: Mapping[str, str], gpus: Sequence[str], topology: str, when: datetime | None = None
) -> str:
    """The report in Markdown."""
    when = when or datetime.now(timezone.utc)
    counts = {outcome: sum(each == outcome for _, each, _, _ in results.tests) for outcome in _outcomes(results)}
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no tests were run"
    lines = [
        "# hvdgloo on GPUs: a report of make test-gpu",
        "",
        f"{when:%Y-%m-%d %H:%M} UTC. {len(gpus)} GPU{'s' if len(gpus) != 1 else ''}. **{summary}.**",
        "",
        "| what | version |",
        "|---|---|",
        *(f"| {name} | {version} |" for name, version in versions.items()),
        "",
        "## GPUs",
        "",
        *(f"- {line}" for line in gpus or ["none that torch can use"]),
        "",
        "```",
        topology,
        "```",
        "",
        "## Results",
        "",
        "| test | result | seconds |",
        "|---|---|---|",
        *(f"| {name} | {outcome} | {seconds:.1f} |" for name, outcome, seconds, _ in results.tests),
        "",
    ]
    if results.notes:
        lines += ["## Times", "", *(f"- {name}: {value}" for name, value in results.notes.items()), ""]
    for name, outcome, _, reason in results.tests:
        if reason:
            lines += [f"### {name}: {outcome}", "", "```", reason.replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _outcomes(results: Results) -> Iterable[str]:
    return dict.fromkeys(outcome for _, outcome, _, _ in results.tests)


def write(results: Results, folder: Path) -> Path:
    """Write the report of this machine.

    Returns:
        the file.
    """
    path = folder / NAME
    path.write_text(text(results, versions(), gpus(), topology()), encoding="utf-8")
    return path
