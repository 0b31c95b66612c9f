"""The examples, launched as their docstrings say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launching import Launcher, clean_environment, run_command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"the examples need {missing}")


def run_digits(launcher: Launcher, *arguments: str, np: int, example: str = "torch_digits.py") -> str:
    # With an interpreter that has imported torch already; README's program starts as users start theirs.
    script = str(EXAMPLES / example)
    # Several tests share the cores: more threads than one would mostly wait for each other.
    done = launcher.run(
        "-np", str(np), "--", warm.python(), script, *arguments, env={"OMP_NUM_THREADS": "1"}, timeout=55
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"all ranks hold identical parameters", done.stdout)) == 1
    assert all(line.startswith("[0]") for line in done.stdout.splitlines())
    return done.stdout


def accuracy_in(output: str) -> float:
    found = re.findall(r"test accuracy averaged over \d ranks?: ([\d.]+)%", output)
    assert len(found) == 1, output  # once, by rank 0
    return float(found[0])


@pytest.mark.parametrize("np", [1, 3])
def test_torch_digits_learns_to_read(launcher: Launcher, np: int) -> None:
    output = run_digits(launcher, *(["--epochs", "10"] if np == 1 else []), np=np)
    assert accuracy_in(output) >= 97.0
    assert re.search(r"trained on [1-9]\d* images per second", output)


def test_torch_digits_goes_on_from_its_checkpoint(launcher: Launcher) -> None:
    import torch

    saved = launcher.folder / "deep" / "saved"
    flags = ["--checkpoint-dir", str(saved), "--no-progress"]
    first = run_digits(launcher, *flags, "--epochs", "2", "--batch-size", "64", "--fp16-allreduce", np=2)
    assert "epoch 2/2" in first
    assert [file.name for file in saved.iterdir()] == ["checkpoint.pt"]

    # The checkpoint is the plain optimizer's: it can be read without hvdgloo.
    checkpoint = torch.load(saved / "checkpoint.pt", weights_only=True)
    parameters = [torch.nn.Parameter(tensor) for tensor in checkpoint["model"].values()]
    plain = torch.optim.SGD(parameters)
    plain.load_state_dict(checkpoint["optimizer"])
    assert plain.param_groups[0]["lr"] == pytest.approx(0.04)
    assert len(plain.state) == len(parameters)

    second = run_digits(launcher, *flags, "--epochs", "15", np=3)
    assert len(re.findall("resuming after epoch 2", second)) == 1
    assert "epoch 3/15" in second
    assert "epoch 2/15" not in second
    assert accuracy_in(second) >= 97.0
    resumed = torch.load(saved / "checkpoint.pt", weights_only=True)
    assert resumed["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.06), "the rate for three ranks"


def test_torch_digits_local_sgd_learns_to_read_with_few_outer_steps(launcher: Launcher) -> None:
    flags = ["--sync-every", "12", "--start", "10"]
    output = run_digits(launcher, *flags, np=3, example="torch_digits_local_sgd.py")
    (accuracy, outer) = re.findall(r"test accuracy: ([\d.]+)%, after 320 steps and (\d+) outer steps", output)[0]
    assert float(accuracy) >= 97.0
    assert int(outer) == 10 + 25 + 1  # finish() is the last


@pytest.mark.extended
@pytest.mark.timeout(120)  # mostly a tenth of it; programs start one after the other
def test_the_elastic_demo_loses_a_worker_and_gains_two(tmp_path: Path) -> None:
    """This is `make demo-elastic`: the program reaches the fixed job's accuracy all the same."""
    python = warm.python()
    done = run_command(
        [sys.executable, str(EXAMPLES / "demo_elastic.py"), "--python", python, "--epochs", "50"], timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"was killed by signal 9 \(SIGKILL\); 1 of 2 workers went on", done.stdout)) == 2
    (sizes,) = re.findall(r"trained \d+ steps, on ([\d> -]+) ranks", done.stdout)
    assert sizes.startswith("2 -> ")  # with no 1 if another worker came within an epoch
    assert sizes.endswith("4")
    assert accuracy_in(done.stdout) >= 97.0
    assert len(re.findall(r"all ranks hold identical parameters", done.stdout)) == 1


def test_the_elastic_example_alone_is_a_job_of_one_process() -> None:
    done = run_command(
        [warm.python(), str(EXAMPLES / "torch_digits_elastic.py"), "--epochs", "8", "--commit-every", "5"],
        timeout=55,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy_in(done.stdout) >= 96.0


def test_metrics_are_written_to_tensorboard(launcher: Launcher) -> None:
    """To one that notes what it is given, in the place of TensorBoard."""
    (launcher.folder / "noting.py").write_text(
        "import json, runpy, sys, types\n"
        "class SummaryWriter:\n"
        "    def __init__(self, folder): self.folder, self.scalars = folder, []\n"
        "    def add_scalar(self, *given): self.scalars.append(given)\n"
        "    def close(self): json.dump(self.scalars, open(self.folder + '.json', 'w'))\n"
        "import torch.utils\n"
        "sys.modules['torch.utils.tensorboard'] = types.SimpleNamespace(SummaryWriter=SummaryWriter)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    runs = launcher.folder / "runs"
    runs.mkdir()
    example = str(EXAMPLES / "torch_tensorboard.py")
    arguments = ("-np", "2", "--", warm.python(), "noting.py", example, "--steps", "30", "--log-dir", str(runs))
    done = launcher.run(*arguments, env={"OMP_NUM_THREADS": "1"}, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"metrics of 2 ranks are in {runs}" in done.stdout
    for rank in range(2):
        curves: dict[str, list[tuple[int, float]]] = {}
        for name, value, number in json.loads((runs / f"rank{rank}.json").read_text()):
            curves.setdefault(name, []).append((number, value))
        assert [number for number, _ in curves["step/seconds"]] == [9, 19, 29]
        assert all(value > 0 for _, value in curves["step/seconds"])
        parts = [curves[f"step/{part}"] for part in ("computing", "waiting for other ranks", "communicating")]
        for (_, whole), *shares in zip(curves["step/seconds"], *parts, strict=True):
            assert abs(whole - sum(value for _, value in shares)) < 1e-6
        assert any(name.startswith("bytes per second/") and points[-1][1] > 0 for name, points in curves.items())


@pytest.mark.parametrize("example", ["ddp_digits", "fsdp_digits"])
@pytest.mark.parametrize("how", ["hvdgloo-run", "torchrun"])
def test_programs_of_torch_distributed_learn_to_read(launcher: Launcher, example: str, how: str) -> None:
    script = str(EXAMPLES / f"{example}.py")
    if how == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        done = run_command(command, env=clean_environment(), cwd=launcher.folder)
    else:
        done = launcher.run("-np", "2", warm.python(), script, timeout=60)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"2 ranks: ([\d.]+) % of the test images are read correctly", done.stdout)
    assert len(found) == 1, done.stdout
    assert float(found[0]) >= 95.0
