"""NCCL's groups end with an epoch, even where its operations never do, and the next epoch has groups of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.elastic_job import ElasticJob, Worker, everywhere  # noqa: E402
from tests.support.gpus import Simulated, on_gpu, simulated  # noqa: E402


@pytest.fixture
def gpus() -> Iterator[Simulated]:
    with simulated() as made:
        on_gpu(torch.ones(1)).zero_()  # what torch makes at its first use, several threads must not make at once
        yield made


@pytest.mark.parametrize("ends", [True, False], ids=["ends when aborted", "never ends"])
def test_nccl_is_left_with_an_epoch_and_met_again_in_the_next(gpus: Simulated, ends: bool) -> None:
    """Horovod's #3111 and #3611: there, a communicator of the last epoch aborted the process or kept its GPU busy."""

    def total(worker: Worker) -> list[float]:
        with gpus.machine.as_rank(worker.context.rank):
            hvd: Frontend[Any] = Frontend(TorchAdapter(), lambda: worker.context)
            tensor = on_gpu(torch.ones(1000))
            return list(set(hvd.allreduce(tensor, op=ReduceOp.SUM, name="x").tolist()))

    with ElasticJob(3, operation_timeout=5.0) as job:
        workers = job.start(3)
        assert everywhere(workers, total) == [[3.0]] * 3
        old = list(gpus.nccl.groups)
        assert len(old) == 3
        gpus.nccl.faults.lost.add(2)
        if not ends:
            gpus.nccl.faults.hangs_after_abort.update((0, 1))
        workers.pop().die()
        started = time.monotonic()
        everywhere(workers, Worker.survive)
        assert time.monotonic() - started < 8
        assert all(group.is_aborted for group in old[:2])
        gpus.nccl.faults.lost.clear()
        gpus.nccl.faults.hangs_after_abort.clear()
        assert everywhere(workers, total) == [[2.0]] * 2
        assert len(gpus.nccl.groups) == 5
        assert not any(group.is_aborted for group in gpus.nccl.groups[3:])
