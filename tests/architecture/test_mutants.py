"""Planted faults stay plantable: every patch in tests/mutants fits the source, and the tests that it names exist.

Also how the command that runs them (``python -m tests.mutants``) tells a fault that was caught from all else.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.architecture.source import LIBRARY, ROOT, dotted, functions, library, nodes
from tests.mutants import __main__ as command
from tests.mutants import orders, patches
from tests.mutants.patches import FOLDER, Mutant, PatchError, parse

PATCHES = sorted(FOLDER.glob("*.patch"))
HEADER = "Everything is one too many.\n\nPart: example\nCaught-by: tests/test_example.py::test_one\n"
DIFF = """
--- a/example.py
+++ b/example.py
@@ -1,3 +1,3 @@
 def one():
-    return 1
+    return 2

"""


def _mutant(path: Path) -> Mutant:
    return patches.read(path)


@cache
def _tests_in(path: str) -> frozenset[str]:
    """Names of a file's tests, as pytest has them before any brackets."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(name.replace(".", "::") for name, _ in functions(tree))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_fits_the_source_and_makes_python(path: Path) -> None:
    changed = _mutant(path).applied(ROOT)
    assert changed
    assert [name for name in changed if name.partition("/")[0] not in LIBRARY] == []


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_the_tests_that_a_patch_names_exist(path: Path) -> None:
    missing = []
    for test in _mutant(path).caught_by:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file() or re.sub(r"\[.*", "", name) not in _tests_in(file):
            missing.append(test)
    assert missing == []


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_tells_its_story(path: Path) -> None:
    mutant = _mutant(path)
    assert len(mutant.story) > 40
    assert mutant.story.endswith(".")
    assert mutant.environment in {"", *command.ENVIRONMENTS}


def test_every_wait_for_a_gpu_can_be_left_out() -> None:
    """Each module that is listed has such calls, and no other calls those functions whose only effect is an order."""
    found = orders.everything()
    assert len({mutant.name for mutant in found}) == len(found) >= 10
    assert {path for mutant in found for path in mutant.hunks} == orders.ORDERS.keys() | orders.CONDITIONS.keys()
    for mutant in found:
        assert mutant.applied(ROOT)
    callers = {
        module.place
        for module in library().values()
        for node in nodes(module.tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"gpu.wait", "gpu.wait_for", "gpu.settle", "gpu.used_here"}
    }
    assert callers <= orders.ORDERS.keys()


def test_there_are_faults_in_all_parts() -> None:
    """Forty at least, in every package of the library that is more than names."""
    mutants = [_mutant(path) for path in PATCHES]
    assert len(mutants) >= 40
    folders = Counter("/".join(path.split("/")[:-1]) for mutant in mutants for path in mutant.hunks)
    packages = {
        str(path.parent.relative_to(ROOT)) for folder in LIBRARY for path in (ROOT / folder).rglob("__init__.py")
    }
    few = {
        package
        for package in packages
        if not any(folder == package or folder.startswith(f"{package}/") for folder in folders)
    }
    assert few <= _WITHOUT_FAULTS


_WITHOUT_FAULTS = frozenset({"hvdgloo/tensorflow/keras"})
"""Packages in which nothing is planted, since they are other packages' work under a second name."""


def test_a_patch_that_does_not_fit_is_noticed(tmp_path: Path) -> None:
    mutant = parse("example", HEADER + DIFF)
    for text in ("def one():\n    return 3\n", "def one():\n    return 1\n\n" * 2):
        (tmp_path / "example.py").write_text(text)
        with pytest.raises(PatchError, match="places"):
            mutant.applied(tmp_path)
    (tmp_path / "example.py").write_text("\n\ndef one():\n    return 1\n\nrest = 1\n")
    assert mutant.applied(tmp_path) == {"example.py": "\n\ndef one():\n    return 2\n\nrest = 1\n"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER, "no diff"),
        ("Part: example\nCaught-by: t::t\n" + DIFF, "header"),
        (HEADER.replace("Part", "Where") + DIFF, "header"),
        (HEADER.replace("Caught-by", "Test") + DIFF, "header"),
        (HEADER + DIFF.replace("+++ b/example.py", "+++ b/other.py"), "moved"),
        (HEADER + DIFF.replace("return 2", "return 1"), "changes nothing"),
        (HEADER + DIFF.replace("@@ -1,3 +1,3 @@\n", ""), "no line of a unified diff"),
    ],
)
def test_a_malformed_patch_is_noticed(text: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        parse("example", text)


def test_a_fault_that_is_no_python_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text("def one():\n    return 1\n\n")
    with pytest.raises(PatchError, match="invalid syntax"):
        parse("example", HEADER + DIFF.replace("return 2", "return return")).applied(tmp_path)


def _case(inner: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(f'<testcase classname="tests.test_example" name="test_one">{inner}</testcase>')


PASSED, SKIPPED = _case(), _case("<skipped/>")
FAILED = _case('<failure message="assert 2 == 1"/>')
BROKEN = _case('<error message="failed on setup"/>')
MISSPELLED = _case("<failure message=\"NameError: name 'x' is not defined\"/>")


@pytest.mark.parametrize(
    ("ended", "word", "detail"),
    [
        (command.Ended(1, "", [PASSED, FAILED]), command.CAUGHT, "test_example::test_one"),
        (command.Ended(1, "+++ Timeout +++\nstacks", None), command.CAUGHT, "by a test's time limit"),
        (command.Ended(0, "", [PASSED, SKIPPED]), command.SURVIVED, "1 test passed"),
        (command.Ended(0, "", [SKIPPED]), command.NOT_RUN, "every test was skipped"),
        (command.Ended(1, "1 error", [BROKEN]), command.ERROR, "pytest ended with status 1, no test failed: 1 error"),
        (command.Ended(1, "", [MISSPELLED]), command.ERROR, "test_example::test_one: NameError"),
        (command.Ended(2, "ImportError", [BROKEN]), command.ERROR, "pytest ended with status 2"),
        (command.Ended(4, "not found: t.py::x", []), command.ERROR, "status 4, no test failed: not found: t.py::x"),
        (command.Ended(5, "nothing", []), command.ERROR, "status 5"),
        (command.Ended(-9, "", None), command.ERROR, "status -9: (no output)"),
        (command.Ended(None, "+++ Timeout +++", None), command.ERROR, "had not ended after 7 s"),
    ],
)
def test_only_a_test_that_fails_has_caught_a_fault(ended: command.Ended, word: str, detail: str) -> None:
    verdict = command.judge(ended, 7.0)
    assert verdict.word == word
    assert detail in verdict.detail


def test_faults_are_planted_in_a_copy(tmp_path: Path) -> None:
    """One that is caught, one that survives and one that does not fit, in a checkout of three files."""
    (tmp_path / "example.py").write_text("def one():\n    return 1\n\n\ndef unused():\n    return 1\n")
    (tmp_path / "tests").mkdir()
    test = "from example import one\n\n\ndef test_one():\n    assert one() == 1\n"
    (tmp_path / "tests" / "test_example.py").write_text(test)
    survivor = parse("survivor", HEADER + DIFF.replace("one()", "unused()").replace("@@\n", "@@\n", 1).rstrip("\n"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    words = [
        command.hunt(mutant, tmp_path, {"": Path(sys.executable)}, 60.0).word
        for mutant in (parse("caught", HEADER + DIFF), survivor, parse("stale", HEADER + DIFF.replace("one", "two")))
    ]
    assert words == [command.CAUGHT, command.SURVIVED, command.STALE]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.py")} == before
