"""The second distribution, which brings the name ``horovod``: what is in it, old programs, and Horovod beside it."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.packaging.building import Built, Environment, build_all, environment, metadata, run, warnings, wheel_files
from tests.support.launching import run_command
from tests.support.pages import generator

HERE = ROOT / "packaging/horovod"

OLD = """
import torch
import horovod
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="total")
print("rank", hvd.rank(), "of", hvd.size(), total.tolist(), horovod.__version__, hvd.__name__, flush=True)
"""
NAMES = """
import importlib.util, pickle, subprocess, sys
import horovod, hvdgloo
import horovod.common.exceptions, horovod.common.process_sets as process_sets, horovod.runner, hvdgloo.errors
from horovod.common.util import gloo_built

assert sys.modules["horovod.common.exceptions"] is hvdgloo.common.exceptions
assert horovod.run is hvdgloo.run and callable(horovod.run)
assert importlib.util.find_spec("horovod.torch").name == "horovod.torch"
assert pickle.loads(pickle.dumps(process_sets.ProcessSet)) is process_sets.ProcessSet
for missing in ("horovod.nothing", "horovod.torch.nothing"):
    try:
        importlib.import_module(missing)
    except ModuleNotFoundError as error:
        assert error.name == missing
    else:
        raise AssertionError(missing)
command = [sys.executable, "-m", "horovod.runner.launch", "--version"]
assert subprocess.check_output(command, text=True).strip() == hvdgloo.__version__
print(horovod.__version__)
"""
CONSOLE = """
import horovod


def shout(word):
    import horovod.numpy as hvd

    hvd.init()
    return [f"{word} {rank}" for rank in hvd.allgather_object(hvd.rank())]


print(horovod.run(shout, args=("rank",), num_proc=2, verbose=0))
"""
PYTEST = """
import horovod.numpy as hvd
import numpy as np


def test_one():
    hvd.init()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [1.0, 1.0]
"""
TYPED = """
from horovod.common.process_sets import ProcessSet
from horovod.common.util import gloo_built

reveal_type(gloo_built)
ProcessSet([0, 1]).no_such_thing
"""


@pytest.fixture(scope="module")
def second(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Its distributions, from the same checkout."""
    return build_all(built.source / "packaging/horovod", tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def both(built: Built, second: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with both wheels."""
    return Environment(tmp_path_factory.mktemp("both") / "venv", built.wheel, second.wheel)


@pytest.fixture(scope="module")
def horovods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that has what counts of Horovod's: its name, its package and its command."""
    folder = tmp_path_factory.mktemp("horovods")
    (folder / "horovod").mkdir()
    (folder / "horovod/__init__.py").write_text("REAL = True\n")
    (folder / "horovod/torch.py").write_text("")
    (folder / "horovodrun").write_text("#!python\nprint('the real one')\n")
    call = "setup(name='horovod', version='0.28.1', packages=['horovod'], scripts=['horovodrun'])"
    (folder / "setup.py").write_text(f"from setuptools import setup\n{call}\n")
    run([sys.executable, "-m", "build", "--no-isolation", "--wheel", folder], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def imports_the_real_one(there: Environment) -> bool:
    program = "import horovod, horovod.torch; print(hasattr(horovod, 'REAL'))"
    return run([there.program("python"), "-c", program], there.folder) == "True\n"


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(second: Built) -> None:
    assert wheel_files(second.wheel) == wheel_files(second.checkouts_wheel)


def test_it_has_two_modules_and_stubs_and_nothing_else(second: Built) -> None:
    inside = {name for name in wheel_files(second.wheel) if ".dist-info/" not in name}
    stubs = {str(path.relative_to(HERE)) for path in generator("stubs").stand_in()}
    assert inside == {"horovod.py", "hvdgloo_horovod.py"} | stubs


def test_nothing_is_warned_of_while_building(second: Built) -> None:
    assert warnings(second) == []


def test_both_can_be_uploaded(second: Built) -> None:
    report = run([sys.executable, "-m", "twine", "check", "--strict", second.sdist, second.wheel], second.sdist.parent)
    assert report.count("PASSED") == 2


def test_it_is_of_hvdgloos_version_and_licence(built: Built, second: Built) -> None:
    first, data = metadata(built.wheel), metadata(second.wheel)
    assert (data["Name"], data["Version"]) == ("hvdgloo-horovod", first["Version"])
    needed = [each for each in data.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert needed == [f"hvdgloo=={first['Version']}"]
    assert data["Requires-Python"] == first["Requires-Python"]
    licences = [text for name, text in wheel_files(second.wheel).items() if name.endswith("/LICENSE")]
    assert licences == [(ROOT / "LICENSE").read_bytes()]
    setup = configparser.ConfigParser()
    setup.read(HERE / "setup.cfg", encoding="utf-8")
    assert setup["options.entry_points"]["console_scripts"].strip() == "horovodrun = hvdgloo_horovod:main"


def test_an_old_program_runs_by_its_old_command(both: Environment, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD)
    output = run([both.program("horovodrun"), "-np", "2", both.program("python"), "old.py"], tmp_path)
    for rank in (0, 1):
        assert f"rank {rank} of 2 [2.0, 2.0] 0.28.1 hvdgloo.torch" in output


def test_an_old_program_runs_by_itself(both: Environment, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD)
    output = run([both.program("python"), "old.py"], tmp_path)
    assert output == "rank 0 of 1 [1.0, 1.0] 0.28.1 hvdgloo.torch\n"


def test_a_console_and_pytest_have_it_as_well(both: Environment, tmp_path: Path) -> None:
    answer = run_command(
        [both.program("python"), "-i", "-"], input=f"exec({CONSOLE!r})\n", cwd=tmp_path, env=environment(), timeout=50
    )
    assert "['rank 0', 'rank 1']" in answer.stdout, answer.stderr
    (tmp_path / "test_one.py").write_text(PYTEST)
    assert "1 passed" in run(
        [both.program("python"), "-m", "pytest", "-p", "no:cacheprovider", "test_one.py"], tmp_path
    )


def test_its_modules_are_hvdgloos(both: Environment, tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text(NAMES)
    assert run([both.program("python"), "names.py"], tmp_path) == "0.28.1\n"


def test_type_checkers_see_hvdgloos_types(both: Environment, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--python-executable", both.program("python"), "typed.py"]
    checked = run_command(command, cwd=tmp_path, env=environment(), timeout=50)
    assert 'Revealed type is "def (verbose: bool =) -> bool"' in checked.stdout, checked.stdout
    assert '"ProcessSet" has no attribute "no_such_thing"' in checked.stdout


@pytest.mark.parametrize("source", ["sdist", "checkout"])
def test_source_is_not_installed_beside_horovod(source: str, built: Built, second: Built, horovods: Path,
                                                tmp_path: Path) -> None:  # fmt: skip
    what = second.sdist if source == "sdist" else second.source
    Environment(tmp_path / "clean", what)  # pip may keep the wheel that it has made of it
    there = Environment(tmp_path / "venv", built.wheel, horovods)
    with pytest.raises(AssertionError) as refused:
        there.install(what)
    sentence = f"Horovod itself is installed here ({there.site_packages / 'horovod'}), and hvdgloo-horovod brings"
    assert sentence in str(refused.value)
    assert not (there.site_packages / "horovod.py").exists()
    assert run([there.program("horovodrun")], tmp_path) == "the real one\n"


@pytest.mark.parametrize("first", ["horovod", "hvdgloo-horovod"])
def test_a_wheel_leaves_horovod_whole(first: str, built: Built, second: Built, horovods: Path, tmp_path: Path) -> None:
    """Nothing of a wheel runs while it is installed, so it cannot refuse; but it shares only the command."""
    wheels = [horovods, second.wheel] if first == "horovod" else [second.wheel, horovods]
    there = Environment(tmp_path / "venv", built.wheel)
    for wheel in wheels:
        there.install(wheel)
    assert imports_the_real_one(there)
    run_it = run_command([there.program("horovodrun"), "-np", "1", "true"], env=environment(), timeout=30)
    if first == "horovod":
        assert run_it.returncode == 1
        assert run_it.stderr.startswith(
            f"horovodrun: Horovod itself is installed ({there.site_packages / 'horovod/__init__.py'}), and so is"
        )
    else:
        assert (run_it.returncode, run_it.stdout) == (0, "the real one\n")
    there.uninstall("hvdgloo-horovod")
    assert imports_the_real_one(there)
