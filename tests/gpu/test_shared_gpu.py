"""With one GPU: several ranks on it over real NCCL, to which each of them is on a host of its own.

NCCL refuses two ranks that have one host and one GPU. ``NCCL_HOSTID`` stands for the host, so with one for each rank
they connect, over sockets, and take turns on the GPU. NVIDIA does not support that, and it is no way to train; but it
is NCCL, with several ranks. It cannot show NVLink, P2P, InfiniBand or speed.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.gpu import programs
from tests.support.job import Ended, Job

PLANES = ["shm", "nccl"]
ENDED_WITHIN = 10.0

PLAIN = {
    **programs.SOCKETS,
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "2",
}
"""The same without all that could be in the way."""

WITHOUT_US = """
import torch.distributed as dist
device, rank, size = torch.device("cuda", 0), int(os.environ["HVDGLOO_RANK"]), int(os.environ["SIZE"])
torch.cuda.set_device(device)
store = dist.FileStore(os.path.join(os.environ["JOB_FOLDER"], "store"), size)
dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
total = torch.full((1 << 20,), rank + 1.0, device=device)
dist.all_reduce(total)
assert (total == size * (size + 1) / 2).all()
dist.destroy_process_group()
print("done")
"""


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables with which NCCL, in torch's own hands, takes two ranks on one GPU here."""
    code = programs.OWN_HOST + "import torch\n" + WITHOUT_US
    answers = []
    for variables in (programs.SOCKETS, PLAIN):
        with Job(2, code, tmp_path_factory.mktemp("nccl"), CUDA_VISIBLE_DEVICES="0", SIZE="2", **variables) as job:
            try:
                ended = job.wait(25)
            except AssertionError as error:
                answers.append(str(error)[-500:])
                continue
        if all((each.returncode, each.stdout.strip()) == (0, "done") for each in ended):
            return variables
        answers.append(ended[0].stderr[-500:])
    pytest.skip(f"NCCL takes no second rank on this GPU: {answers}")


def run(
    size: int, code: str, folder: Path, variables: Mapping[str, str], *, fresh: bool = False, timeout: float = 55
) -> list[Ended]:
    with Job(size, programs.OWN_HOST + code, folder, fresh=fresh, CUDA_VISIBLE_DEVICES="0", **variables) as job:
        return job.wait(timeout)


def check_part(size: int, part: str, folder: Path, variables: Mapping[str, str]) -> None:
    code = programs.START + f"PLANES = {PLANES!r}\n" + part + programs.END
    for ended in run(size, code, folder, variables):
        assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


@pytest.mark.parametrize("part", programs.PARTS)
def test_two_ranks_over_nccl(tmp_path: Path, nccl: Mapping[str, str], part: str) -> None:
    check_part(2, programs.PARTS[part], tmp_path, nccl)


def test_completion_by_streams(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    part = programs.PARTS["streams"] + programs.PARTS["training"]
    check_part(2, part, tmp_path, {**nccl, "HVDGLOO_GPU_COMPLETION": "stream"})


@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton needs a C compiler")
def test_a_compiled_model(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    check_part(2, programs.COMPILED, tmp_path, nccl)


def test_four_ranks_over_nccl(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    part = programs.PARTS["collectives"] + programs.TRAINING + "STEPS = 60\n" + programs.STRESS
    check_part(4, part, tmp_path, nccl)


@pytest.mark.parametrize(
    ("when", "completion", "size"),
    [
        ("connecting", "host", 2),
        ("allreduce", "host", 2),
        ("allreduce", "stream", 3),
        ("shutdown", "stream", 2),
    ],
)
def test_a_killed_rank_ends_the_others_soon_and_not_by_a_signal(
    tmp_path: Path, nccl: Mapping[str, str], note: Callable[[str, str], None], when: str, completion: str, size: int
) -> None:
    code = programs.OWN_HOST + programs.START + f"WHEN = {when!r}\n" + programs.LOST
    variables = {**nccl, "HVDGLOO_GPU_COMPLETION": completion, "CUDA_VISIBLE_DEVICES": "0"}
    with Job(size, code, tmp_path, **variables) as job:
        job.workers[1].wait(50)
        begin = time.monotonic()
        ended = job.wait(50)
        took = time.monotonic() - begin
    assert ended.pop(1).returncode == -signal.SIGKILL
    for survivor in ended:
        assert (survivor.returncode, survivor.stdout.strip()) == (0, "done"), survivor.stderr  # not -6, for SIGABRT
    note(f"from a rank's death ({when}, completion by {completion}, one GPU) to the others' end", f"{took:.1f} s")
    assert took < ENDED_WITHIN


def test_a_rank_that_raises_is_named_by_the_other(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    survivor, raised = run(2, programs.START + programs.RAISES, tmp_path, nccl)
    assert (survivor.returncode, survivor.stdout.strip()) == (0, "done"), survivor.stderr
    assert raised.returncode == 1
    assert "the program's own" in raised.stderr


@pytest.mark.parametrize("seconds", [1.5, 6.0])
def test_ranks_whose_ends_lie_apart(tmp_path: Path, nccl: Mapping[str, str], seconds: float) -> None:
    """NCCL may wait for its peers when it closes; hvdgloo waits 3 s for it."""
    for ended in run(2, programs.START + f"SECONDS = {seconds}\n" + programs.APART, tmp_path, nccl):
        assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


def test_programs_that_do_not_shut_down(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    code = programs.START + "hvd.allreduce(torch.ones(1 << 20, device=device))\nprint('done')\n"
    for ended in run(2, code, tmp_path, nccl, fresh=True):
        assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


def test_an_elastic_job_goes_on_without_a_killed_rank(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    epochs = ElasticEpochs(Rules(size=2, smallest=1, launched=False, failures_per_host=9))
    code = programs.OWN_HOST + programs.START + programs.ELASTIC
    with Job(2, code, tmp_path, elastic=epochs, CUDA_VISIBLE_DEVICES="0", **nccl) as job:
        ended = job.wait(55)
    (survivor,) = [each for each in ended if each.returncode != -signal.SIGKILL]
    assert (survivor.returncode, survivor.stdout.split()) == (0, ["1", "30.0"]), survivor.stderr


def test_init_again(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    for ended in run(2, programs.START + programs.AGAIN, tmp_path, nccl):
        assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


def test_no_setting_of_torch_s_is_in_the_way(tmp_path: Path, nccl: Mapping[str, str]) -> None:
    settings = {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    code = programs.START + f"PLANES = {PLANES!r}\n" + programs.TRAINING + programs.END
    for ended in run(2, code, tmp_path, {**nccl, **settings}, fresh=True):  # torch reads some when it is imported
        assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr
