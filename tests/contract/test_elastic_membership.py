"""Workers of an elastic job as threads: from one epoch into the next, with real engines and data planes."""

from __future__ import annotations

import pytest

from tests.support.elastic_job import ElasticJob, Worker, everywhere


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_survivors_of_a_lost_worker_go_on_in_the_same_process(victim: int, plane: str) -> None:
    with ElasticJob(3, cpu_operations=plane) as job:
        workers = job.start(3)
        assert everywhere(workers, Worker.total) == [3.0] * 3
        workers.pop(victim).die()
        contexts = everywhere(workers, Worker.survive)
        assert [(context.rank, context.size, context.topology.epoch) for context in contexts] == [(0, 2, 1), (1, 2, 1)]
        assert everywhere(workers, Worker.total) == [2.0] * 2
