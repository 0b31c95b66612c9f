"""With one GPU: a job of one rank over NCCL, and two ranks that share the GPU, staged through the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import programs
from tests.support.job import Job

ALONE = ["local", "alone"]
OVER_NCCL = ["local", "nccl"]
SHARED = ["shm"]
NCCL = {"HVDGLOO_GPU_OPERATIONS": "nccl"}


def run(
    size: int, part: str, planes: list[str], folder: Path, *, launched: bool = True, fresh: bool = False, **environ: str
) -> tuple[list[str], str]:
    """Run a program on ranks that see one GPU.

    Returns:
        what each rank wrote to its standard error, and the first one's alone.
    """
    code = programs.START + f"PLANES = {planes!r}\n" + part + programs.END
    if not launched:
        code = (
            "import os\nfor name in [n for n in os.environ if n.startswith('HVDGLOO_')]: del os.environ[name]\n" + code
        )
    with Job(size, code, folder, fresh=fresh, CUDA_VISIBLE_DEVICES="0", **environ) as job:
        for ended in job.wait(55):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr
        errors = [job.output(rank).stderr for rank in range(size)]
    return errors, errors[0]


@pytest.mark.parametrize("part", programs.PARTS)
def test_one_rank_over_nccl(tmp_path: Path, part: str) -> None:
    run(1, programs.PARTS[part], OVER_NCCL, tmp_path, **NCCL)


def test_one_rank_without_a_communicator(tmp_path: Path) -> None:
    run(1, "".join(programs.PARTS.values()), ALONE, tmp_path)


def test_a_program_that_nothing_has_launched(tmp_path: Path) -> None:
    run(1, programs.COLLECTIVES, ALONE, tmp_path, launched=False)


@pytest.mark.parametrize("part", programs.PARTS)
def test_two_ranks_that_share_it_through_the_host(tmp_path: Path, part: str) -> None:
    _, first = run(2, programs.PARTS[part], SHARED, tmp_path)
    assert "ranks 0 and 1 use the same GPU" in first


def test_sets_of_four_ranks_that_share_it(tmp_path: Path) -> None:
    run(4, programs.SETS, SHARED, tmp_path)


def test_completion_by_streams(tmp_path: Path) -> None:
    """The other tests complete on the host."""
    part = programs.PARTS["streams"] + programs.PARTS["training"]
    run(1, part, OVER_NCCL, tmp_path, HVDGLOO_GPU_COMPLETION="stream", **NCCL)


def test_the_host_if_it_is_asked_for(tmp_path: Path) -> None:
    run(1, programs.COLLECTIVES, ["local"], tmp_path, HVDGLOO_GPU_OPERATIONS="gloo")


def test_torch_s_sanitizer_is_on(tmp_path: Path) -> None:
    """It finds a race that is planted, or the next test shows nothing."""
    race = """
if not on_cpu:
    shared, side = torch.zeros(1 << 20, device=device), torch.cuda.Stream()
    with torch.cuda.stream(side):
        try:
            shared += 1
        except Exception as error:
            print(error, file=__import__("sys").stderr)
"""
    errors, _ = run(1, "hvd.allreduce(torch.ones(1, device=device))\n" + race, OVER_NCCL, tmp_path, fresh=True, **NCCL,
                    TORCH_CUDA_SANITIZER="1")  # fmt: skip
    assert "CSAN detected" in errors[0]


def test_torch_s_sanitizer_watches_the_data_thread(tmp_path: Path) -> None:
    """A race that is planted there is found, too."""
    race = """
if not on_cpu:
    from hvdgloo._backends import cuda
    pack, shared, side = cuda.PinnedMemory.pack, torch.zeros(1 << 20, device=device), torch.cuda.Stream()
    def racing(self, target, sources):
        try:
            shared.add_(1)
        except Exception as error:
            print(error, file=__import__("sys").stderr)
        pack(self, target, sources)
    cuda.PinnedMemory.pack = racing
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # which the allreduce does not wait for
        shared += 1
    hvd.allreduce(torch.ones(1, device=device))
"""
    errors, _ = run(2, programs.WATCHED + race, SHARED, tmp_path, fresh=True, TORCH_CUDA_SANITIZER="1")
    assert "CSAN detected" in errors[0]


@pytest.mark.parametrize(
    ("planes", "size", "environ"),
    [
        pytest.param(OVER_NCCL, 1, NCCL, id="NCCL"),
        pytest.param(OVER_NCCL, 1, {"HVDGLOO_GPU_COMPLETION": "stream", **NCCL}, id="NCCL, by streams"),
        pytest.param(SHARED, 2, {}, id="staged"),
    ],
)
def test_torch_s_sanitizer_finds_no_race(tmp_path: Path, planes: list[str], size: int, environ: dict[str, str]) -> None:
    part = programs.WATCHED + programs.COLLECTIVES + programs.CHANNELS_LAST
    # torch reads it when it is imported.
    errors, _ = run(size, part, planes, tmp_path, fresh=True, TORCH_CUDA_SANITIZER="1", **environ)
    assert not [error for error in errors if "CSAN detected" in error]


@pytest.mark.parametrize("size", [1, 2])
def test_a_program_that_does_not_shut_down(tmp_path: Path, size: int) -> None:
    code = programs.START + "hvd.allreduce(torch.ones(1 << 20, device=device))\nprint('done')\n"
    environ = NCCL if size == 1 else {}
    with Job(size, code, tmp_path, fresh=True, CUDA_VISIBLE_DEVICES="0", **environ) as job:
        for ended in job.wait(50):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


def test_nccl_that_cannot_be_had_is_an_error_that_says_why(tmp_path: Path) -> None:
    code = programs.START + "hvd.allreduce(torch.ones(1, device=device))\n"
    with Job(2, code, tmp_path, HVDGLOO_GPU_OPERATIONS="nccl", CUDA_VISIBLE_DEVICES="0") as job:
        for ended in job.wait(50):
            assert ended.returncode == 1
            assert "ranks 0 and 1 use the same GPU, which NCCL refuses" in ended.stderr


def test_a_device_here_and_none_there(tmp_path: Path) -> None:
    code = """
try:
    hvd.allreduce(torch.ones(2, device=device if rank else "cpu"), name="x")
except hvd.HorovodInternalError as error:
    assert "device type" in str(error), error
else:
    raise AssertionError("no rank noticed")
assert hvd.allreduce(torch.ones(2, device=device), op=hvd.Sum).tolist() == [2.0, 2.0]
"""
    run(2, code, SHARED, tmp_path)


def test_pain_22_a_killed_rank_is_named(tmp_path: Path) -> None:
    code = programs.START + "WHEN = 'allreduce'\n" + programs.LOST
    with Job(2, code, tmp_path, CUDA_VISIBLE_DEVICES="0") as job:
        survivor, _ = job.wait(50)
        assert (survivor.returncode, survivor.stdout.strip()) == (0, "done"), survivor.stderr


def test_a_step_of_one_rank(tmp_path: Path, note: Callable[[str, str], None]) -> None:
    with Job(1, programs.START + programs.THROUGHPUT, tmp_path, CUDA_VISIBLE_DEVICES="0") as job:
        (ended,) = job.wait(55)
        assert ended.returncode == 0, ended.stderr
    note("a step of 16 linear layers of 2048, one rank", (tmp_path / "times.json").read_text())
