"""Elastic training is right: a job that loses and gains workers computes what one process would on the same batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.job import Job

torch = pytest.importorskip("torch")

EXAMPLES, EPOCHS, BATCH = 103, 3, 4
"""The examples are divisible among no number of ranks, so that there is padding."""

MODEL = f"""
import numpy as np
import torch

random = np.random.default_rng(5)
inputs = torch.from_numpy(random.standard_normal(({EXAMPLES}, 8)))
targets = inputs @ torch.from_numpy(random.standard_normal((8, 3)))

def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

def loss_of(model, batch):
    return ((model(inputs[batch]) - targets[batch]) ** 2).mean()
"""

PROGRAM = (
    MODEL
    + f"""
import json
import os
import signal
import time
import hvdgloo.torch as hvd

folder = os.environ["JOB_FOLDER"]
# "step:rank:where" for each of the job's deaths, and "step:size" for each time that it waits until it has grown.
deaths = {{int(d.split(":")[0]): d.split(":")[1:] for d in os.environ.get("DEATHS", "").split()}}
growth = dict(map(int, g.split(":")) for g in os.environ.get("GROWTH", "").split())

def mark(name, text=""):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        file.write(text)
    os.rename(os.path.join(folder, name + ".part"), os.path.join(folder, name))

def die_here(step, where, *_):
    rank, place = deaths.get(step, ("", ""))
    if place == where and hvd.rank() == int(rank) and not os.path.exists(os.path.join(folder, f"died-{{step}}")):
        mark(f"died-{{step}}")
        os.kill(os.getpid(), signal.SIGKILL)

hvd.init()
model = make_model()
optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range({EXAMPLES}))
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, log=[])
model[0].weight.register_hook(lambda _: die_here(state.step, "backward"))

@hvd.elastic.run
def train(state):
    while state.epoch < {EPOCHS}:
        mine = list(state.sampler)
        for number, at in enumerate(range(0, len(mine), {BATCH})):
            while hvd.size() < growth.get(state.step, 0):
                if not os.path.exists(os.path.join(folder, f"at-{{state.step}}")) and hvd.rank() == 0:
                    mark(f"at-{{state.step}}")
                state.check_host_updates()
            batch = mine[at : at + {BATCH}]
            loss_of(state.model, batch).backward()
            die_here(state.step, "step")
            state.optimizer.step()
            state.optimizer.zero_grad()
            die_here(state.step, "commit")
            state.sampler.record_batch(number, len(batch))
            state.log.append([state.epoch, hvd.allgather_object(batch)])
            state.step += 1
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()

train(state)
if hvd.rank() == 0:
    parameters = [parameter.tolist() for parameter in model.parameters()]
    mark("done", json.dumps({{"step": state.step, "log": state.log, "parameters": parameters}}))
"""
)


def ended(job: Job, folder: Path, *, deaths: int) -> dict[str, Any]:
    """Return rank 0's final output in a job whose other workers all end well."""
    done: dict[str, Any] = json.loads(job.wait_for_file("done"))
    statuses = Counter(end.returncode for end in job.wait())
    assert statuses == {0: len(job.workers) - deaths, **({-9: deaths} if deaths else {})}
    assert len(list(folder.glob("died-*"))) == deaths
    return done


def elastic(**rules: Any) -> ElasticEpochs:
    return ElasticEpochs(Rules(**{"smallest": 1, "launched": False, **rules}))


@pytest.mark.extended
@pytest.mark.parametrize(("victim", "where"), [(0, "backward"), (2, "step"), (1, "commit")])
def test_of_the_same_size_again_it_computes_the_same_bits(tmp_path: Path, victim: int, where: str) -> None:
    """The job waits for a replacement, which gets the state. Ranks are others' then, and have the batches of before."""
    folders = [tmp_path / name for name in ("plain", "troubled")]
    results = []
    for folder, deaths in zip(folders, ("", f"4:{victim}:{where} 13:{victim}:{where}"), strict=True):
        folder.mkdir()
        rules = elastic(size=3, smallest=3)
        with Job(3, PROGRAM, folder, elastic=rules, DEATHS=deaths, HVDGLOO_DETERMINISTIC="1") as job:
            for step in (4, 13) if deaths else ():
                job.wait_for_file(f"died-{step}")
                job.add()
            results.append(ended(job, folder, deaths=2 if deaths else 0))
    plain, troubled = results
    assert troubled["log"] == plain["log"]
    assert troubled["step"] == len(plain["log"]) == EPOCHS * 9  # ceil(ceil(103 / 3) / 4)
    assert troubled["parameters"] == plain["parameters"]


def replayed(log: list[tuple[int, list[list[int]]]]) -> list[Any]:
    """The parameters after the same batches in one process."""
    made: dict[str, Any] = {}
    exec(MODEL, made)
    model = made["make_model"]()
    optimizer = made["make_optimizer"](model)
    for _, batches in log:
        optimizer.zero_grad()
        for batch in batches:
            (made["loss_of"](model, batch) / len(batches)).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def test_of_any_size_it_computes_what_one_process_would_and_sees_each_example_once(tmp_path: Path) -> None:
    """From one to three, two die at once in the middle of things, four, and one more dies; a commit in each step."""
    sizes = [1, 3, 2, 4, 3]
    deaths = "7:1:backward 17:0:step"
    with Job(1, PROGRAM, tmp_path, elastic=elastic(size=1), DEATHS=deaths, GROWTH="3:3 11:4") as job:
        job.wait_for_file("at-3")
        job.add()
        job.add()
        job.wait_for_file("at-11")
        job.add()
        job.add()
        done = ended(job, tmp_path, deaths=2)
    log = done["log"]
    # No step was lost, and none made twice.
    assert done["step"] == len(log)
    seen = [len(batches) for _, batches in log]
    assert [size for i, size in enumerate(seen) if i == 0 or seen[i - 1] != size] == sizes
    assert [seen.index(3), seen.index(2), seen.index(4)] == [3, 7, 11]
    assert seen.index(3, 11) == 17
    for actual, expected in zip(done["parameters"], replayed(log), strict=True):
        np.testing.assert_allclose(np.array(actual), expected, rtol=1e-5, atol=1e-6)
    for epoch in range(EPOCHS):
        of_epoch = [batches for number, batches in log if number == epoch]
        counts = Counter(index for batches in of_epoch for batch in batches for index in batch)
        assert set(counts) == set(range(EXAMPLES))
        padding = sum(counts.values()) - EXAMPLES
        divisions = [
            len(batches) for i, batches in enumerate(of_epoch) if i == 0 or len(of_epoch[i - 1]) != len(batches)
        ]
        assert padding <= sum(size - 1 for size in divisions)
