"""The distributions that users install: their content, and a job that runs from them alone.

These tests have an environment of their own (``make test-packaging``), with the tools of the extra ``packaging``.
Nothing is fetched: distributions are built and installed with what is here.
"""

from __future__ import annotations

import configparser
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.architecture.source import ROOT, Module, library
from tests.packaging.building import (
    Built,
    Environment,
    checked_in,
    checkout,
    environment,
    metadata,
    run,
    warnings,
    wheel_files,
)
from tests.support.launching import wait_for

LINKS = {"hvdgloo/rendezvous", "hvdgloo/runner"}
PAGE = ROOT / "hvdgloo/_observe/page/static"
DATA = {
    "hvdgloo/py.typed",
    *(f"hvdgloo/_observe/page/static/{file.relative_to(PAGE)}" for file in PAGE.rglob("*.*")),
}
WORKER = """
import numpy as np
import hvdgloo
import hvdgloo.numpy as hvd

hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
print("rank", hvd.rank(), "of", hvd.size(), "has", total.tolist(), "from", hvdgloo.__file__, flush=True)
"""


def installed_as(module: Module) -> str:
    """A module's file in a wheel."""
    folder = module.name.replace(".", "/")
    return f"{folder}/__init__.py" if module.path.name == "__init__.py" else f"{folder}.py"


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(built: Built) -> None:
    assert wheel_files(built.wheel) == wheel_files(built.checkouts_wheel)


def test_the_wheel_has_every_module_and_data_file_and_nothing_else(built: Built) -> None:
    """Pain 1: nothing is compiled, so one wheel is for all Pythons, machines and frameworks."""
    assert built.wheel.name.endswith("-py3-none-any.whl")
    inside = {name for name in wheel_files(built.wheel) if ".dist-info/" not in name}
    modules = {installed_as(module) for module in library().values()}
    stubs = {f"{installed_as(m)}i" for m in library().values() if m.path.with_suffix(".pyi").is_file()}
    assert inside == modules | stubs | DATA


def test_the_sdist_has_every_file_of_the_project(built: Built) -> None:
    made = {name for name in built.sdist_files if name == "PKG-INFO" or name.startswith("hvdgloo.egg-info/")}
    assert built.sdist_files - made == checked_in() - LINKS - {".gitignore"}


def test_nothing_is_warned_of_while_building(built: Built) -> None:
    assert warnings(built) == []


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
    """Start the wheel's ``hvdgloo-rendezvous``, and return its output once it is ready."""
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
        wait_for(lambda: "State: " in output.read_text() or process.poll() is not None, what="the service")
        yield output.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_rendezvous_service_runs_from_the_wheel(installed: Environment, service: str, tmp_path: Path) -> None:
    state = re.search(r"State: (\S+)", service)
    assert state, service
    token = run([installed.program("hvdgloo-rendezvous"), "--status-token", "--secret-file", "secret"], tmp_path)
    answer = requests.get(state[1], headers={"Authorization": f"Bearer {token.strip()}"}, timeout=10)
    assert answer.status_code == 200, answer.text
    assert "0 of 2 workers" in answer.json()["epochs"][0]["summary"]
