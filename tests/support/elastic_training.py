"""A small elastic program, and how far its workers are by what they print."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

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
    say(step=state.step, pid=os.getpid(), rendezvous=os.environ["HVDGLOO_RENDEZVOUS"])
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


def told(text: str) -> list[dict[str, Any]]:
    """Return the workers' lines so far, without a launcher's prefixes and without tracebacks."""
    lines = (line[line.index('{"') :] for line in text.splitlines(keepends=True) if '{"' in line and line[-1] == "\n")
    return [json.loads(line) for line in lines]


def are_together(last: Iterable[dict[str, Any]], size: int) -> bool:
    """Tell whether these lines, the last one of each worker, form one job of this size."""
    return sorted(each.get("rank", -1) for each in last if each.get("size") == size) == list(range(size))


def check_end(end: dict[str, Any]) -> list[int]:
    """Nothing was lost, and nothing done twice. Returns the sizes of the job at each step."""
    assert end["end"] == len(end["sizes"])
    sizes: list[int] = end["sizes"]
    return sizes
