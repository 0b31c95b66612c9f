"""Write docs/configuration.md from the declarations in ``hvdgloo.config``: ``python docs/generate_configuration.py``.

A test compares the file with this script's output, so a new setting cannot be forgotten here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdgloo.config import Config, Setting, settings
from hvdgloo.runner.cli.setting_flags import twin

TARGET = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_configuration.py from hvdgloo/config.py; edit there. -->

Every setting is an environment variable of the workers, `HVDGLOO_*`. Most settings can also be given to `hvdgloo-run`
as a flag or in a YAML file (`--config-file FILE`). The flag takes precedence over the file, and the file over the
variable. If Horovod has a variable for the same setting, it is read if hvdgloo's variable is absent. An empty variable
counts as absent.

An unusable value raises an error (`hvdgloo.errors.ConfigError`) that names the variable, flag or key, the value, and
the expected form. A warning names variables `HVDGLOO_*` that are not settings, with
the setting that was probably meant. Of the variables `HOROVOD_*` that are not read it names only those that differ from
one that is by a letter or two. `hvdgloo-run` warns before it starts anything; otherwise rank 0 warns.

Rank 0 decides for all ranks how tensors are ordered and fused: only rank 0 reads the fusion threshold, group fusion,
the cycle time, the cache's capacity and the stall times. Every worker reads its own value of all other settings.

[Launching](launching.md) describes the launcher's own flags, and [a file for settings](settings-file.md) how to keep
either in YAML.

| variable | what it does |
|---|---|
"""


def text() -> str:
    """Return the content of the file."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    declared = settings()
    rows = "".join(f"| [`{s.env}`](#{s.env.lower()}) | {s.help.partition(';')[0]} |\n" for s in declared.values())
    sections = "".join(_section(setting, defaults[name]) for name, setting in declared.items())
    return _INTRODUCTION + rows + sections


def _section(setting: Setting, default: Any) -> str:
    facts = "".join(f"- {label}: {value}\n" for label, value in _facts(setting, default))
    return f"\n## {setting.env}\n\n{setting.help[0].upper()}{setting.help[1:]}.\n\n{facts}"


def _facts(setting: Setting, default: Any) -> Iterator[tuple[str, str]]:
    yield "default", _default(setting, default)
    if setting.flag is not None:
        yield "flag", _flag(setting, default)
    if setting.yaml is not None:
        yield "configuration file", f"`{setting.yaml}`" + (_FOR_OPPOSITE if _opposite(setting) else _scaled(setting))
    if setting.fallback:
        yield "if absent", ", then ".join(f"`{name}`" for name in setting.fallback)
    if setting.secret:
        yield "secret", "never shown in a message, a log or on a command line"


_FOR_OPPOSITE = ", which means the opposite: `true` unless it is disabled"


def _opposite(setting: Setting) -> bool:
    return (setting.yaml or "").endswith(".enabled") and (setting.flag or "").startswith("--no-")


def _default(setting: Setting, default: Any) -> str:
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return f"`{int(default)}`"
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"`{shown}`" + (f" {setting.unit}" if setting.unit else "")


def _flag(setting: Setting, default: Any) -> str:
    assert setting.flag is not None
    if isinstance(default, bool):
        return f"`{setting.flag}`, and `{twin(setting.flag)}` for the opposite"
    return f"`{setting.flag}`" + _scaled(setting)


def _scaled(setting: Setting) -> str:
    return f", whose number times {_plain(setting.scale)} is the value" if setting.scale != 1 else ""


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
