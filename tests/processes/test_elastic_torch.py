"""A torch program of Horovod's shape trains on while its processes die and others come, without a launcher."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import hvdgloo
from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.job import Job

pytest.importorskip("torch")

AS_HOROVOD = str(Path(hvdgloo.__file__).parent / "as_horovod")
"""Entry that ``hvdgloo-run --as-horovod`` puts on the workers' path."""

PROGRAM = """
import os
import torch
import hvdgloo.torch as hvd

folder = os.environ["JOB_FOLDER"]

def mark(name):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(folder, name + ".part"), os.path.join(folder, name))

hvd.init()
model = torch.nn.Linear(1000, 10, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

resets = 0

def on_reset():
    global resets
    resets += 1

@hvd.elastic.run
def train(state):
    enough = torch.zeros(1)
    while not enough:
        optimizer.zero_grad()
        state.model.weight.sum().backward()  # each step takes 1 from each weight
        optimizer.step()
        state.batch += 1
        state.sizes.append(hvd.size())
        state.commit()
        if state.batch % 5 == 0:
            mark(f"size-{hvd.size()}.rank-{hvd.rank()}.batch-{state.batch}")
        enough = hvd.allreduce(torch.tensor([float(os.path.exists(os.path.join(folder, "enough")))]), op=hvd.Max)
    return state.batch

state = hvd.elastic.TorchState(model, optimizer, batch=0, sizes=[])
state.register_reset_callbacks([on_reset])
batch = train(state)
assert batch == state.batch == len(state.sizes), (batch, state.batch, len(state.sizes))
assert (model.weight == -batch).all(), (batch, model.weight)
assert os.environ["HVDGLOO_SIZE"] == os.environ["WORLD_SIZE"] == str(hvd.size())
changes = [size for size, before in zip(state.sizes, [0, *state.sizes]) if size != before]
print(hvd.size(), changes, resets)
"""


def pid_of(job: Job, folder: Path, size: int, rank: int, after: int = 0, timeout: float = 40) -> int:
    """Wait until a rank of a job of some size is further than a batch; its process's id."""
    deadline = time.monotonic() + timeout
    while True:
        for path in folder.glob(f"size-{size}.rank-{rank}.batch-*"):
            if path.suffix != ".part" and int(path.name.rpartition("-")[2]) > after:
                return int(path.read_text())
        outputs = [job.output(number) for number in range(len(job.workers))]
        ended = sum(output.returncode != 999 for output in outputs) == len(outputs)
        assert not ended, outputs
        assert time.monotonic() < deadline, outputs
        time.sleep(0.01)


def batch_of(folder: Path) -> int:
    """The last batch that any worker has reported."""
    return max(int(path.name.removesuffix(".part").rpartition("-")[2]) for path in folder.glob("size-*"))


@pytest.mark.parametrize(("victim", "library"), [(0, "hvdgloo"), (1, "horovod")])
@pytest.mark.timeout(150)  # mostly a tenth of it
def test_pain_26_survivors_of_a_killed_worker_go_on_and_another_joins(
    tmp_path: Path, victim: int, library: str
) -> None:
    """Horovod's #3264, #2908 and #2484: there, one worker's end aborted the others."""
    program = PROGRAM.replace("import hvdgloo.torch", f"import {library}.torch")
    assert f"import {library}.torch as hvd" in program
    rules = Rules(size=3, smallest=1, launched=False)
    with Job(3, program, tmp_path, elastic=ElasticEpochs(rules), PYTHONPATH=AS_HOROVOD) as job:
        pid = pid_of(job, tmp_path, 3, victim)
        (killed,) = [worker for worker in job.workers if worker.pid == pid]
        killed.send_signal(signal.SIGKILL)
        pid_of(job, tmp_path, 2, 0)
        job.add()
        pid_of(job, tmp_path, 3, 2, after=batch_of(tmp_path))
        (tmp_path / "enough").touch()
        ended = job.wait(40)
    survivors = [end for worker, end in zip(job.workers, ended, strict=True) if worker is not killed]
    assert [end.returncode for end in survivors] == [0, 0, 0], ended
    assert [end.stdout for end in survivors] == ["3 [3, 2, 3] 2\n"] * 2 + ["3 [3, 2, 3] 1\n"], ended
