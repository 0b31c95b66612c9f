"""Settings that a job runs with, as its readers see them: named and scaled as in a file for ``--config-file``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hvdgloo.config import Config, settings

_SHOWN = ("params", "library_options", "stall_check", "timeouts", "elastic", "timeline")
"""The sections of a configuration file that are about how a job runs, and not about where."""

_UNITS = {"seconds": "s", "milliseconds": "ms"}
_SCALED = {1024 * 1024: "MiB"}


def shown(config: Config) -> dict[str, Any]:
    """Return the settings by name; one that has no value is left out."""
    found: dict[str, Any] = {}
    for field, setting in settings().items():
        if setting.yaml and setting.yaml.partition(".")[0] in _SHOWN and not setting.secret:
            value = getattr(config, field)
            if value is None or value == "":
                continue
            if setting.flag is not None and setting.flag.startswith("--no-"):
                value = not value  # the file says what is on
            found[setting.yaml] = value / setting.scale if setting.scale != 1 else value
    return found


def changed(current: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that differ from their defaults."""
    defaults = _defaults()
    return [name for name, value in current.items() if name not in defaults or defaults[name] != value]


@functools.cache
def units() -> dict[str, str]:
    """Return the unit of each setting that has one, by its name, as it follows the number: "MiB", "s", "hosts"."""
    return {
        setting.yaml: _SCALED.get(int(setting.scale)) or _UNITS.get(setting.unit, setting.unit)
        for setting in settings().values()
        if setting.yaml and setting.unit and setting.yaml.partition(".")[0] in _SHOWN
    }


@functools.cache
def _defaults() -> dict[str, Any]:
    return shown(Config())
