"""With two GPUs or more: ranks with a GPU each, over NCCL."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import programs
from tests.support.job import Job

PARTS = {
    "every collective": programs.COLLECTIVES,
    "uneven sizes, and alltoall's gradient": programs.UNEVEN,
    "streams": programs.STREAMS,
    "a GPU that is not current": programs.ANOTHER_GPU,
    "training": programs.TRAINING,
    "channels_last": programs.CHANNELS_LAST,
    "overlapping sets": programs.SETS,
    "join": programs.JOIN,
}
PLANES = ["shm", "nccl"]
ENDED_WITHIN = 10.0


@pytest.mark.parametrize("part", PARTS)
def test_over_nccl(tmp_path: Path, several: int, part: str) -> None:
    code = programs.START + f"PLANES = {PLANES!r}\n" + PARTS[part] + programs.END
    with Job(several, code, tmp_path) as job:
        for ended in job.wait(58):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


@pytest.mark.parametrize("part", ["streams", "a GPU that is not current", "training", "overlapping sets"])
def test_completion_by_streams(tmp_path: Path, several: int, part: str) -> None:
    code = programs.START + f"PLANES = {PLANES!r}\n" + PARTS[part] + programs.END
    with Job(several, code, tmp_path, HVDGLOO_GPU_COMPLETION="stream") as job:
        for ended in job.wait(58):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


@pytest.mark.parametrize("completion", ["host", "stream"])
@pytest.mark.parametrize("when", ["connecting", "allreduce", "shutdown"])
def test_a_killed_rank_ends_the_others_soon_and_none_by_a_signal(
    tmp_path: Path, several: int, note: Callable[[str, str], None], when: str, completion: str
) -> None:
    code = programs.START + f"WHEN = {when!r}\n" + programs.LOST
    with Job(several, code, tmp_path, HVDGLOO_GPU_COMPLETION=completion) as job:
        deadline = time.monotonic() + 50
        while job.workers[1].poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begin = time.monotonic()
        ended = job.wait(50)
        took = time.monotonic() - begin
    for rank, each in enumerate(ended):
        if rank != 1:
            assert (each.returncode, each.stdout.strip()) == (0, "done"), each.stderr  # not -6, for SIGABRT
    note(f"from a rank's death ({when}, completion by {completion}) to the others' end", f"{took:.1f} s")
    assert took < ENDED_WITHIN


def test_throughput_beside_ddp(tmp_path: Path, several: int, note: Callable[[str, str], None]) -> None:
    with Job(several, programs.START + programs.THROUGHPUT, tmp_path) as job:
        job.succeed(58)
    times = json.loads((tmp_path / "times.json").read_text())
    shown = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in times.items())
    note(f"a step of 16 linear layers of 2048, {several} ranks", shown)
