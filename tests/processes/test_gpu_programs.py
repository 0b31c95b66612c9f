"""The parts of ``make test-gpu`` that can be tested without a GPU: its programs on the CPU, and its report."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.gpu import programs, report
from tests.support import warm
from tests.support.job import Job
from tests.support.launching import run_command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the programs need torch")

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = {"HVDGLOO_TEST_DEVICE": "cpu"}


def test_the_programs_on_the_cpu(tmp_path: Path) -> None:
    """All in one job; those about streams and captures do nothing there."""
    parts = "".join([*programs.PARTS.values(), programs.COMPILED]).replace("STEPS = 120", "STEPS = 20")
    code = programs.START + "PLANES = []\n" + parts + programs.END
    with Job(2, code, tmp_path, **ON_CPU) as job:
        for ended in job.wait(55):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


@pytest.mark.parametrize("when", ["connecting", "allreduce", "shutdown"])
def test_the_program_that_loses_a_rank_on_the_cpu(tmp_path: Path, when: str) -> None:
    with Job(2, programs.START + f"WHEN = {when!r}\n" + programs.LOST, tmp_path, **ON_CPU) as job:
        survivor, lost = job.wait(50)
    assert lost.returncode == -9
    assert (survivor.returncode, survivor.stdout.strip()) == (0, "done"), survivor.stderr


def test_the_programs_that_end_on_the_cpu(tmp_path: Path) -> None:
    for name, statuses in (("RAISES", [0, 1]), ("AGAIN", [0, 0]), ("APART", [0, 0])):
        (tmp_path / name).mkdir()
        with Job(2, programs.START + "SECONDS = 0.2\n" + getattr(programs, name), tmp_path / name, **ON_CPU) as job:
            ended = job.wait(50)
        assert [each.returncode for each in ended] == statuses, ended
        assert all(each.stdout.strip() == "done" for each in ended if not each.returncode), ended


def test_the_elastic_program_on_the_cpu(tmp_path: Path) -> None:
    epochs = ElasticEpochs(Rules(size=2, smallest=1, launched=False, failures_per_host=9))
    with Job(2, programs.START + programs.ELASTIC, tmp_path, elastic=epochs, **ON_CPU) as job:
        ended = job.wait(50)
    assert sorted((each.returncode, each.stdout.split()) for each in ended) == [(-9, []), (0, ["1", "30.0"])]


def test_the_program_that_measures_on_the_cpu(tmp_path: Path) -> None:
    small = programs.THROUGHPUT.replace("2048", "32").replace("range(20)", "range(2)")
    with Job(2, programs.START + small, tmp_path, **ON_CPU) as job:
        job.succeed(50)
    assert set(json.loads((tmp_path / "times.json").read_text())) == {"hvdgloo", "DDP"}


def run_tests_of_gpus(**environ: str) -> subprocess.CompletedProcess[str]:
    """As ``make test-gpu`` does it, on a machine that has no GPU that torch can use."""
    return run_command(
        [warm.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_one_gpu.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environ},
        timeout=55,
        check=False,
    )


def test_without_a_gpu_make_test_gpu_says_so_and_leaves_no_report(tmp_path: Path) -> None:
    done = run_tests_of_gpus(HVDGLOO_TEST_REQUIRE_GPU="1", HVDGLOO_TEST_REPORT=str(tmp_path))
    assert done.returncode == 1
    assert "make test-gpu: needs a GPU that torch can use" in done.stdout + done.stderr
    assert "nothing was tested, and there is no report" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_suite_skips_these_tests(tmp_path: Path) -> None:
    done = run_tests_of_gpus(HVDGLOO_TEST_REQUIRE_GPU="", HVDGLOO_TEST_REPORT=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_report_has_all_that_is_needed_to_judge_it(tmp_path: Path) -> None:
    results = report.Results(
        tests=[
            ("test_over_nccl[training]", "passed", 12.34, ""),
            ("test_over_nccl[join]", "failed", 58.0, "AssertionError: it hangs"),
            ("test_throughput_beside_ddp", "skipped", 0.0, "needs two GPUs or more"),
        ],
        notes={"a step of 16 linear layers": "hvdgloo 5.00 ms, DDP 5.10 ms"},
    )
    when = datetime(2027, 1, 2, 3, 4, tzinfo=timezone.utc)
    text = report.text(results, {"torch": "2.13.0", "NCCL": "2.27.3"}, ["0: NVIDIA H200, 139.8 GiB"], "GPU0 X", when)
    assert "2027-01-02 03:04 UTC. 1 GPU. **1 passed, 1 failed, 1 skipped.**" in text
    assert "| NCCL | 2.27.3 |" in text
    assert "- 0: NVIDIA H200, 139.8 GiB" in text
    assert "```\nGPU0 X\n```" in text
    assert "| test_over_nccl[training] | passed | 12.3 |" in text
    assert "### test_over_nccl[join]: failed\n\n```\nAssertionError: it hangs\n```" in text
    assert "- a step of 16 linear layers: hvdgloo 5.00 ms, DDP 5.10 ms" in text
    path = report.write(results, tmp_path)
    assert path == tmp_path / "gpu-report.md"
    written = path.read_text(encoding="utf-8")
    assert f"| torch | {report.versions()['torch']} |" in written
    assert "- none that torch can use" in written or "compute capability" in written
