"""``--config-file``: YAML in Horovod's layout, with keys for the launcher's own flags as well.

A key is ``section.name``, or a name alone at the top level. A key for a field of ``Config`` becomes the text of the
field's variable; a key for a flag of the launcher becomes that flag's value. Flags on the command line take precedence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdgloo._platform.spelling import in_one_line, suggestions
from hvdgloo.config import parse_value, settings
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli.flags import Parser
from hvdgloo.runner.cli.setting_flags import CONTROLLER, is_boolean, to_variable

_IGNORED = {
    "params": {"hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"},
    "library_options": {"mpi_threads_disable", "num_nccl_streams"},
}  # fmt: skip
"""Horovod's keys that have no effect."""


_NESTED = "expected a value or a list of values, not values within values"

_PAIRS = {"hosts": ":", "network.nics": "=", "environment.variables": "="}
"""Keys whose values are pairs, and the separator of a pair in text: ``{h1: 2}`` means ``h1:2``."""


@dataclass
class FileContent:
    """The content of a configuration file.

    Attributes:
        environ: variables for the workers.
        flags: values of the launcher's own flags, by ``dest``.
        ignored: keys that have no effect here.
    """

    environ: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def read(path: str, parser: Parser) -> FileContent:
    """Read a configuration file.

    Raises:
        ConfigError: it cannot be read, or a key is unknown or has an unusable value; the text names it.
    """
    content = FileContent()
    fields = {setting.yaml: name for name, setting in settings().items() if setting.yaml is not None}
    for key, value in _flat(_load(path)):
        source = f"{path}: {in_one_line(key)}"
        _check(value, source)
        if key == "controller":
            if str(value).lower() != "gloo":
                raise ConfigError(f"{source}: {value!r}: {CONTROLLER.replace('--gloo', 'gloo')}")
        elif key == "logging.with_timestamp":
            content.environ[settings()["log_hide_time"].env] = _inverse(_text(value), source)
        elif key in fields:
            variable, text = _setting(fields[key], value, source)
            content.environ[variable] = text
        elif key in parser.keys:
            action = parser.keys[key]
            content.flags[action.dest] = _flag(action, value, source)
        elif _is_ignored(key):
            content.ignored.append(key)
        elif (section := key.partition(".")[0]) in parser.keys or section in fields:
            raise ConfigError(f"{path}: {section}: {_NESTED}")
        else:
            close = suggestions(key, [*fields, *parser.keys], limit=1)
            raise ConfigError(f"{source}: there is no such setting" + (f"; did you mean {close[0]}?" if close else ""))
    return content


def _setting(name: str, value: Any, source: str) -> tuple[str, str]:
    """Return the variable that a field's key sets, and its text."""
    setting = settings()[name]
    text = _text(value)
    if (setting.yaml or "").endswith(".enabled") and (setting.flag or "").startswith("--no-"):
        text = _inverse(text, source)
    elif is_boolean(name):
        parse_value(setting, text, source)
    return setting.env, to_variable(setting, text, source)


def _flag(action: argparse.Action, value: Any, source: str) -> Any:
    """Return the value that a flag of the launcher would have."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {value!r} cannot be used: expected true or false")
        return value
    if action.nargs == "?" and isinstance(value, bool):
        return action.const if value else None
    items = [_text(item) for item in value] if isinstance(value, list) else [_text(value)]
    # Only argparse itself names the class of flags that may be repeated, and that name is private.
    if isinstance(action, argparse._AppendAction):
        return [_typed(action, item, source) for item in items]
    if isinstance(action.nargs, int):
        if len(items) != action.nargs:
            raise ConfigError(f"{source}: {value!r} cannot be used: expected a list of {action.nargs} values")
        return [_typed(action, item, source) for item in items]
    return _typed(action, ",".join(items), source)


def _typed(action: argparse.Action, text: str, source: str) -> Any:
    value: Any = text
    if action.type is not None:
        assert callable(action.type)
        try:
            value = action.type(text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"{source}: {error}") from None
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(map(str, action.choices))}")
    return value


def _load(path: str) -> Mapping[str, Any]:
    import yaml  # costs some milliseconds that most jobs can save

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config-file {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"--config-file {path}: the file is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"--config-file {path}{line}: {error.problem or error}") from None
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # not UTF-8 text, or an impossible number or date
        raise ConfigError(f"--config-file {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path}: expected sections that contain settings")
    return content


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in content.items():
        if isinstance(value, dict) and section not in _PAIRS:
            for key, inner in value.items():
                if inner is not None:
                    yield _joined(f"{section}.{key}", inner)
        elif value is not None:
            yield _joined(str(section), value)


def _joined(key: str, value: Any) -> tuple[str, Any]:
    """Return a key and its value, in which pairs (of a mapping, or of a list of mappings: ``- h1: 2``) become text."""
    if key not in _PAIRS:
        return key, value
    items: list[Any] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            items += [
                inner
                if isinstance(inner, list | dict)
                else str(name)
                if inner is None
                else f"{name}{_PAIRS[key]}{_text(inner)}"
                for name, inner in item.items()
            ]
        else:
            items.append(item)
    return key, items if isinstance(value, list | dict) else value


def _is_ignored(key: str) -> bool:
    section, _, name = key.partition(".")
    return name in _IGNORED.get(section, ())


def _check(value: Any, source: str) -> None:
    """Refuse what cannot be the text of a setting or a flag: nested values, and NUL, which no variable can hold.

    Raises:
        ConfigError: the value cannot be used; the text names the key.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, (list, dict, set)):
            raise ConfigError(f"{source}: {_NESTED}")
        if "\0" in str(item):
            raise ConfigError(f"{source}: {item!r} contains a NUL character, which cannot be passed on")


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _inverse(text: str, source: str) -> str:
    value = parse_value(settings()["log_hide_time"], text, source)
    return "0" if value else "1"
