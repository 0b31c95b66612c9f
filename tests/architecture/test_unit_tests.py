"""Unit tests lie as what they test does: tests of hvdgloo/_net/tls.py are in tests/unit/net/test_tls*.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

from tests.architecture.source import ROOT, everything

OF_ALL_FRONT_ENDS = {"test_front_end_modules.py", "test_horovod_surface.py", "test_newcomers.py"}
"""Files at the top of tests/unit that test the library as a whole."""


def subjects() -> set[str]:
    """Return what can have unit tests, as paths below tests/unit: the modules and packages of the library, without
    ``hvdgloo`` and leading underscores, and the modules of benchmarks and tests/support."""
    names = (module.name.removeprefix("tests.").split(".") for module in everything())
    return {
        "/".join(part.lstrip("_") for part in parts if part != "hvdgloo")
        for parts in names
        if parts[0] in {"hvdgloo", "benchmarks", "support"}
    }


def misplaced(files: Iterable[str], known: set[str]) -> list[str]:
    """Return the files, as paths below tests/unit, whose place and name belong to none of the known subjects.

    What follows a module's name tells several files of one module apart: ``engine/test_coordinator_growth.py``.
    """
    return sorted(file for file in files if not any(name in known for name in _names(file)))


def _names(file: str) -> Iterable[str]:
    """Yield the subjects that a file may have: ``test_a_b.py`` tests ``a`` or ``a_b``."""
    path = PurePosixPath(file)
    words = path.stem.removeprefix("test_").split("_")
    return (str(path.parent / "_".join(words[:count])) for count in range(1, len(words) + 1))


def test_unit_tests_lie_where_the_module_lies_that_they_are_named_after() -> None:
    folder = ROOT / "tests/unit"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")} - OF_ALL_FRONT_ENDS
    assert len(files) > 100
    assert misplaced(files, subjects()) == []


@pytest.mark.parametrize(
    ("file", "is_misplaced"),
    [
        ("net/test_tls.py", False),
        ("net/test_tls_of_proxies.py", False),
        ("test_ray.py", False),
        ("test_tls.py", True),
        ("runner/net/test_tls.py", True),
        ("net/test_tlsfiles.py", True),
    ],
)
def test_a_file_at_another_place_is_noticed(file: str, is_misplaced: bool) -> None:
    assert misplaced([file], {"net", "net/tls", "ray"}) == [file] * is_misplaced


def test_every_folder_is_a_package() -> None:
    """Files of the same name in two folders are two modules by that alone."""
    folders = {path.parent for path in (ROOT / "tests/unit").rglob("test_*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
