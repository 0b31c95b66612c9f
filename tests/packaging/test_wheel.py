"""What users install: both distributions, what is in them, and that a job runs from them alone.

These tests have an environment of their own (``make test-packaging``), with the tools of the extra ``packaging``.
Nothing is fetched: distributions are built and installed with what is here.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import requests

from tests.architecture.source import ROOT, Module, library
from tests.support.launching import clean_environment, wait_for

LINKS = {"hvdgloo/rendezvous", "hvdgloo/runner"}
DATA = {"hvdgloo/py.typed", "hvdgloo/rendezvous/templates/job.html"}
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
WORKER = """
import numpy as np
import hvdgloo
import hvdgloo.numpy as hvd

hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
print("rank", hvd.rank(), "of", hvd.size(), "has", total.tolist(), "from", hvdgloo.__file__, flush=True)
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
    """The distributions, and what was printed while they were built."""

    sdist: Path
    wheel: Path
    checkouts_wheel: Path
    log: str

    @property
    def sdist_files(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = checkout(folder / "checkout")
    log = build(source, folder / "dist")  # the wheel from the sdist
    log += build(source, folder / "direct", "--wheel")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    (direct,) = (folder / "direct").glob("*.whl")
    return Built(sdist, wheel, direct, log)


class Environment:
    """A virtual environment that has nothing but hvdgloo; its dependencies are borrowed from this one's."""

    def __init__(self, folder: Path, *install: str | Path) -> None:
        self.folder = folder
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        borrowed = [path for path in sys.path if os.path.basename(path) == "site-packages"]
        # Of these folders .pth files are not read, so an editable hvdgloo of this environment is not seen from there.
        (folder / "lib" / version / "site-packages/borrowed.pth").write_text("\n".join(borrowed) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
        run([*pip, "--no-index", "--no-deps", "--no-build-isolation", "--use-pep517", *install], folder.parent)

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def modules(self) -> tuple[Path, set[str]]:
        """Where hvdgloo lies, and the names of its modules, found as Python finds them but without importing all."""
        found = json.loads(run([self.program("python"), "-c", LIST_MODULES], self.folder))
        return Path(found["file"]), set(found["modules"])


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel that was made of the sdist."""
    return Environment(tmp_path_factory.mktemp("installed") / "venv", built.wheel)


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = (data for name, data in wheel_files(wheel).items() if name.endswith(".dist-info/METADATA"))
    return message_from_string(text.decode("utf-8"))


def installed_as(module: Module) -> str:
    """A module's file in a wheel."""
    folder = module.name.replace(".", "/")
    return f"{folder}/__init__.py" if module.path.name == "__init__.py" else f"{folder}.py"


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(built: Built) -> None:
    assert wheel_files(built.wheel) == wheel_files(built.checkouts_wheel)


def test_the_wheel_has_every_module_and_data_file_and_nothing_else(built: Built) -> None:
    inside = {name for name in wheel_files(built.wheel) if ".dist-info/" not in name}
    modules = {installed_as(module) for module in library().values()}
    stubs = {f"{installed_as(m)}i" for m in library().values() if m.path.with_suffix(".pyi").is_file()}
    assert inside == modules | stubs | DATA


def test_the_sdist_has_every_file_of_the_project(built: Built) -> None:
    made = {name for name in built.sdist_files if name == "PKG-INFO" or name.startswith("hvdgloo.egg-info/")}
    assert built.sdist_files - made == checked_in() - LINKS - {".gitignore"}


def test_nothing_is_warned_of_while_building(built: Built) -> None:
    harmless = ("no previously-included files matching", "byte-compiling is disabled")
    warnings = [line for line in built.log.splitlines() if "warn" in line.lower() or "deprecat" in line.lower()]
    assert [line for line in warnings if not any(text in line for text in harmless)] == []


def test_both_can_be_uploaded(built: Built) -> None:
    report = run([sys.executable, "-m", "twine", "check", "--strict", built.sdist, built.wheel], built.sdist.parent)
    assert report.count("PASSED") == 2


def test_the_metadata_are_complete(built: Built) -> None:
    data = metadata(built.wheel)
    assert data.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert data["Description-Content-Type"] == "text/markdown"
    assert data["License"] == "Apache-2.0"
    licences = [text for name, text in wheel_files(built.wheel).items() if name.endswith("/LICENSE")]
    assert licences == [(ROOT / "LICENSE").read_bytes()]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(data.get_all("Provides-Extra", [])) == set(setup["options.extras_require"])


def test_the_wheel_installs_every_module(installed: Environment) -> None:
    file, modules = installed.modules()
    assert installed.folder in file.parents
    assert modules == set(library())


@pytest.mark.parametrize("source", ["checkout", "sdist"])
def test_an_editable_installation_has_every_module(built: Built, source: str, tmp_path: Path) -> None:
    if source == "checkout":
        folder = checkout(tmp_path / "source")
    else:
        with tarfile.open(built.sdist) as archive:
            archive.extractall(tmp_path, filter="data")
        (folder,) = tmp_path.glob("hvdgloo-*")
    file, modules = Environment(tmp_path / "venv", "--editable", folder).modules()
    assert file == folder / "hvdgloo/__init__.py"
    assert modules == set(library())


def test_two_workers_run_from_the_wheel(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [installed.program("hvdgloo-run"), "-np", "2", installed.program("python"), "worker.py"]
    output = run(command, tmp_path)
    file, _ = installed.modules()
    for rank in (0, 1):
        assert f"rank {rank} of 2 has [3.0, 3.0, 3.0] from {file}" in output


@pytest.fixture
def service(installed: Environment, tmp_path: Path) -> Iterator[str]:
    """What ``hvdgloo-rendezvous`` of the wheel has printed when it was ready."""
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [installed.program("hvdgloo-rendezvous"), "--np", "2", "--secret-file", "secret"],
            cwd=tmp_path,
            env=environment(),
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(lambda: "Page: " in output.read_text() or process.poll() is not None, what="the service")
        yield output.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_rendezvous_service_runs_from_the_wheel(installed: Environment, service: str, tmp_path: Path) -> None:
    """Its page is a template, a file of the wheel that is no module."""
    page = re.search(r"Page: (\S+)", service)
    assert page, service
    token = run([installed.program("hvdgloo-rendezvous"), "--status-token", "--secret-file", "secret"], tmp_path)
    answer = requests.get(page[1], headers={"Authorization": f"Bearer {token.strip()}"}, timeout=10)
    assert answer.status_code == 200, answer.text
    assert "0 of 2 workers" in answer.text
