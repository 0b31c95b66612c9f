"""Diagnoses of commands that did not lead to an agent: from their last output to one line with the remedy. Pure.

Users see only what the launcher prints, and most failures at start-up are not the launcher's: a name, a key, a
firewall, an installation. Each has its own remedy, so they are distinguished. So is what may be temporary, which is
tried again.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdgloo.runner.processes.bootstrap import checkout
from hvdgloo.runner.protocol.frames import Lacking
from hvdgloo.version import __version__


class Cause(enum.Enum):
    """The kind of a failure."""

    NAME = "name lookup"
    REFUSED = "connection refused"
    TIMED_OUT = "connection timed out"
    NO_ROUTE = "no route"
    DROPPED = "connection dropped"
    HOST_KEY_UNKNOWN = "host key unknown"
    HOST_KEY_CHANGED = "host key changed"
    AUTHENTICATION = "authentication"
    CONFIGURATION = "ssh configuration"
    NOT_THERE = "not there yet"
    PYTHON = "Python missing"
    HVDGLOO = "hvdgloo missing"
    VERSION = "another version of hvdgloo"
    DIRECTORY = "working directory missing"
    PROGRAM = "program missing"
    OUTPUT = "file cannot be written"
    OTHER = "other"


class Retry(enum.Enum):
    """The chances of the same command at a later attempt."""

    NEVER = enum.auto()
    A_FEW_TIMES = enum.auto()
    UNTIL_THE_DEADLINE = enum.auto()


@dataclass(frozen=True)
class Diagnosis:
    """The reason why a host cannot be used.

    Attributes:
        cause: the kind of failure.
        text: one line: what, and what to do.
        retry: whether to try again.
    """

    cause: Cause
    text: str
    retry: Retry = Retry.NEVER


@dataclass(frozen=True)
class Ending:
    """The end of a command that should have led to an agent.

    Attributes:
        status: exit status, or minus the signal; None if it had to be ended.
        lines: the last lines that it wrote.
    """

    status: int | None
    lines: Sequence[str] = ()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def last(self) -> str:
        """The line that is most likely to say why."""
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "")


_VERSION = re.compile(r"hvdgloo agent: version (\S+) is installed here")
_NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")
_OLD_PYTHON = re.compile(r"has no attribute 'fromhex'|SyntaxError: ")
_NO_PROGRAM = re.compile(
    r"not found|No such file or directory|Permission denied|cannot execute|Unknown command", re.IGNORECASE
)


def python_failure(ending: Ending, python: str) -> Diagnosis | None:
    """Diagnose faults that any host may have, however it was reached: its Python, and hvdgloo there."""
    found = _VERSION.search(ending.text)
    if found is not None:
        return Diagnosis(Cause.VERSION, other_version(found[1], python))
    module = _NO_MODULE.search(ending.text)
    if module is not None and module[1].partition(".")[0] == "hvdgloo":
        return Diagnosis(Cause.HVDGLOO, _not_installed(python))
    if module is not None:
        return Diagnosis(
            Cause.HVDGLOO,
            f"hvdgloo is not completely installed for {python} there, which lacks the module {module[1]}; install it "
            f"({_install(python)}), or name another interpreter with --remote-python",
        )
    if _OLD_PYTHON.search(ending.text):
        return Diagnosis(
            Cause.PYTHON, f"{python} there is too old; hvdgloo needs Python 3.10, name another one with --remote-python"
        )
    if ending.status in (126, 127) and _NO_PROGRAM.search(ending.text):
        return Diagnosis(
            Cause.PYTHON,
            f"there is no Python at {python} ({ending.last}); install it there, or name another one with "
            "--remote-python",
        )
    return None


def preflight_failure(found: Lacking, cwd: str) -> Diagnosis | None:
    """Return the reason why a host cannot be used, if something is missing there."""
    remedy = "hvdgloo-run copies no files: provide it there at the same path (a shared file system, rsync, the image)"
    if found.machine:
        return Diagnosis(Cause.OTHER, found.machine)
    if found.directory and found.things:
        return Diagnosis(Cause.DIRECTORY, f"the working directory {found.directory} may not be entered there")
    if found.directory:
        return Diagnosis(Cause.DIRECTORY, f"there is no working directory {found.directory}; {remedy}")
    if found.things:
        return Diagnosis(Cause.PROGRAM, f"there is no {' and no '.join(found.things)} (looked in {cwd}); {remedy}")
    if found.unwritable:
        return Diagnosis(Cause.OUTPUT, "; ".join(found.unwritable))
    return None


def other_version(found: str, python: str) -> str:
    """Return the message about a host with another version of hvdgloo."""
    return (
        f"it has hvdgloo {found}, the launcher has {__version__}; install the same version everywhere "
        f"({_install(python)})"
    )


def other_failure(ending: Ending, command: str) -> Diagnosis:
    """Diagnose a failure that was not foreseen: quote the command's own last output."""
    how = "was ended" if ending.status is None else _describe_exit(ending.status)
    words = "; ".join(line.strip() for line in ending.lines[-3:] if line.strip())
    return Diagnosis(Cause.OTHER, f"{command} {how}" + (f": {words}" if words else " and said nothing"))


def _describe_exit(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"


def _not_installed(python: str) -> str:
    root = checkout()
    text = f"hvdgloo is not installed for {python} there; install it ({_install(python)})"
    if root:
        text += f", have {root[0]} there too, from which this launcher runs"
    return text + ", or name another interpreter with --remote-python"


def _install(python: str) -> str:
    return f"{python} -m pip install hvdgloo=={__version__}"
