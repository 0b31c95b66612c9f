"""Elastic jobs that no launcher has started: workers come, go and are told to end; the rendezvous is restarted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.job import Job
from tests.support.rendezvous import until

TRAIN = """
import json, os, time
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo.elastic import ObjectState, run_fn

def say(**what):
    os.write(1, json.dumps({"rank": hvd.rank(), "size": hvd.size(), **what}).encode() + b"\\n")

hvd.init()

@run_fn
def train(state):
    say(step=state.step)
    while True:
        done = os.path.exists(os.environ.get("JOB_FOLDER", ".") + "/enough")
        total, stop = hvd.allreduce(np.array([1.0, done]), op=hvd.Sum)
        assert total == hvd.size()
        state.step += 1
        state.sizes.append(hvd.size())
        time.sleep(0.005)
        state.commit()
        if stop:
            return

state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, sizes=[])
train(state)
say(end=state.step, sizes=state.sizes)
"""
"""Counts its steps. Nothing is lost, and nothing done twice, if there are as many sizes as steps."""


def rules(**changes: Any) -> Rules:
    return Rules(**{"size": 3, "smallest": 1, "launched": False, **changes})


def told(job: Job, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in job.output(worker).stdout.splitlines(keepends=True) if line.endswith("\n")]


def together(job: Job, *workers: int) -> None:
    """Wait until these train together."""

    def are() -> bool:
        ended = [job.output(worker) for worker in workers if job.workers[worker].poll() is not None]
        assert not ended, ended
        last = [(told(job, worker) or [{}])[-1] for worker in workers]
        return sorted(each.get("rank", -1) for each in last if each.get("size") == len(workers)) == list(
            range(len(workers))
        )

    until(are, f"workers {workers} to train together", timeout=30)


def test_sigterm_costs_no_step(tmp_path: Path) -> None:
    with Job(3, TRAIN, tmp_path, elastic=ElasticEpochs(rules())) as job:
        together(job, 0, 1, 2)
        os.kill(job.workers[1].pid, signal.SIGTERM)
        assert job.workers[1].wait(20) == 0
        together(job, 0, 2)
        (tmp_path / "enough").touch()
        left, *_ = job.wait()[1:]
        assert "this worker was asked to end (SIGTERM)" in left.stderr
        assert "was asked to end; this worker leaves the job" in left.stderr
        for worker in (0, 2):
            assert job.output(worker).returncode == 0
            assert "Error" not in job.output(worker).stderr
            end = told(job, worker)[-1]
            assert end["end"] == len(end["sizes"])
            assert end["sizes"] == sorted(end["sizes"], reverse=True)
            assert set(end["sizes"]) == {2, 3}
