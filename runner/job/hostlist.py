"""Parsing of host lists and host files. Pure, except for reading a host file.

A host without a number of slots has one for each GPU that its agent reports, or one if there is no GPU. Until its agent
reports, it counts as one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvdgloo._platform.spelling import in_one_line
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Slot, assign
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.topology import counted_slots

MOST_WORKERS = 65536
"""Limit for one job. No cluster has more; a larger number is a typing error."""

_LEAST_LIMIT = 256
_PER_CORE = 32
_CROWD_PER_CORE = 8

_USER = r"(?:(?P<user>[^\s:,@\[\]]+)@)?"
_ITEM = re.compile(_USER + r"(?P<name>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:,@\[\]]+)(?::(?P<slots>[0-9]+))?")
_FILE_WORD = re.compile(r"(?P<key>[A-Za-z_-]+)\s*=\s*(?P<value>\S+)")
_IGNORED_WORDS = frozenset({"max_slots", "max-slots"})


@dataclass(frozen=True)
class _Mention:
    """A host, and the place that mentions it."""

    host: HostEntry
    where: str


def parse_hosts(text: str) -> tuple[HostEntry, ...]:
    """Parse ``name:slots,user@name:slots,[IPv6 address]:slots,...``.

    Raises:
        ConfigError: an item cannot be parsed, or a host occurs twice; the text names it.
    """
    items = [item.strip() for item in text.split(",")]
    mentions = []
    for number, item in enumerate(items, start=1):
        if not text.strip():
            raise ConfigError("--hosts (-H) names no host; write for example: -H h1:4,h2:4, or leave it out")
        where = f"--hosts {in_one_line(text)}" + (f", item {number}" if len(items) > 1 else "")
        if not item:
            raise ConfigError(f"{where} is empty; write for example: h1:4,h2:4")
        mentions.append(_Mention(_parse_item(item, where, "h1:4,h2:4"), where))
    return _merged(mentions)


def read_hostfile(path: str) -> tuple[HostEntry, ...]:
    """Read one host per line: ``name slots=4``, ``name:4`` or ``name``; ``#`` begins a comment.

    ``max_slots`` is accepted but has no meaning here.

    Raises:
        ConfigError: the file cannot be read, or a line cannot be parsed; the text names it.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--hostfile {path}: the file is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--hostfile {path}: {reason}") from None
    mentions = list(_parse_lines(lines, f"--hostfile {path}"))
    if not mentions:
        raise ConfigError(f"--hostfile {path}: there are no hosts in it; write for example: h1 slots=4")
    return _merged(mentions)


def parse_line(line: str, where: str) -> HostEntry:
    """Parse one host as a discovery script prints it: ``name:slots`` or ``name``.

    Raises:
        ConfigError: it cannot be parsed; the text begins with ``where``.
    """
    return _parse_item(_bracketed(line), where, "h1:4", one_a_line=True)


def _parse_lines(lines: Sequence[str], source: str) -> Iterable[_Mention]:
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split(maxsplit=1)
        if words:
            where = f"{source}, line {number}"
            host = _parse_item(_bracketed(words[0]), where, "h1 slots=4", one_a_line=True)
            yield _Mention(_with_words(host, words[1] if len(words) > 1 else "", where), where)


def _bracketed(name: str) -> str:
    """Put an IPv6 address in brackets, which files may omit: there, separate words give the slots."""
    try:
        return f"[{name}]" if ipaddress.ip_address(name).version == 6 else name
    except ValueError:
        return name


def _with_words(host: HostEntry, text: str, where: str) -> HostEntry:
    """Apply the words after a host in a line of a file: ``slots=4 max_slots=8``."""
    rest = text
    while rest:
        match = _FILE_WORD.match(rest)
        if match is None or (match["key"] != "slots" and match["key"] not in _IGNORED_WORDS):
            raise ConfigError(f"{where}: {rest!r} is not understood; write for example: {host.name} slots=4")
        if match["key"] == "slots":
            if host.slots is not None:
                raise ConfigError(f"{where}: host {host.name} has two numbers of slots")
            host = replace(host, slots=_slots(match["value"], host.name, where))
        rest = rest[match.end() :].strip()
    return host


def _parse_item(item: str, where: str, example: str, *, one_a_line: bool = False) -> HostEntry:
    match = _ITEM.fullmatch(item) if item.isprintable() else None
    if match is None or match["name"].startswith("-") or (match["user"] or "").startswith("-"):
        hint = ""
        if one_a_line and ("," in item or len(item.split()) > 1):
            hint = ", and each host on a line of its own"
        elif len(item.split()) > 1:
            hint = " (with commas, without spaces)"
        elif item.count(":") > 1 and "[" not in item:
            hint = "; an IPv6 address must be in brackets"
        raise ConfigError(f"{where}: {item!r} is not a host with a number of slots; write for example: {example}{hint}")
    name = match["name"].strip("[]")
    slots = None if match["slots"] is None else _slots(match["slots"], name, where)
    return HostEntry(name, slots, match["user"] or "")


def _slots(text: str, name: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{where}: {text!r} is not a number of slots; write for example: {name} slots=4")
    if int(text[:12]) < 1:
        raise ConfigError(f"{where}: host {name} has no slots; leave it out, or give it at least one")
    return int(text[:12])


def _merged(mentions: Iterable[_Mention]) -> tuple[HostEntry, ...]:
    """Return each host once. A host that batch systems list several times without slots has one slot per mention."""
    found: dict[str, list[_Mention]] = {}
    for mention in mentions:
        found.setdefault(mention.host.name, []).append(mention)
    return tuple(_merge(same) for same in found.values())


def _merge(mentions: Sequence[_Mention]) -> HostEntry:
    first = mentions[0].host
    if len(mentions) == 1:
        return first
    if any(mention.host != HostEntry(first.name, None, first.user) for mention in mentions):
        raise ConfigError(
            f"{mentions[1].where}: host {first.name} is given twice (first in {mentions[0].where}); give it once, "
            "with all its slots"
        )
    return replace(first, slots=len(mentions))


# Before and after the agents have reported.


def shortlist(hosts: Sequence[HostEntry], np: int | None) -> tuple[HostEntry, ...]:
    """Return the hosts that may be needed: the first ones that have ``np`` slots together, or all if it is not given.

    Raises:
        ConfigError: they have fewer slots (the text has both numbers), or more than a job can have.
    """
    known = [host.slots for host in hosts if host.slots is not None]
    if np is None:
        _check_total(sum(known))
        return tuple(hosts)
    if np > MOST_WORKERS:
        raise ConfigError(f"-np {np}: a job has at most {MOST_WORKERS} processes")
    if len(known) == len(hosts) and sum(known) < np:
        raise too_few(hosts, np)
    chosen: list[HostEntry] = []
    for host in hosts:
        if sum(host.slots or 1 for host in chosen) >= np:
            break
        chosen.append(host)
    return tuple(chosen)


def too_few(hosts: Sequence[HostEntry], np: int) -> ConfigError:
    """Return the error for hosts that have fewer slots than ``np``. All slots must be known."""
    total = sum(host.slots or 1 for host in hosts)
    listed = ", ".join(map(str, hosts[:16])) + (f" and {len(hosts) - 16} more hosts" if len(hosts) > 16 else "")
    share = -(-np // len(hosts))
    example = ",".join(f"{host.name}:{share}" for host in hosts[:3]) + (",..." if len(hosts) > 3 else "")
    return ConfigError(
        f"{np} processes were requested, but the hosts have only {counted_slots(total)} ({listed}); give more slots "
        f"(-H {example}) or a smaller -np"
    )


def with_slots(hosts: Sequence[HostEntry], gpus: Sequence[int]) -> tuple[HostEntry, ...]:
    """Return the same hosts, each with a number of slots.

    Args:
        gpus: the number of GPUs that each host's agent reported.
    """
    return tuple(
        host if host.slots is not None else replace(host, slots=max(1, found))
        for host, found in zip(hosts, gpus, strict=True)
    )


def place(hosts: Sequence[HostEntry], hellos: Sequence[Hello], spec: LaunchSpec) -> tuple[Slot, ...]:
    """Assign a slot to every worker, once the agents have reported their resources.

    Raises:
        ConfigError: there are fewer slots than workers, or too many workers for a host.
    """
    known = with_slots(hosts, [hello.gpus for hello in hellos])
    total = sum(host.slots or 0 for host in known)
    np = total if spec.np is None else spec.np
    _check_total(np)
    if total < np:
        raise too_few(known, np)
    spec.check_ranks(np)
    slots = assign(known, np)
    cores = {host.name: hello.cores for host, hello in zip(known, hellos, strict=True)}
    for slot in slots:
        if slot.local_rank == 0:
            check_load(slot.hostname, slot.local_size, cores[slot.agent])
    return slots


def _check_total(slots: int) -> None:
    if slots > MOST_WORKERS:
        raise ConfigError(f"{slots} slots are given; a job has at most {MOST_WORKERS} processes (-np)")


def check_load(host: str, workers: int, cores: int) -> None:
    """Refuse a number of workers that would only overload a host.

    Raises:
        ConfigError: the host cannot start that many in a reasonable time.
    """
    most = max(_LEAST_LIMIT, _PER_CORE * cores)
    if workers > most:
        raise ConfigError(
            f"{workers} processes would run on host {host}, which has {cores} cores; at most {most} are started there "
            f"({_PER_CORE} for each core, and {_LEAST_LIMIT} on any host)"
        )


def remark_on_load(hosts: Sequence[HostEntry], cores: Sequence[int]) -> str:
    """Return a remark about hosts with far more workers than cores, most likely by mistake; empty if there are none.

    Args:
        hosts: with slots that are all used.
        cores: the number of cores of each host.
    """
    crowded = [(host, has) for host, has in zip(hosts, cores, strict=True) if (host.slots or 1) > _CROWD_PER_CORE * has]
    if not crowded:
        return ""
    host, has = max(crowded, key=lambda pair: (pair[0].slots or 1) / pair[1])
    others = f" (and likewise on {len(crowded) - 1} more)" if len(crowded) > 1 else ""
    return (
        f"{host.slots} workers on {has} core{'' if has == 1 else 's'} of {host.name}{others}: they start one after the "
        "other, and every step is slow; one worker for each core is plenty"
    )
