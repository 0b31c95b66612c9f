"""Elastic jobs whose workers share nothing between two outer steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.job import Job
from tests.support.rendezvous import until

pytest.importorskip("torch")

PROGRAM = """
import json, os, signal
import torch
import hvdgloo.torch as hvd

folder, victim, fatal, streaming = os.environ["JOB_FOLDER"], VICTIM, FATAL, STREAMING
H, LR, MU = 4, 0.5, 0.5

def mark(name):
    open(os.path.join(folder, name), "w").close()

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

hvd.init()
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.zeros(1000))
model.noise = torch.nn.Parameter(torch.zeros(1))
sgd = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DiLoCo(sgd, model, H, outer_lr=LR, outer_momentum=MU, **streaming)
starts = []

@hvd.elastic.run
def train(state):
    starts.append((state.batch, hvd.size()))
    if state.batch == 0:
        optimizer.state[model.noise]["own"] = torch.tensor([os.getpid()])  # such as a moment
    enough = False
    while not enough:
        if hvd.size() == 3 and hvd.rank() == victim and state.batch == fatal:
            if (state.batch + 1) % H:
                die()
            optimizer._hvd.outer._receive = die  # in the outer step, when its part has been sent
        optimizer.zero_grad()
        # Each step takes 1 from each weight; the noise of all ranks together is 0.
        (model.weight.sum() + model.noise.sum() * (hvd.rank() - (hvd.size() - 1) / 2)).backward()
        optimizer.step()
        state.batch += 1
        state.commit()
        if state.batch % H == 0:
            mark(f"size-{hvd.size()}.batch-{state.batch}")
            here = torch.tensor([float(os.path.exists(os.path.join(folder, "enough")))])
            enough = bool(hvd.allreduce(here, op=hvd.Max))

state = hvd.elastic.TorchState(model, optimizer, batch=0)
train(state)
optimizer.finish()
anchor = moment = 0.0
changes = [H] * (state.batch // H)
if streaming:  # the weights' fragment begins its outer steps in the middle of each round
    changes = [H // 2, *changes[1:], H // 2]
for change in changes:
    moment = MU * moment + change
    anchor -= LR * (change + MU * moment)
torch.testing.assert_close(model.weight, torch.full((1000,), anchor))
outer = optimizer.outer_state_dict()
steps = 2 * (state.batch // H) + 1 if streaming else state.batch // H
assert (outer["iterations"], outer["steps"]) == (state.batch, steps), (outer, state.batch)
assert streaming or model.noise.item() == 0, model.noise
assert len(set(hvd.allgather_object(model.weight.detach().numpy().tobytes()))) == 1
print(json.dumps([*starts, optimizer.state[model.noise]["own"].item() == os.getpid()]))
"""


def reached(folder: Path, size: int, after: int) -> bool:
    """Tell whether a job of some size is further than a batch."""
    return any(int(path.name.rpartition("-")[2]) > after for path in folder.glob(f"size-{size}.batch-*"))


@pytest.mark.parametrize(
    ("fatal", "streaming", "lost"),
    [
        pytest.param(9, {}, (11,), marks=pytest.mark.extended),
        (11, {}, (11, 12)),  # the survivors may have had the victim's part already
        (10, {"fragments": 2, "overlap": 1}, (9, 11)),
    ],
    ids=["between outer steps", "in an outer step", "while an outer step is under way"],
)
@pytest.mark.timeout(150)  # mostly a tenth of it
def test_a_lost_worker_costs_the_others_few_steps_and_newcomers_have_the_momentum(
    tmp_path: Path, fatal: int, streaming: dict[str, int], lost: tuple[int, ...]
) -> None:
    program = PROGRAM.replace("VICTIM", "1").replace("FATAL", str(fatal)).replace("STREAMING", str(streaming))
    with Job(3, program, tmp_path, elastic=ElasticEpochs(Rules(size=3, smallest=1, launched=False))) as job:
        until(lambda: reached(tmp_path, 2, fatal), "two workers go on", 60)
        job.add()
        last = max(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("size-*"))
        until(lambda: reached(tmp_path, 3, max(last, 20)), "three workers go on", 60)
        (tmp_path / "enough").touch()
        ended = job.wait(40)
    (killed,) = [end for end in ended if end.returncode == -signal.SIGKILL]
    survivors = [end for end in ended if end is not killed]
    assert [end.returncode for end in survivors] == [0, 0, 0], ended
    for end in survivors[:2]:
        first, again, _, has_own_moments = json.loads(end.stdout)
        assert has_own_moments
        assert first == [0, 3]
        assert again in [[batch, 2] for batch in lost], ended
    assert not json.loads(survivors[2].stdout)[-1]  # a newcomer has another worker's
