"""The program by which the Makefile finds Pythons."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import pythons
from tests.support.pages import ROOT

THIS = "{}.{}".format(*sys.version_info[:2])


def program(path: Path, runs: str = sys.executable) -> Path:
    """A program that passes all of its arguments on to another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(runs)} "$@"\n')
    path.chmod(0o755)
    return path


class TestPythons:
    def test_the_own_installation_comes_first_then_the_path_then_newest_releases(self, tmp_path: Path) -> None:
        wanted = [
            program(tmp_path / name)
            for name in (
                "own/bin/python3.11",
                "one/python3.12",
                "two/python3.12",
                "home/.pyenv/versions/3.12.1/bin/python3.12",
                "home/.pyenv/versions/3.9.18/bin/python3.9",
                "home/.local/share/uv/python/cpython-3.14.0-linux/bin/python3.14",
            )
        ]
        program(tmp_path / "one/python3-config")
        program(tmp_path / "one/python3.12-config")
        path = os.pathsep.join([str(tmp_path / "one"), "", str(tmp_path / "missing"), str(tmp_path / "two")])
        assert list(pythons.candidates({"PATH": path}, tmp_path / "home", tmp_path / "own")) == wanted

    def test_pyenv_and_uv_may_be_elsewhere(self, tmp_path: Path) -> None:
        wanted = [program(tmp_path / "a/versions/3.13.0/bin/python3.13"), program(tmp_path / "b/x/bin/python3.14")]
        folders = {"PYENV_ROOT": str(tmp_path / "a"), "UV_PYTHON_INSTALL_DIR": str(tmp_path / "b")}
        assert list(pythons.candidates(folders, tmp_path, tmp_path)) == wanted

    def test_a_program_is_what_it_says_and_not_what_it_is_called(self, tmp_path: Path) -> None:
        """pyenv's shims have names of versions that they do not run."""
        shims = [program(tmp_path / name / "python3.99") for name in ("a", "b")]
        broken = program(tmp_path / f"python{THIS}", runs="false")
        real = program(tmp_path / f"c/python{THIS}")
        assert pythons.find("3.99", shims) is None
        assert pythons.find(THIS, [*shims, broken, real]) == real

    def test_what_does_not_run_is_no_python(self, tmp_path: Path) -> None:
        assert pythons.version(program(tmp_path / "missing", runs="/nowhere/python")) is None
        assert pythons.version(tmp_path / "not-there") is None
        assert pythons.version(tmp_path) is None

    def test_all_that_is_released_is_told_and_newer_ones_that_are_here(self, tmp_path: Path) -> None:
        programs = [tmp_path / name for name in ("python3.99", "python3.9", "python3.12", "python3.100")]
        assert pythons.all_versions(programs) == [*pythons.RELEASED, "3.99", "3.100"]

    def test_the_first_of_the_versions_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert pythons.main(["3.99", THIS]) == 0
        assert pythons.version(Path(capsys.readouterr().out.strip())) == THIS

    def test_nothing_found_is_a_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert pythons.main(["3.98", "3.99"]) == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert "3.98 or 3.99" in told.err

    def test_classifiers_name_the_versions_that_were_tested(self) -> None:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg", encoding="utf-8")
        named = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.M)
        matrix = re.search(r"^\| Python \|.*\| (.*) \|$", (ROOT / "docs/compatibility.md").read_text("utf-8"), re.M)
        assert matrix
        assert named == matrix[1].split(", ")
        assert set(named) <= set(pythons.RELEASED)
