"""Merging of several ranks' traces into one file, on one clock.

Each file is a JSON array of trace events, the first of which has the time at which the trace began, on rank 0's clock
as it was measured when the job started.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO

from hvdgloo._platform.files import overwrite, replacing
from hvdgloo._platform.writable import INCOMPLETE
from hvdgloo.errors import ConfigError

_LAST = 512  # bytes, among which a trace's last event is
_FIRST = 1 << 16  # characters, among which a trace's first event is


def merge(paths: Sequence[str], out: str) -> int:
    """Merge the traces of several ranks into one file, on one clock.

    Args:
        paths: files that the ranks of one job wrote.
        out: the file to write.

    Returns:
        the number of its events.

    Raises:
        ConfigError: a file cannot be read or is not a timeline, or ``out`` cannot be written; the text names it.
    """
    traces = sorted(((*origin(path), path) for path in paths), key=lambda trace: trace[1])
    base = min(start for start, _, _ in traces)
    try:
        if os.path.exists(out) and not os.path.isfile(out):  # /dev/stdout, a pipe
            with os.fdopen(overwrite(out), "wb") as device:
                return _write(device, traces, base)
        with replacing(out) as file:  # what is there already may be one of the traces
            count = _write(file, traces, base)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    return count


def _write(file: IO[bytes], traces: Iterable[tuple[int, int, str]], base: int) -> int:
    """Write all events, with one rank's in memory at a time; return their number."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    head = _metadata(0, "process_name", {"name": "", "start_time_since_epoch_in_micros": base})
    file.write(b"[\n" + encode(head).encode())
    count = first = 1
    for start, rank, path in traces:
        last = 0
        for event in _events(path):
            event["pid"] += first
            last = max(last, event["pid"])
            if "ts" in event:
                event["ts"] = round(event["ts"] + start - base, 3)
            elif event["name"] == "process_name":
                event["args"]["name"] = f"rank {rank} {event['args']['name']}".strip()
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            file.write(b",\n" + encode(event).encode())
            count += 1
        first = last + 1
    file.write(b"\n]\n")
    return count


def origin(path: str) -> tuple[int, int]:
    """Read the start of a trace (microseconds since the epoch, on rank 0's clock) and its rank from its first event.

    Raises:
        ConfigError: it cannot be read, or is not a timeline.
    """
    with _reading(path) as file:
        text = file.read(_FIRST).lstrip()
        if not text.startswith("["):
            raise ValueError
        event, _ = json.JSONDecoder().raw_decode(text[1:].lstrip())
        return int(event["args"]["start_time_since_epoch_in_micros"]), int(event["args"]["rank"])


def incomplete(path: str) -> str:
    """Read from a trace's last event why it is incomplete; empty if it is complete, or cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST))
            end = file.read()
        event = json.loads(end[end.rindex(b",\n{") + 2 :].rstrip().removesuffix(b"]"))
        return str(event["name"]).removeprefix(INCOMPLETE) if event["name"].startswith(INCOMPLETE) else ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ""


def _events(path: str) -> Iterator[dict[str, Any]]:
    """Read a trace's events.

    Raises:
        ConfigError: it cannot be read, or is not a timeline.
    """
    with _reading(path) as file:
        events = json.load(file)
        if not (isinstance(events, list) and all(map(_is_event, events))):
            raise ValueError
    return iter(events)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[TextIO]:
    """Open a trace, and translate errors while it is read.

    Raises:
        ConfigError: it cannot be read, or is not a timeline.
    """
    try:
        with open(path, encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError):
        raise ConfigError(f"{path} is not a timeline written by hvdgloo") from None


def _is_event(event: Any) -> bool:
    """Return whether an event has the fields that ``merge`` changes."""
    if not (isinstance(event, dict) and isinstance(event.get("pid"), int) and isinstance(event.get("name"), str)):
        return False
    if "ts" in event:
        return isinstance(event["ts"], int | float)
    args = event.get("args")
    return isinstance(args, dict) and (event["name"] != "process_name" or "name" in args)


def _metadata(row: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": row, "tid": 0, "args": dict(args)}
