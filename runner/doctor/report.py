"""The output of ``hvdgloo-run doctor``: tables for people, JSON for programs. Pure."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvdgloo._platform.tables import aligned
from hvdgloo.runner.agent.facts import Facts
from hvdgloo.runner.doctor.rules import Clock, Finding, Severity, Visit, listed, size, verdict
from hvdgloo.version import __version__

_WORDS = {Severity.STOP: "STOP", Severity.WARNING: "warning", None: "ok"}


def as_text(visits: Sequence[Visit], findings: Sequence[Finding], width: int = 80) -> str:
    """Format tables of all hosts, the problems with their remedies, and the conclusion."""
    blocks = [
        _table(("host", "verdict", "python", "cores", "memory", "/dev/shm", "files", "clock"),
               [_machine(visit, findings) for visit in visits]),
        _packages(visits),
        _gpus(visits),
        _addresses(visits),
        *(_finding(finding, width) for finding in findings),
        _conclusion(visits, findings),
    ]  # fmt: skip
    return "\n\n".join(block for block in blocks if block) + "\n"


def as_json(visits: Sequence[Visit], findings: Sequence[Finding]) -> str:
    """Format the findings and all facts about each host."""
    return json.dumps(
        {
            "version": __version__,
            "ok": all_well(findings),
            "hosts": [_host(visit, findings) for visit in visits],
            "findings": [
                {"severity": f.severity.value, "hosts": list(f.hosts), "text": f.text, "remedy": f.remedy}
                for f in findings
            ],
        },
        indent=2,
    ) + "\n"  # fmt: skip


def all_well(findings: Sequence[Finding]) -> bool:
    """Tell whether nothing was found that will stop a job."""
    return not any(finding.severity is Severity.STOP for finding in findings)


def _host(visit: Visit, findings: Sequence[Finding]) -> dict[str, Any]:
    worst = verdict(visit.host, findings)
    return {
        "host": visit.host,
        "slots": visit.slots,
        "verdict": worst.value if worst is not None else "ok",
        "facts": visit.facts.to_json() if visit.facts is not None else None,
        "clock": {"offset": visit.clock.offset, "uncertainty": visit.clock.uncertainty} if visit.clock else None,
        "addresses": [{"address": address, "reached": said} for address, said in visit.addresses],
    }


# Tables.


def _machine(visit: Visit, findings: Sequence[Finding]) -> tuple[str, ...]:
    facts = visit.facts
    word = _WORDS[verdict(visit.host, findings)]
    if facts is None:
        return visit.host, word
    return (
        visit.host,
        word,
        facts.python,
        _of(facts.cores, facts.machine_cores),
        _memory(facts),
        size(facts.shm_size) or "none",
        "any" if facts.open_files is None else str(facts.open_files),
        _clock(visit.clock),
    )


def _of(part: int, whole: int) -> str:
    return str(part) if part == whole else f"{part} of {whole}"


def _memory(facts: Facts) -> str:
    limit = facts.memory_limit
    if limit is not None and (facts.memory is None or limit < facts.memory):
        return f"{size(limit)} of {size(facts.memory)}"
    return size(facts.memory)


def _clock(clock: Clock | None) -> str:
    if clock is None:
        return ""
    # A difference smaller than the measurement's own error counts as none.
    offset = 0.0 if abs(clock.offset) <= clock.uncertainty else clock.offset
    return f"{offset:+.3f} s" if offset else "same"


def _packages(visits: Sequence[Visit]) -> str:
    """Format the versions of the packages that are installed on any host."""
    seen = [(visit, visit.facts) for visit in visits if visit.facts is not None]
    names = list(dict.fromkeys(name for _, facts in seen for name in facts.packages))
    rows = [(visit.host, *(_version(facts, name) for name in names)) for visit, facts in seen]
    return _table(("host", *names), rows) if rows else ""


def _version(facts: Facts, package: str) -> str:
    if package not in facts.packages:
        return "-"
    return facts.packages[package] or "unknown"


def _gpus(visits: Sequence[Visit]) -> str:
    rows = []
    for visit in visits:
        if visit.facts is not None and (visit.facts.gpus or visit.facts.visible_gpus):
            kinds = Counter((gpu.name, gpu.memory) for gpu in visit.facts.gpus)
            what = ", ".join(f"{count} x {name}, {size(memory)}" for (name, memory), count in kinds.items())
            unknown = "-" if visit.facts.amd_gpus else "?"
            what = what or (f"{visit.facts.amd_gpus} x AMD" if visit.facts.amd_gpus else "?")
            rows.append((visit.host, what, str(visit.facts.visible_gpus), visit.facts.driver or unknown))
    return _table(("host", "GPUs", "visible", "driver"), rows) if rows else ""


def _addresses(visits: Sequence[Visit]) -> str:
    rows = [
        (visit.host if number == 0 else "", address, said)
        for visit in visits
        for number, (address, said) in enumerate(visit.addresses)
    ]
    return _table(("host", "address", "reached by"), rows) if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(aligned([head, *rows]))


# Findings.


def _finding(finding: Finding, width: int) -> str:
    word = f"{_WORDS[finding.severity]}:".ljust(9)
    return "\n".join(
        [
            *_wrapped(f"{word}{listed(finding.hosts, 8)}: {finding.text}", width, " " * 9),
            *(_wrapped(f"{'':9}-> {finding.remedy}", width, " " * 12) if finding.remedy else []),
        ]
    )


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Wrap a text to lines of at most ``width`` characters; existing line breaks are kept."""
    first, *others = text.split("\n")
    lines = _fill(first, width, "", indent)
    for line in others:
        lines += _fill(line.strip(), width, indent, f"{indent}  ")
    return lines


def _fill(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _conclusion(visits: Sequence[Visit], findings: Sequence[Finding]) -> str:
    bad = [visit.host for visit in visits if verdict(visit.host, findings) is Severity.STOP]
    if bad:
        return (
            f"A job would not start, or would not get far: {len(bad)} of {len(visits)} hosts cannot "
            f"take part as they are."
        )
    if findings:
        return "A job can start. The warnings above may make it slow, or make it fail later."
    return f"All is well: {'this host is' if len(visits) == 1 else f'all {len(visits)} hosts are'} ready for a job."
