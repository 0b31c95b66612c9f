"""``hvdgloo.common``: the helpers that Horovod's programs import from there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hvdgloo
import hvdgloo.numpy as hvd
from hvdgloo.common import basics, process_sets, util
from tests.support.launching import run_command


def test_what_was_built_is_what_a_front_end_says() -> None:
    for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"):
        assert getattr(util, name)(verbose=True) == getattr(hvd, name)()


def test_the_questions_need_no_framework() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\n"
        "from hvdgloo.common.util import extension_available, gloo_built, gpu_available, mpi_built\n"
        "print(extension_available('numpy'), extension_available('torch'), gpu_available('torch'), mpi_built())\n"
    )
    done = run_command([sys.executable, "-c", program], timeout=50, check=True)
    assert done.stdout == "True False False False\n"


def test_a_front_end_is_available_if_its_framework_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert util.extension_available("numpy", verbose=True)
    # No front-ends: modules that are none, nonsense.
    assert not any(util.extension_available(name) for name in ("caffe", "errors", "common.util", ""))
    util.check_extension("horovod.numpy", "HOROVOD_WITH_NUMPY", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match="no front-end caffe; it has jax, keras, mxnet, numpy, tensorflow, torch"):
        util.check_extension("horovod.caffe", "HOROVOD_WITH_CAFFE", __file__)
    monkeypatch.setattr(util, "_FRONT_ENDS", {"torch": "a_package_that_is_not_installed"})
    assert not util.extension_available("torch")
    with pytest.raises(ImportError, match=r"hvdgloo\[torch\]"):
        util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)


def test_every_front_end_is_known() -> None:
    """A new one needs a line in the table."""
    folder = Path(hvdgloo.__file__).parent
    with_tensors = set(util._FRONT_ENDS) - {"keras"}  # which has its backends'
    assert {path.parent.name for path in folder.glob("[a-z]*/_adapter.py")} == with_tensors


def test_a_gpu_is_looked_for_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    util.gpu_available.cache_clear()
    assert util.gpu_available("torch") == torch.cuda.is_available()
    util.gpu_available.cache_clear()
    monkeypatch.setattr(util, "_GPU_QUESTIONS", {"torch": f"import os; print(os.getpid() != {os.getpid()})"})
    assert util.gpu_available("torch")
    monkeypatch.setattr(util, "_GPU_QUESTIONS", {"torch": "print(False)"})
    assert util.gpu_available("torch")  # asked once
    assert not util.gpu_available("numpy")
    assert not util.gpu_available("caffe")
    util.gpu_available.cache_clear()


def test_env_sets_variables_and_puts_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDGLOO_TEST_A", "before")
    monkeypatch.setenv("HVDGLOO_TEST_B", "kept")
    monkeypatch.delenv("HVDGLOO_TEST_C", raising=False)
    monkeypatch.delenv("HVDGLOO_TEST_D", raising=False)

    def shown() -> list[str | None]:
        return [os.environ.get(f"HVDGLOO_TEST_{letter}") for letter in "ABCD"]

    def fail() -> None:
        with util.env(HVDGLOO_TEST_A="inside", HVDGLOO_TEST_B=None, HVDGLOO_TEST_C="new", HVDGLOO_TEST_D="gone"):
            assert shown() == ["inside", "kept", "new", "gone"]
            del os.environ["HVDGLOO_TEST_D"]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert shown() == ["before", "kept", None, None]


def test_cached_functions_are_called_once() -> None:
    calls: list[tuple[int, int]] = []

    @util._cache
    def add(a: int, b: int = 0) -> int:
        calls.append((a, b))
        return a + b

    assert [add(1), add(1), add(1, b=2), add(1, b=2)] == [1, 1, 3, 3]
    assert calls == [(1, 0), (1, 2)]


def test_op_and_average() -> None:
    handle = util.get_average_backwards_compatibility_fun(SimpleNamespace(Average=10, Sum=11))
    assert handle(None, None) == 10
    assert handle(12, None) == 12
    with pytest.raises(ValueError, match="exclude each other"):
        handle(11, False)
    for average, op in ((True, 10), (False, 11)):
        with pytest.warns(DeprecationWarning, match="use op=Average") as record:
            assert handle(None, average) == op
        assert record[0].filename == __file__


@pytest.mark.parametrize(("number", "power"), [(-2, False), (0, False), (1, True), (2, True), (6, False), (64, True)])
def test_powers_of_two(number: int, power: bool) -> None:
    assert util.num_rank_is_power_2(number) is power


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [(5, 2, [[0, 1, 2], [3, 4]]), (2, 3, [[0], [1], []]), (6, 3, [[0, 1], [2, 3], [4, 5]]), (0, 1, [[]])],
)
def test_a_list_is_split_evenly(count: int, parts: int, expected: list[list[int]]) -> None:
    assert util.split_list(list(range(count)), parts) == expected


def test_iterables() -> None:
    assert [util.is_iterable(x) for x in ([], "", {}, iter(()), range(2))] == [True] * 5
    assert [util.is_iterable(x) for x in (None, 1, object())] == [False] * 3


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.13.0", "2.4.0", True),
        ("2.4.0", "2.13.0", False),
        ("1.10.1", "1.10.1", True),
        ("2.1.0+cu121", "2.1.0", True),
        ("2.1.0.post1", "2.1.0", True),
        ("2.1.0rc1", "2.1.0", False),
        ("2.1.0a0+gitabc", "2.1.0", False),
        ("2.1.0.dev20240101", "2.1.0", False),
        ("2.1.1a0", "2.1.0", True),
        ("2.1", "2.1.0", True),
        ("2.1.0.1", "2.1.0", True),
    ],
)
def test_versions(version: str, target: str, expected: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is expected


@pytest.mark.parametrize(("version", "target"), [("2.1.0", "2.1"), ("2.1.0", "2.1.0rc1"), ("next", "2.1.0"), (2, "2")])
def test_what_is_no_version(version: str, target: str) -> None:
    with pytest.raises(ValueError, match="version"):
        util.is_version_greater_equal_than(version, target)


def test_sets_of_the_process() -> None:
    with pytest.raises(ValueError, match=r"hvd\.init"):
        process_sets.add_process_set([0])
    hvd.init()
    try:
        assert basics._get_process_set_ids_and_ranks() == {0: [0]}
        with pytest.raises(ValueError, match="has the same ranks"):
            process_sets.add_process_set([0])
        assert process_sets.remove_process_set(process_sets.global_process_set) is False
    finally:
        basics.shutdown()
    assert not hvd.is_initialized()


def test_numbers_of_process_set_errors() -> None:
    kinds = ("INIT", "DYNAMIC", "UNKNOWN_SET", "FOREIGN_SET", "SHUTDOWN", "EXISTING_SET")
    numbers = [getattr(basics, f"HOROVOD_PROCESS_SET_ERROR_{kind}") for kind in kinds]
    assert numbers == [-1, -2, -3, -4, -5, -6]
