"""The CPythons of this machine: ``pythons.py 3.11 3.10`` prints the path of the first of these that is here.

They are looked for on the PATH and among those that pyenv and uv have installed. Only what can make virtual
environments counts: Debian's own python3, say, cannot without a further package. Nothing beside the standard library
is needed, since make asks before there is any environment.

Without arguments it prints every version that the tests are for, whether it is here or not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

RELEASED = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""CPython's versions that hvdgloo is for, as far as they are released; newer ones count where they are found."""

_PROBE = """
import ensurepip, sys, sysconfig, venv
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print("%d.%d" % sys.version_info[:2])
"""
_PROBE_S = 10.0


def candidates(environment: Mapping[str, str], home: Path, own: Path) -> Iterator[Path]:
    """Programs that are called like a version of Python: of the ``own`` installation, on the PATH, pyenv's and uv's, of
    these the newest releases first."""
    pyenv = Path(environment.get("PYENV_ROOT") or home / ".pyenv")
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    uv = Path(environment.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
    folders = [own / "bin", *(Path(name) for name in environment.get("PATH", "").split(os.pathsep) if name)]
    for installations in (pyenv / "versions", uv):
        folders += [folder / "bin" for folder in sorted(installations.glob("*"), key=_release, reverse=True)]
    for folder in folders:
        yield from (program for program in sorted(folder.glob("python3.*")) if _named(program))


def version(program: Path) -> str | None:
    """A CPython's version as ``3.12``, or None for what is none, does not run, or cannot make environments."""
    try:
        result = subprocess.run(
            [program, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def find(wanted: str, programs: Iterable[Path]) -> Path | None:
    """The first program that is a CPython of that version."""
    for program in programs:
        # The shim that pyenv puts on the PATH has the name of one version and may run none.
        if _named(program) == wanted and version(program) == wanted:
            return program
    return None


def all_versions(programs: Iterable[Path]) -> list[str]:
    """The versions that the tests are for: all that are released, and what is here of newer ones."""
    newest = max(map(_minor, RELEASED))
    newer = {name for program in programs if (name := _named(program)) and _minor(name) > newest}
    return sorted({*RELEASED, *newer}, key=_minor)


def _named(program: Path) -> str | None:
    match = re.fullmatch(r"python(3\.\d+)", program.name)
    return match[1] if match else None


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _release(folder: Path) -> tuple[int, ...]:
    """``3.12.1`` and ``cpython-3.12.1-linux`` in an order in which 3.9 comes before 3.12."""
    return tuple(map(int, re.findall(r"\d+", folder.name)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="like 3.11; the first that is here is printed")
    versions: list[str] = parser.parse_args(arguments).versions
    programs = list(candidates(os.environ, Path.home(), Path(sys.base_prefix)))
    if not versions:
        print(*all_versions(programs))
        return 0
    for wanted in versions:
        if program := find(wanted, programs):
            print(program)
            return 0
    print(f"no CPython {' or '.join(versions)} on the PATH or among pyenv's and uv's", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
