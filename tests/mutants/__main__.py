"""Run planted faults against the tests that should catch them; see README.md beside this file.

Exit status 0: every fault that could be tried was caught. 1: some fault survived, or could not be tried as it should.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.mutants import orders, patches
from tests.mutants.patches import ROOT, Mutant, PatchError

CAUGHT, SURVIVED, STALE, ERROR, NOT_RUN = "caught", "SURVIVED", "stale", "error", "not run"

_DEADLINE = 180.0
_BASELINE_DEADLINE = 1800.0
_COPIED = ("hvdgloo", "rendezvous", "runner", "tests", "examples", "benchmarks", "docs")


@dataclass(frozen=True)
class Environment:
    """An environment that the Makefile makes, beside the one in which this runs: its folder, and what its tests want
    to find in theirs."""

    folder: str
    variables: Mapping[str, str]


ENVIRONMENTS = {
    "tensorflow": Environment(".venv-tf", {"HVDGLOO_TEST_FRONTENDS": "tensorflow"}),
    "mxnet": Environment(".venv-mxnet", {"HVDGLOO_TEST_FRONTENDS": "mxnet"}),
    "spark": Environment(".venv-spark", {"HVDGLOO_TEST_REQUIRE_SPARK": "1"}),
    "pygloo": Environment(
        ".venv-pygloo", {"HVDGLOO_TEST_FRONTENDS": "numpy", "HVDGLOO_TEST_BACKENDS": "gloo,hierarchical"}
    ),
}
_NO_FAILURES = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")
"""A test that fails of one of these has met a patch that is wrong, and not the fault that it was to plant."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a mutant: one of the constants above, with the reason or the test."""

    word: str
    detail: str


@dataclass(frozen=True)
class Ended:
    """The end of a run of pytest.

    Attributes:
        status: its exit status; None if it did not end within the deadline.
        output: what it printed.
        cases: of its report, one for each test; None if it wrote none.
    """

    status: int | None
    output: str
    cases: Sequence[ElementTree.Element] | None


def judge(ended: Ended, deadline: float) -> Verdict:
    """Judge a run of the tests against the planted fault.

    Only a test that fails, or that ends by its own time limit, has caught something. Whatever keeps tests from running
    (a wrong id, a module or a fixture that breaks) has not.
    """
    if ended.status is None:
        return Verdict(ERROR, f"the tests had not ended after {deadline:.0f} s, and no limit of their own ended them")
    if ended.cases is None:
        if ended.status == 1 and "+ Timeout +" in ended.output:
            return Verdict(CAUGHT, "by a test's time limit")
        return Verdict(ERROR, f"pytest ended with status {ended.status}: {_last_line(ended.output)}")
    failed = [(case, failure) for case in ended.cases for failure in case.iter("failure")]
    if ended.status == 1 and failed:
        case, failure = failed[0]
        message = failure.get("message", "")
        if message.startswith(_NO_FAILURES):
            return Verdict(ERROR, f"{_name(case)}: {message.splitlines()[0]}")
        return Verdict(CAUGHT, _name(case))
    if ended.status == 0:
        skipped = [case for case in ended.cases if case.find("skipped") is not None]
        if len(skipped) == len(ended.cases):
            return Verdict(NOT_RUN, "every test was skipped")
        passed = len(ended.cases) - len(skipped)
        return Verdict(SURVIVED, f"{passed} test{'' if passed == 1 else 's'} passed")
    return Verdict(ERROR, f"pytest ended with status {ended.status}, no test failed: {_last_line(ended.output)}")


def interpreter(environment: str) -> Path | None:
    """The Python of an environment; None if it has not been made."""
    if not environment:
        return Path(sys.executable)
    path = ROOT / ENVIRONMENTS[environment].folder / "bin" / "python"
    return path if path.exists() else None


def hunt(mutant: Mutant, template: Path, pythons: Mapping[str, Path], deadline: float) -> Verdict:
    """Plant one fault in a copy of ``template``, and run the tests that should catch it."""
    try:
        changed = mutant.applied(template)
    except PatchError as error:
        return Verdict(STALE, str(error))
    python = pythons.get(mutant.environment) or interpreter(mutant.environment)
    if python is None:
        return Verdict(NOT_RUN, _absent(mutant.environment))
    with _folder() as folder:
        copy = folder / "checkout"
        shutil.copytree(template, copy, symlinks=True)
        for path, text in changed.items():
            (copy / path).write_text(text, encoding="utf-8")
            for compiled in (copy / path).parent.glob(f"__pycache__/{Path(path).stem}.*"):
                compiled.unlink()
        ended = _run_tests(python, copy, mutant.caught_by, mutant.environment, deadline, ["--exitfirst"])
    return judge(ended, deadline)


def _baseline(mutants: Sequence[Mutant], template: Path, pythons: Mapping[str, Path], jobs: int) -> bool:
    """Run every named test on the source as it is; False if they are not all green."""
    green = True
    for environment in sorted({mutant.environment for mutant in mutants}):
        tests = sorted({test for m in mutants if m.environment == environment for test in m.caught_by})
        place = environment or "this environment"
        python = pythons.get(environment) or interpreter(environment)
        if python is None:
            print(f"{NOT_RUN:9}{place}: {_absent(environment)}")
            continue
        workers = ["-n", str(jobs)] if jobs > 1 else []
        began = time.monotonic()
        ended = _run_tests(python, template, tests, environment, _BASELINE_DEADLINE, workers)
        seconds = time.monotonic() - began
        if ended.status != 0:
            green = False
            print(ended.output)
        word = "green" if ended.status == 0 else "RED"
        print(f"{word:9}{place}: {len(ended.cases or ())} tests of {len(tests)} ids, {seconds:.0f} s", flush=True)
    return green


def _run_tests(
    python: Path, checkout: Path, tests: Sequence[str], environment: str, deadline: float, options: Sequence[str]
) -> Ended:
    with _folder() as folder:
        report = folder / "report.xml"
        command = [
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(*options, *tests),
        ]
        variables = {**os.environ, **_variables(environment), "PYTHONPATH": str(checkout)}
        with open(folder / "output", "w+b") as output:
            process = subprocess.Popen(
                command,
                cwd=checkout,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(deadline)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else None
        return Ended(status, text, cases)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hvdgloo-mutant-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _make_template(folder: Path) -> Path:
    """A copy of the checkout, compiled once for all mutants."""
    template = folder / "template"
    template.mkdir()
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy2(entry, template)
        elif entry.name in _COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(entry, template / entry.name, symlinks=True, ignore=ignored)
    for name in ("rendezvous", "runner"):
        link = template / "hvdgloo" / name
        if not link.exists():  # a source distribution has no links
            link.symlink_to(Path("..") / name)
    compileall.compile_dir(template, quiet=2)
    return template


def _variables(environment: str) -> Mapping[str, str]:
    return ENVIRONMENTS[environment].variables if environment else {}


def _absent(environment: str) -> str:
    return f"{ENVIRONMENTS[environment].folder} is not there; the Makefile makes it"


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["(no output)"])[-1]


def _pythons(values: Sequence[str]) -> dict[str, Path]:
    pythons = {}
    for value in values:
        environment, _, path = value.partition("=")
        if environment not in ENVIRONMENTS or not path:
            raise SystemExit(f"--python: ENVIRONMENT=PATH, with one of {', '.join(ENVIRONMENTS)}; not {value!r}")
        pythons[environment] = Path(path).absolute()
    return pythons


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        its exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, or whose names begin so; default: all")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="so many at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    parser.add_argument("--baseline", action="store_true", help="run the named tests on the source as it is")
    parser.add_argument("--deadline", type=float, default=_DEADLINE, metavar="SECONDS", help="of each fault's tests")
    parser.add_argument("--python", action="append", default=[], metavar="ENVIRONMENT=PATH", help="its interpreter")
    options = parser.parse_args(arguments)
    pythons = _pythons(options.python)
    everything = [*patches.everything(), *orders.everything()]
    mutants = [m for m in everything if not options.names or m.name.startswith(tuple(options.names))]
    if not mutants:
        parser.error("no fault has such a name; --list shows them")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  [{mutant.part}]\n    {mutant.story}")
        return 0
    with _folder() as folder:
        template = _make_template(folder)
        if options.baseline:
            return 0 if _baseline(mutants, template, pythons, options.jobs) else 1
        return _hunt_all(mutants, template, pythons, options.deadline, options.jobs)


def _hunt_all(
    mutants: Sequence[Mutant], template: Path, pythons: Mapping[str, Path], deadline: float, jobs: int
) -> int:
    counts: dict[str, int] = {}

    def one(mutant: Mutant) -> None:
        began = time.monotonic()
        verdict = hunt(mutant, template, pythons, deadline)
        counts[verdict.word] = counts.get(verdict.word, 0) + 1
        seconds = time.monotonic() - began
        print(f"{verdict.word:9}{mutant.name:44}{seconds:6.1f} s  {verdict.detail}", flush=True)

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(one, mutants))
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return 1 if {SURVIVED, STALE, ERROR} & counts.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
