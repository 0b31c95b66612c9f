"""How far each host has come while a job starts."""

from __future__ import annotations

import enum


class Step(enum.Enum):
    """What a host is at, in order."""

    CONNECTING = "connecting"
    PYTHON = "python"
    PROBING = "probing"
    READY = "ready"
