"""The environment and the working directory of workers on other hosts. Pure, except for reading files.

By default, workers get all of the launcher's variables, because a program that runs here should run there. The
exceptions are variables that describe this host, session or login: for these, workers keep the values of their own
host. ``-x`` and ``--env-file`` add any variables; ``--export named`` passes only these and settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence, Set

from hvdgloo.config import describes_service
from hvdgloo.errors import ConfigError

HOST_SPECIFIC = (
    # the login
    "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "MAIL", "LS_COLORS",
    # the host
    "HOST", "HOSTNAME", "HOSTTYPE", "MACHTYPE", "OSTYPE", "TMPDIR", "TMP", "TEMP", "TEMPDIR", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "container",
    # the session
    "PWD", "OLDPWD", "SHLVL", "_", "TTY", "SSH_*", "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "WINDOWID", "XDG_*",
    "DBUS_*", "GPG_*", "STY", "TMUX*", "TERM_SESSION_ID", "TERM_PROGRAM*", "VSCODE_*", "INVOCATION_ID",
    "JOURNAL_STREAM", "NOTIFY_SOCKET", "LISTEN_*", "MAINPID", "MANAGERPID", "SYSTEMD_*", "SUDO_*",
    # the scheduler's, about this node or task
    "SLURM_*", "SLURMD_*", "SLURMSTEPD_*", "SRUN_*", "PMI_*", "PMIX_*", "OMPI_*", "MPI_LOCAL*", "LSB_*", "LSF_*",
    "PBS_*", "KUBERNETES_*", "*_SERVICE_HOST", "*_SERVICE_PORT", "*_SERVICE_PORT_*", "*_PORT_*_TCP*",
)  # fmt: skip
"""Names that are passed on only on request; ``*`` is a wildcard."""

_PATTERN = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in HOST_SPECIFIC))
_NAME = re.compile(r"[^=\s\0]+")


def working_directory(environ: Mapping[str, str]) -> str:
    """Return the current directory, by the name under which the user entered it.

    With an automounter, the target of that name differs from host to host.

    Raises:
        ConfigError: the current directory has been removed.
    """
    try:
        real = os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current directory no longer exists; change to another one, and start again") from None
    named = environ.get("PWD", "")
    try:
        return named if os.path.isabs(named) and os.path.samefile(named, real) else real
    except OSError:
        return real


def is_host_specific(name: str) -> bool:
    """Tell whether a variable describes this host, session, login or task, and is passed on only on request."""
    return _PATTERN.fullmatch(name) is not None


def is_setting(name: str) -> bool:
    """Tell whether a variable may be one of our settings, or one of other launchers' names for them."""
    return name.startswith(("HVDGLOO_", "HOROVOD_"))


def for_other_hosts(environ: Mapping[str, str], exported: Set[str], *, export_all: bool) -> dict[str, str]:
    """Return the variables that are sent to another host.

    Args:
        environ: the job's variables.
        exported: names that the user asked for.
        export_all: send all others, too, except those specific to a host.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in exported
        or (not describes_service(name, value) and (is_setting(name) or (export_all and not is_host_specific(name))))
    }


def parse_exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``-x NAME`` and ``-x NAME=VALUE`` define.

    Raises:
        ConfigError: there is no name, or the variable is not set here.
    """
    return dict(_parse(text, environ, f"-x {text.partition('=')[0]}") for text in texts)  # a value may be secret


def read_env_file(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Read one variable per line: ``NAME=VALUE``, or ``NAME`` for its value here; ``#`` begins a comment line.

    Quotes around a value are removed; nothing in it is expanded.

    Raises:
        ConfigError: a line cannot be used; the text names file and line.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"--env-file {path}: {error.strerror}") from None
    found = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ").lstrip()
        if text and not text.startswith("#"):
            name, value = _parse(text, environ, f"--env-file {path}, line {number}")
            found[name] = _unquoted(value) if "=" in text else value
    return found


def _parse(text: str, environ: Mapping[str, str], source: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if _NAME.fullmatch(name) is None or "\0" in value:
        raise ConfigError(f"{source}: expected NAME or NAME=VALUE")
    if equals:
        return name, value
    if name not in environ:
        raise ConfigError(f"{source}: {name} is not set here; give it a value ({name}=VALUE), or leave it out")
    return name, environ[name]


def _unquoted(value: str) -> str:
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
