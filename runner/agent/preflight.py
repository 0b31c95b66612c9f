"""Requirements of workers on a host: working directory, script, program.

Without this check, workers would fail one after the other, each with its own traceback. With it, one report lists all
hosts that lack something, before any worker has been started.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from hvdgloo._platform.writable import unwritable
from hvdgloo.runner.protocol.frames import Lacking, Require


def lacking(required: Require, environ: Mapping[str, str]) -> Lacking:
    """Return what is missing on this host.

    Args:
        environ: the environment of this host's agent.
    """
    if machine := machine_lacks():
        return Lacking(machine=machine)
    if not os.path.isdir(required.cwd):
        return Lacking(required.cwd)
    if not os.access(required.cwd, os.X_OK):
        return Lacking(required.cwd, ("permission to enter it",))
    path = required.search_path or environ.get("PATH")
    files = [f"file {name}" for name in required.files if not os.path.isfile(os.path.join(required.cwd, name))]
    programs = [f"program {name}" for name in required.programs if not _is_program(name, required.cwd, path)]
    return Lacking("", (*files, *programs), unwritable(required.outputs, required.cwd))


def machine_lacks() -> str:
    """Return what this host itself lacks, and the remedy; empty if nothing is missing."""
    if sys.platform != "linux" or os.path.isdir(f"/proc/{os.getpid()}"):
        return ""
    return (
        "there is no /proc, without which what a job leaves behind cannot be found; mount it (mount -t proc proc /proc)"
    )


def _is_program(name: str, cwd: str, path: str | None) -> bool:
    return shutil.which(os.path.join(cwd, name) if os.sep in name else name, path=path) is not None
