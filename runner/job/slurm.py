"""A Slurm allocation, as described by its variables: node names, and the number of workers per node. Pure.

``scontrol show hostnames`` would expand a node list too, but it may be missing where the launcher runs (in a container,
for example), so the expansion is done here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import HostEntry

_MOST_NODES = 100_000
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_GPUS = re.compile(r"(?:[^:,]+:)*([0-9]+)(?:\([^)]*\))?")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Allocation:
    """The nodes of the Slurm job that this process belongs to.

    Attributes:
        job_id: Slurm's number of the job.
        hosts: the nodes in Slurm's order; without slots if Slurm was asked for neither tasks nor GPUs.
        source: the variable that the slots come from.
        launchers: how many tasks of this process's job step run the launcher.
    """

    job_id: str
    hosts: tuple[HostEntry, ...]
    source: str = ""
    launchers: int = 1


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that the variables describe; None outside of one.

    Raises:
        ConfigError: a variable cannot be parsed; the text names it.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    name = next((name for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)
    if not job_id or name is None:
        return None
    nodes = expand(environ[name], name)
    slots, source = _slots(environ, len(nodes))
    launchers = environ.get("SLURM_STEP_NUM_TASKS", "1")
    return Allocation(
        job_id,
        tuple(HostEntry(node, count) for node, count in zip(nodes, slots, strict=True)),
        source,
        int(launchers) if launchers.isdecimal() else 1,
    )


def expand(text: str, source: str = "node list") -> tuple[str, ...]:
    """Expand ``a[001-003,7],b1`` to the names of its nodes, in order.

    Raises:
        ConfigError: ``text`` cannot be parsed; the error names ``source``.
    """
    nodes: list[str] = []
    for item in _items(text, source):
        for node in _expand_item(item, text, source):
            if _NODE.fullmatch(node) is None:
                raise _malformed(text, source, f"{node!r} is not the name of a node")
            nodes.append(node)
            if len(nodes) > _MOST_NODES:
                raise _malformed(text, source, f"more than {_MOST_NODES} nodes")
    return tuple(dict.fromkeys(nodes))


def _items(text: str, source: str) -> Iterator[str]:
    """Split at the commas that are outside of brackets."""
    item, depth = "", 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _malformed(text, source, "its brackets do not match")
        if letter == "," and depth == 0:
            yield item
            item = ""
        else:
            item += letter
    if depth:
        raise _malformed(text, source, "its brackets do not match")
    yield item


def _expand_item(item: str, text: str, source: str) -> Iterator[str]:
    """Expand one name with any number of brackets; the last bracket counts fastest."""
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    ranges, _, tail = rest.partition("]")
    for number in _numbers(ranges, text, source):
        for end in _expand_item(tail, text, source):
            yield head + number + end


def _numbers(ranges: str, text: str, source: str) -> Iterator[str]:
    """Expand ``001-003,7`` to ``001``, ``002``, ``003``, ``7``: each as wide as the lower bound is written."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed(text, source, f"{part!r} in brackets is neither a number nor a range of numbers")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high) or int(high) - int(low) > _MOST_NODES:
            raise _malformed(text, source, f"{part!r} is not a range from a lower to a higher number")
        yield from (f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))


def _malformed(text: str, source: str, reason: str) -> ConfigError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ConfigError(f"{source}={shown} cannot be understood: {reason}; name the hosts with -H")


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[Sequence[int | None], str]:
    """Return the number of workers for each node, and the variable that it comes from.

    The requested tasks take precedence over GPUs. ``SLURM_TASKS_PER_NODE`` is always set, but follows the number of
    cores if no tasks were requested.
    """
    if environ.get("SLURM_NTASKS_PER_NODE"):
        name = "SLURM_NTASKS_PER_NODE"
        return [_positive(environ[name], name)] * nodes, name
    if environ.get("SLURM_NTASKS") and environ.get("SLURM_TASKS_PER_NODE"):
        name = "SLURM_TASKS_PER_NODE"
        return _counts(environ[name], name, nodes), name
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environ.get(name):
            return [_gpus(environ[name], name)] * nodes, name
    if environ.get("SLURM_GPUS"):
        name = "SLURM_GPUS"
        total = _gpus(environ[name], name)
        if total >= nodes:
            share, more = divmod(total, nodes)
            return [share + (index < more) for index in range(nodes)], name
    if environ.get("SLURM_TASKS_PER_NODE"):
        name = "SLURM_TASKS_PER_NODE"
        return _counts(environ[name], name, nodes), name
    return [None] * nodes, ""


def _counts(text: str, name: str, nodes: int) -> list[int]:
    """Expand ``2(x3),1`` to 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[1]) < 1 or int(match[2] or 1) > _MOST_NODES:
            raise ConfigError(f"{name}={text} cannot be understood: {part!r}; name the hosts with -H")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        raise ConfigError(
            f"{name}={text} describes {len(counts)} nodes, but the job has {nodes}; name the hosts with -H"
        )
    return counts


def _gpus(text: str, name: str) -> int:
    """Sum up ``4``, ``a100:4``, ``gpu:a100:2,gpu:v100:2``."""
    matches = [_GPUS.fullmatch(part.strip()) for part in text.split(",")]
    total = sum(int(match[1]) for match in matches if match is not None)
    if None in matches or total < 1:
        raise ConfigError(f"{name}={text} cannot be understood as a number of GPUs; name the hosts with -H")
    return total


def _positive(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"{name}={text} is not a number of tasks; name the hosts with -H")
    return int(text)
