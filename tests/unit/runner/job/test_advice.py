"""The launcher's advice after a failed worker's last lines."""

from __future__ import annotations

import pytest

from hvdgloo.runner.job.advice import advise
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.launch_result import LaunchResult

PYTHON = "/env/bin/python"


def missing(module: str) -> str:
    return f"ModuleNotFoundError: No module named '{module}'"


def test_a_program_of_horovod_s_needs_a_flag_whatever_runs_it() -> None:
    for argv in ([PYTHON, "train.py"], ["/bin/sh", "train.sh"]):
        advice = advise(missing("horovod"), argv, PYTHON)
        assert "--as-horovod" in advice
        assert "import hvdgloo" in advice
        assert PYTHON not in advice


def test_the_interpreter_that_lacks_a_module_is_named() -> None:
    advice = advise(missing("torch"), [PYTHON, "train.py"], PYTHON)
    assert advice.startswith(f"the workers run with {PYTHON}: install torch in its environment, ")
    assert advice.endswith("or start hvdgloo-run from the one that has it")
    assert advise(missing("torch"), [PYTHON, "train.py"], PYTHON, option="--remote-python").endswith(
        "or name the interpreter that has it with --remote-python"
    )


@pytest.mark.parametrize(
    ("module", "meant"),
    [
        ("hvdgloo.pytorch", "hvdgloo.torch"),
        ("horovod.pytorch", "horovod.torch"),
        ("hvdgloo.tf", "hvdgloo.tensorflow"),
        ("hvdgloo.tensorfow", "hvdgloo.tensorflow"),
    ],
)
def test_a_front_end_of_another_name_is_told_whatever_runs_it(module: str, meant: str) -> None:
    for argv in ([PYTHON, "train.py"], ["/bin/sh", "train.sh"]):
        assert advise(missing(module), argv, PYTHON) == f"did you mean {meant}?"
    package, _, name = module.partition(".")
    cause = f"ImportError: cannot import name '{name}' from '{package}' (/env/{package}/__init__.py)"
    assert advise(cause, [PYTHON, "train.py"], PYTHON) == f"did you mean {meant}?"
    assert advise(missing("hvdgloo.zebra"), [PYTHON, "train.py"], PYTHON) == ""


def test_a_pytorch_that_is_built_for_the_cpu_is_told() -> None:
    cause = "AssertionError: Torch not compiled with CUDA enabled"
    advice = advise(cause, [PYTHON, "train.py"], PYTHON)
    assert advice.startswith(f"the PyTorch of {PYTHON} is built for the CPU only: install a build for CUDA")
    assert advise(cause, ["/bin/sh", "train.sh"], PYTHON).startswith("the PyTorch is built for the CPU only")


@pytest.mark.parametrize("name", ["RuntimeError", "torch.AcceleratorError"])
def test_a_gpu_that_is_not_there_is_told_of_local_ranks(name: str) -> None:
    assert "torch.cuda.set_device(hvd.local_rank())" in advise(
        f"{name}: CUDA error: invalid device ordinal", [], PYTHON
    )


@pytest.mark.parametrize(
    ("cause", "argv"),
    [
        ("", [PYTHON, "train.py"]),
        ("ValueError: No module named 'torch'", [PYTHON, "train.py"]),
        (missing("torch.nn.later"), [PYTHON, "train.py"]),
        (missing("torch"), ["/usr/bin/python3", "train.py"]),
    ],
    ids=["silent", "another error", "part of a package", "not our interpreter"],
)
def test_where_nothing_is_known_nothing_is_said(cause: str, argv: list[str]) -> None:
    assert advise(cause, argv, PYTHON) == ""


def test_it_ends_the_summary() -> None:
    outcome = JobOutcome(Failure(0, "h1", 1, "exited with status 1"))
    head = "the job failed: rank 0 on host h1 exited with status 1"
    whole = [head, "Its last lines were:", "  last", "do this"]
    assert LaunchResult(outcome, (), ("last",), "do this").summary().splitlines() == whole
    assert LaunchResult(outcome, (), ("last",), "do this").summary(whole=False).splitlines() == whole
    in_sight = LaunchResult(outcome, (), ("last",), "do this", in_sight=True)
    assert in_sight.summary(whole=False).splitlines() == [head, "do this"]
    assert str(in_sight.error()).splitlines() == whole, "an exception may be shown elsewhere"


@pytest.mark.parametrize(
    ("status", "reason", "end"),
    [
        (1, "exited with status 1", "exited with status 1: ValueError: bad\\x1b[0m data"),
        (-9, "was killed by signal 9 (SIGKILL)", "was killed by signal 9 (SIGKILL)"),
    ],
    ids=["an exception", "a signal, after an exception that was survived"],
)
def test_the_exception_stands_in_the_first_line(status: int, reason: str, end: str) -> None:
    report = LaunchResult(
        JobOutcome(Failure(2, "h1", status, reason)),
        (),
        ("ValueError: bad",),
        exception="ValueError: bad\x1b[0m data",
        why_over="fewer than 2 workers are left",
    )
    assert report.headline() == f"the job failed: rank 2 on host h1 {end}; fewer than 2 workers are left"
    assert report.summary().splitlines()[0] == report.headline()
