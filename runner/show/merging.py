"""The traces of several ranks on one clock, in one file.

Each file is a JSON array of trace events whose first one says when the trace began, on rank 0's clock as it was
measured when the job started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvdgloo.errors import ConfigError


def merge(paths: Sequence[str], out: str) -> int:
    """Put the traces of several ranks on one clock, in one file.

    Args:
        paths: files that the ranks of one job have written.
        out: the file to write.

    Returns:
        how many events it has.

    Raises:
        ConfigError: a file cannot be read or is not a timeline, or ``out`` cannot be written; the text names it.
    """
    loaded = [load(path) for path in paths]
    base = min(start for start, _, _ in loaded)
    events: list[dict[str, Any]] = [
        _metadata(0, "process_name", {"name": "", "start_time_since_epoch_in_micros": base})
    ]
    first = 1
    for start, rank, own in sorted(loaded, key=lambda each: each[1]):
        last = 0
        for event in own:
            event["pid"] += first
            last = max(last, event["pid"])
            if "ts" in event:
                event["ts"] = round(event["ts"] + start - base, 3)
            elif event["name"] == "process_name":
                event["args"]["name"] = f"rank {rank} {event['args']['name']}".strip()
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            events.append(event)
        first = last + 1
    try:
        with open(out, "w", encoding="utf-8") as file:
            file.write("[\n" + ",\n".join(json.dumps(event, separators=(",", ":")) for event in events) + "\n]\n")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    return len(events)


def load(path: str) -> tuple[int, int, list[dict[str, Any]]]:
    """When a trace begins (microseconds since the epoch, on rank 0's clock), whose it is, and its events.

    Raises:
        ConfigError: it cannot be read, or is not a timeline.
    """
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
        args = events[0]["args"]
        if not all(map(_is_event, events)):
            raise ValueError
        return int(args["start_time_since_epoch_in_micros"]), int(args["rank"]), events
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError):
        raise ConfigError(f"{path} is not a timeline written by hvdgloo") from None


def _is_event(event: Any) -> bool:
    """Whether it has the fields that ``merge`` changes."""
    if not (isinstance(event, dict) and isinstance(event.get("pid"), int) and isinstance(event.get("name"), str)):
        return False
    if "ts" in event:
        return isinstance(event["ts"], int | float)
    args = event.get("args")
    return isinstance(args, dict) and (event["name"] != "process_name" or "name" in args)


def _metadata(row: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": row, "tid": 0, "args": dict(args)}
