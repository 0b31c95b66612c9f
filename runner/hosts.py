"""From what the user says about hosts to a list of them. Pure, except that a host file is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from hvdgloo.errors import ConfigError
from hvdgloo.runner.spec import Host

_ITEM = re.compile(r"(?:(?P<user>[^\s:,@\[\]]+)@)?(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[^\s:,@\[\]]+)(?::(?P<slots>[0-9]+))?")
_FILE_SLOTS = re.compile(r"(?:slots|max_slots|max-slots)\s*=\s*(?P<slots>[0-9]+)")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """``name:slots,name:slots,...``; without ``:slots`` a host has one. IPv6 addresses stand in brackets.

    Raises:
        ConfigError: naming the item that cannot be understood, or the host that comes twice.
    """
    items = [item.strip() for item in text.split(",")]
    return _checked((_parse_item(item, f"--hosts {text}") for item in items), f"--hosts {text}")


def read_hostfile(path: str) -> tuple[Host, ...]:
    """One host per line: ``name slots=4``, ``name:4`` or ``name``; ``#`` begins a comment.

    Raises:
        ConfigError: the file cannot be read, or naming the line that cannot be understood.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: {error}") from None
    return _checked(_parse_lines(lines, path), f"--hostfile {path}")


def _parse_lines(lines: list[str], path: str) -> Iterable[Host]:
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _parse_item(words[0], where)
        if len(words) > 1:
            slots = _FILE_SLOTS.match(words[1])
            if slots is None:
                raise ConfigError(f"{where}: {words[1]!r} is not understood; write for example: {host.name} slots=4")
            host = replace(host, slots=int(slots["slots"]))
        yield _positive(host, where)


def _parse_item(item: str, where: str) -> Host:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigError(f"{where}: {item!r} is not a host with a number of slots; write for example: h1:4,h2:4")
    return _positive(Host(match["name"].strip("[]"), int(match["slots"] or 1), match["user"] or ""), where)


def _positive(host: Host, where: str) -> Host:
    if host.slots < 1:
        raise ConfigError(f"{where}: host {host.name} has no slots; leave it out, or give it at least one")
    return host


def _checked(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    found: dict[str, Host] = {}
    for host in hosts:
        if host.name in found:
            raise ConfigError(f"{where}: host {host.name} is given twice; give it once, with all its slots")
        found[host.name] = host
    if not found:
        raise ConfigError(f"{where}: no hosts in it")
    return tuple(found.values())
