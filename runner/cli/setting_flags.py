"""Flags that set workers' variables, all generated from the fields of ``Config``.

A flag's value becomes the text of the field's ``HVDGLOO_*`` variable; no other part of the launcher knows the list of
settings (``config_file`` reads the same from a file). The tables here list Horovod's flags that have no field, each
with its treatment.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hvdgloo.config import Config, Setting, parse_value, settings

_PREFIX = "setting_"

# Spellings of Horovod 0.19: flag, field, text of its variable.
_OLD_SPELLINGS = (
    ("--log-hide-timestamp", "log_hide_time", "1"),
    ("--no-log-hide-timestamp", "log_hide_time", "0"),
)

_NO_EFFECT = "it has no effect here"
_MPI = "there is no MPI here, so it has no effect"

IGNORED_FLAGS: tuple[tuple[str, int, str], ...] = (
    *((f"--{no}{name}", 0, _NO_EFFECT)
      for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce") for no in ("", "no-")),
    *((f"--{no}mpi-threads-disable", 0, _MPI) for no in ("", "no-")),
    ("--mpi-args", 1, _MPI),
    ("--tcp", 0, _MPI),
    ("--binding-args", 1, _MPI),
    ("--num-nccl-streams", 1, _NO_EFFECT),
    ("--disable-cache", 0, "nothing is remembered between jobs here, so it has no effect"),
)  # fmt: skip
"""Horovod's flags that are accepted without effect: flag, number of values, reason."""

CONTROLLER = "there is only the Gloo controller; leave it out, or write --gloo"

REFUSED_FLAGS: tuple[tuple[str, int, str], ...] = (
    ("--mpi", 0, CONTROLLER),
    ("--jsrun", 0, CONTROLLER),
)
"""Horovod's flags that cannot be ignored without changing the job: flag, number of values, reason."""

AddArgument = Callable[..., argparse.Action]


def add_setting_flags(adder: Callable[[str], AddArgument]) -> None:
    """Add the flag of every field that has one; booleans get a second flag for the opposite.

    Args:
        adder: takes a setting's key in the configuration file, and returns a function that adds its flag.
    """
    for name, setting in settings().items():
        if setting.flag is None:
            continue
        assert setting.yaml is not None, "what can be given as a flag can stand in a file"
        add = adder(setting.yaml)
        if is_boolean(name):
            add(setting.flag, dest=_PREFIX + name, action="store_const", const="1", help=_help(name, setting))
            add(twin(setting.flag), dest=_PREFIX + name, action="store_const", const="0", help=argparse.SUPPRESS)
        else:
            add(setting.flag, dest=_PREFIX + name, metavar=_metavar(setting), help=_help(name, setting))
    for flag, name, text in _OLD_SPELLINGS:
        adder("logging.hide_timestamp")(
            flag, dest=_PREFIX + name, action="store_const", const=text, help=argparse.SUPPRESS
        )


def twin(flag: str) -> str:
    """Return the flag for the opposite: ``--no-x`` and ``--x``, ``--log-without-x`` and ``--log-with-x``."""
    if flag.startswith("--no-"):
        return "--" + flag[len("--no-") :]
    if "-without-" in flag:
        return flag.replace("-without-", "-with-")
    return "--no-" + flag[len("--") :]


def from_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the flags on the command line set.

    Raises:
        ConfigError: a value cannot be used; the text names the flag.
    """
    environ: dict[str, str] = {}
    for name, setting in settings().items():
        text = getattr(arguments, _PREFIX + name, None)
        if text is not None:
            environ[setting.env] = to_variable(setting, text, f"{setting.flag} {text}")
    return environ


def is_given(arguments: argparse.Namespace, name: str) -> bool:
    """Tell whether the flag of a setting is on the command line."""
    return getattr(arguments, _PREFIX + name, None) is not None


def to_variable(setting: Setting, text: str, source: str) -> str:
    """Return the text of the variable, converted from the flag's unit to the field's own.

    Raises:
        ConfigError: the value cannot be used; the text names ``source``.
    """
    if setting.scale != 1:
        try:
            scaled = float(text) * setting.scale
            text = str(int(scaled)) if scaled == int(scaled) else str(scaled)
            source = f"{source}, in {setting.unit}"
        except (ValueError, OverflowError):
            pass  # parse_value says what is wrong with it
    parse_value(setting, text, source)
    return text


def is_boolean(name: str) -> bool:
    """Tell whether a field of Config is a boolean."""
    defaults: Mapping[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}
    return isinstance(defaults[name], bool)


def _help(name: str, setting: Setting) -> str:
    default = {f.name: f.default for f in dataclasses.fields(Config)}[name]
    text = setting.help
    if not is_boolean(name) and default not in (None, "", ()):
        text += f" (default: {_shown(default, setting)})"
    return text.replace("%", "%%")


def _shown(default: Any, setting: Setting) -> str:
    """Format a default as a reader would write it: ``1 MiB`` instead of ``1.04858e+06``."""
    if not isinstance(default, (int, float)):
        return str(default)
    if setting.unit == "bytes" and setting.scale == 1:
        for size, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
            if default and default % size == 0:
                return f"{default // size} {name}"
    return f"{default / setting.scale:g}"


def _metavar(setting: Setting) -> str:
    if setting.scale == 1024 * 1024:
        return "MB"
    if not setting.unit:
        return (setting.flag or "").rpartition("-")[2].upper()
    return {"seconds": "SECONDS", "milliseconds": "MS", "bytes": "BYTES"}.get(setting.unit, "N")
