"""Flags and configuration files that set workers' variables, all generated from the fields of ``Config``.

A flag's or key's value becomes the text of the field's ``HVDGLOO_*`` variable; nothing else of the launcher knows
which settings there are. Horovod's flags that have no field stand in tables here, each with what becomes of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from hvdgloo.config import Config, Setting, parse_value, settings
from hvdgloo.errors import ConfigError

_PREFIX = "setting_"

# Spellings of Horovod 0.19: flag, field, text of its variable.
_OLD_SPELLINGS = (
    ("--log-hide-timestamp", "log_hide_time", "1"),
    ("--no-log-hide-timestamp", "log_hide_time", "0"),
)

_NO_EFFECT = "it has no effect here"
_MPI = "there is no MPI here, so it has no effect"
_NOT_YET = "it has no effect in this version"

IGNORED_FLAGS: tuple[tuple[str, int, str], ...] = (
    *((f"--{no}{name}", 0, _NO_EFFECT)
      for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce") for no in ("", "no-")),
    *((f"--{no}mpi-threads-disable", 0, _MPI) for no in ("", "no-")),
    ("--mpi-args", 1, _MPI),
    ("--tcp", 0, _MPI),
    ("--binding-args", 1, _MPI),
    ("--num-nccl-streams", 1, _NO_EFFECT),
    *((f"--{no}autotune", 0, _NOT_YET) for no in ("", "no-")),
    ("--autotune-log-file", 1, _NOT_YET),
    ("--autotune-warmup-samples", 1, _NOT_YET),
    ("--autotune-steps-per-sample", 1, _NOT_YET),
    ("--autotune-bayes-opt-max-samples", 1, _NOT_YET),
    ("--autotune-gaussian-process-noise", 1, _NOT_YET),
    ("--timeline-filename", 1, _NOT_YET),
    *((f"--{no}timeline-mark-cycles", 0, _NOT_YET) for no in ("", "no-")),
    ("--thread-affinity", 1, _NOT_YET),
)  # fmt: skip
"""Horovod's flags that are accepted and do nothing: flag, number of values, why."""

_ELASTIC = "jobs that grow and shrink are not supported yet; leave it out for a job of a fixed size"
_CONTROLLER = "there is only the Gloo controller; leave it out, or write --gloo"

REFUSED_FLAGS: tuple[tuple[str, int, str], ...] = (
    ("--mpi", 0, _CONTROLLER),
    ("--jsrun", 0, _CONTROLLER),
    ("--min-np", 1, _ELASTIC),
    ("--min-num-proc", 1, _ELASTIC),
    ("--max-np", 1, _ELASTIC),
    ("--max-num-proc", 1, _ELASTIC),
    ("--host-discovery-script", 1, _ELASTIC),
    ("--slots-per-host", 1, _ELASTIC),
    ("--elastic-timeout", 1, _ELASTIC),
    ("--reset-limit", 1, _ELASTIC),
    ("--blacklist-cooldown-range", 2, _ELASTIC),
)
"""Horovod's flags without which the job would be another one: flag, number of values, why."""

_IGNORED_KEYS = {
    "params": {"hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"},
    "autotune": {
        "enabled", "log_file", "warmup_samples", "steps_per_sample", "bayes_opt_max_samples", "gaussian_process_noise",
    },
    "timeline": {"filename", "mark_cycles"},
    "library_options": {"mpi_threads_disable", "num_nccl_streams", "thread_affinity"},
}  # fmt: skip

AddArgument = Callable[..., argparse.Action]


def add_setting_flags(add: AddArgument) -> None:
    """Add the flag of every field that has one; booleans get a twin for the opposite."""
    for name, setting in settings().items():
        if setting.flag is None:
            continue
        if _is_boolean(name):
            add(setting.flag, dest=_PREFIX + name, action="store_const", const="1", help=_help(name, setting))
            add(twin(setting.flag), dest=_PREFIX + name, action="store_const", const="0", help=argparse.SUPPRESS)
        else:
            add(setting.flag, dest=_PREFIX + name, metavar=_metavar(setting), help=_help(name, setting))
    for flag, name, text in _OLD_SPELLINGS:
        add(flag, dest=_PREFIX + name, action="store_const", const=text, help=argparse.SUPPRESS)


def twin(flag: str) -> str:
    """The flag for the opposite: ``--no-x`` and ``--x``, ``--log-without-x`` and ``--log-with-x``."""
    if flag.startswith("--no-"):
        return "--" + flag[len("--no-") :]
    if "-without-" in flag:
        return flag.replace("-without-", "-with-")
    return "--no-" + flag[len("--") :]


def from_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables that the flags given on the command line set.

    Raises:
        ConfigError: naming the flag.
    """
    environ: dict[str, str] = {}
    for name, setting in settings().items():
        text = getattr(arguments, _PREFIX + name, None)
        if text is not None:
            environ[setting.env] = to_variable(setting, text, f"{setting.flag} {text}")
    return environ


def from_file(path: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a YAML file sets, and its keys that have no effect here.

    Raises:
        ConfigError: it cannot be read, or naming the key that is unknown or has a value that cannot be used.
    """
    environ: dict[str, str] = {}
    ignored: list[str] = []
    keys = {setting.yaml: (name, setting) for name, setting in settings().items() if setting.yaml is not None}
    for key, value in _flat(_load(path)):
        source = f"{path}: {key}"
        if key == "controller":
            if str(value).lower() != "gloo":
                raise ConfigError(f"{source}: {value!r}: {_CONTROLLER.replace('--gloo', 'gloo')}")
        elif key == "logging.with_timestamp":
            environ[settings()["log_hide_time"].env] = _inverse(_boolean_text(value), source)
        elif key in keys:
            name, setting = keys[key]
            text = _boolean_text(value) if _is_boolean(name) else str(value)
            if key.endswith(".enabled") and setting.flag is not None and setting.flag.startswith("--no-"):
                text = _inverse(text, source)
            environ[setting.env] = to_variable(setting, text, source)
        elif _is_ignored(key):
            ignored.append(key)
        else:
            close = difflib.get_close_matches(key, keys, n=1)
            raise ConfigError(f"{source}: there is no such setting" + (f"; did you mean {close[0]}?" if close else ""))
    return environ, ignored


def to_variable(setting: Setting, text: str, source: str) -> str:
    """The text of the variable, after the unit of the flag was turned into the field's own.

    Raises:
        ConfigError: naming ``source``.
    """
    if setting.scale != 1:
        try:
            scaled = float(text) * setting.scale
            text = str(int(scaled)) if scaled == int(scaled) else str(scaled)
        except (ValueError, OverflowError):
            pass  # parse_value says what is wrong with it
    parse_value(setting, text, source)
    return text


def _is_boolean(name: str) -> bool:
    defaults: Mapping[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}
    return isinstance(defaults[name], bool)


def _help(name: str, setting: Setting) -> str:
    default = {f.name: f.default for f in dataclasses.fields(Config)}[name]
    text = setting.help
    if not _is_boolean(name) and default is not None:
        shown = f"{default / setting.scale:g}" if isinstance(default, (int, float)) else str(default)
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def _metavar(setting: Setting) -> str:
    if setting.scale == 1024 * 1024:
        return "MB"
    return {"seconds": "SECONDS", "milliseconds": "MS", "": "VALUE"}.get(setting.unit, "N")


def _load(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path}: expected sections with settings in them")
    return content


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in content.items():
        if isinstance(value, dict):
            for key, inner in value.items():
                if inner is not None:
                    yield f"{section}.{key}", inner
        elif value is not None:
            yield str(section), value


def _is_ignored(key: str) -> bool:
    section, _, name = key.partition(".")
    return name in _IGNORED_KEYS.get(section, ())


def _boolean_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _inverse(text: str, source: str) -> str:
    value = parse_value(settings()["log_hide_time"], text, source)
    return "0" if value else "1"
