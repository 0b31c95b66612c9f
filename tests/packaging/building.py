"""Distributions that are built and installed with what is here; nothing is fetched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.support.launching import clean_environment

LIST_MODULES = """
import json, pkgutil
import hvdgloo, hvdgloo.rendezvous, hvdgloo.runner

def modules(prefix, paths):
    for module in pkgutil.iter_modules(paths, prefix + "."):
        yield module.name
        if module.ispkg:
            yield from modules(module.name, [f"{module.module_finder.path}/{module.name.rpartition('.')[2]}"])

found = {package.__name__ for package in (hvdgloo, hvdgloo.rendezvous, hvdgloo.runner)}
for package in (hvdgloo, hvdgloo.rendezvous, hvdgloo.runner):
    found.update(modules(package.__name__, package.__path__))
print(json.dumps({"file": hvdgloo.__file__, "modules": sorted(found)}))
"""


def environment() -> dict[str, str]:
    """This process's, without what would show a program the checkout."""
    return {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}


def run(command: Sequence[str | Path], folder: Path, timeout: float = 50) -> str:
    """Run a command in a folder and return what it prints; fails with all of its output if it fails.

    Args:
        timeout: seconds.
    """
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}: {result.returncode}\n{result.stdout}"
    return result.stdout


def checked_in() -> set[str]:
    """The project's files without what git ignores."""
    if not (ROOT / ".git").exists():
        pytest.skip("only git knows which files are the project's")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = run(command, ROOT).splitlines()
    return {name for name in names if (ROOT / name).exists()}


def checkout(folder: Path) -> Path:
    """A copy as a fresh clone is: links are links, and nothing is left of earlier builds."""
    for name in checked_in():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(source: Path, into: Path, *what: str) -> str:
    # Not in the source's folder, whose build/ would be taken for the tool.
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", into, source]
    return run(command, into.parent)


@dataclass(frozen=True)
class Built:
    """The distributions, what they were made from, and what was printed meanwhile."""

    source: Path
    sdist: Path
    wheel: Path
    checkouts_wheel: Path
    log: str

    @property
    def sdist_files(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}


def build_all(source: Path, folder: Path) -> Built:
    """Both distributions of a source tree; the wheel is made twice, from the other one and from the source."""
    log = build(source, folder / "dist")
    log += build(source, folder / "direct", "--wheel")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    (direct,) = (folder / "direct").glob("*.whl")
    return Built(source, sdist, wheel, direct, log)


def warnings(built: Built) -> list[str]:
    """Return the warnings of building the distributions, without harmless ones."""
    harmless = ("no previously-included files matching", "byte-compiling is disabled")
    lines = [line for line in built.log.splitlines() if "warn" in line.lower() or "deprecat" in line.lower()]
    return [line for line in lines if not any(text in line for text in harmless)]


class Environment:
    """A virtual environment with nothing but the distributions that are given; what they need is this one's."""

    def __init__(self, folder: Path, *install: str | Path) -> None:
        self.folder = folder
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        borrowed = [path for path in sys.path if os.path.basename(path) == "site-packages"]
        # Of these folders .pth files are not read, so an editable hvdgloo of this environment is not seen from there.
        (folder / "lib" / version / "site-packages/borrowed.pth").write_text("\n".join(borrowed) + "\n")
        self.site_packages = folder / "lib" / version / "site-packages"
        self.install(*install)

    def install(self, *what: str | Path) -> None:
        """Have pip install distributions or source trees; fails if it fails."""
        options = ("--no-index", "--no-deps", "--no-build-isolation", "--use-pep517")
        run([*self._pip, "install", "--quiet", *options, *what], self.folder.parent)

    def uninstall(self, name: str) -> None:
        """Have pip remove a distribution."""
        run([*self._pip, "uninstall", "--quiet", "--yes", name], self.folder.parent)

    @property
    def _pip(self) -> list[str | Path]:
        return [sys.executable, "-m", "pip", "--python", self.program("python")]

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def modules(self) -> tuple[Path, set[str]]:
        """Return hvdgloo's location and the names of its modules, found as Python finds them but without importing
        all."""
        found = json.loads(run([self.program("python"), "-c", LIST_MODULES], self.folder))
        return Path(found["file"]), set(found["modules"])


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = (data for name, data in wheel_files(wheel).items() if name.endswith(".dist-info/METADATA"))
    return message_from_string(text.decode("utf-8"))
