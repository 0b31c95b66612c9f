"""Elastic jobs that no launcher has started: workers come, go and are told to end; the rendezvous is restarted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.elastic_training import TRAIN, are_together, check_end, told
from tests.support.job import Job
from tests.support.rendezvous import until


def rules(**changes: Any) -> Rules:
    return Rules(**{"size": 3, "smallest": 1, "launched": False, **changes})


def said(job: Job, worker: int) -> list[dict[str, Any]]:
    return told(job.output(worker).stdout)


def together(job: Job, *workers: int) -> None:
    """Wait until these train together."""

    def are() -> bool:
        ended = [job.output(worker) for worker in workers if job.workers[worker].poll() is not None]
        assert not ended, ended
        return are_together([(said(job, worker) or [{}])[-1] for worker in workers], len(workers))

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
            sizes = check_end(said(job, worker)[-1])
            assert sizes == sorted(sizes, reverse=True)
            assert set(sizes) == {2, 3}
