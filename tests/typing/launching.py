"""Launching from Python: both ways of writing it have the function's own types."""

from __future__ import annotations

import hvdgloo
import hvdgloo.run
from hvdgloo.run import run


def train(epochs: int, *, rate: float) -> dict[str, float]:
    return {"loss": epochs * rate}


def launch() -> list[dict[str, float]]:
    results: list[dict[str, float]] = hvdgloo.run.run(train, (3,), {"rate": 0.1}, 2)
    results += hvdgloo.run(train, (3,), {"rate": 0.1}, np=2, verbose=True)
    results += run(train, (3,), {"rate": 0.1}, hosts="h1:2,h2:2", num_proc=2, start_timeout=60, ssh_port=2222)
    results += run(train, (3,), {"rate": 0.1}, hostfile="hosts", network_interfaces=["eth0"], env={"A": "1"})
    return results
