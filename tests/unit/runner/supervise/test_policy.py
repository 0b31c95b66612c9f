"""The consequences of workers' ends, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hvdgloo.runner.job.outcome import JobOutcome
from hvdgloo.runner.protocol.frames import Exited
from hvdgloo.runner.supervise.first_failure import Verdict
from hvdgloo.runner.supervise.init_watch import Arrivals, InitWatch


def test_a_worker_that_ends_on_request_before_init_leaves_nothing_due() -> None:
    """Something that is always due would keep a core busy until the last worker has ended."""
    told: list[str] = []
    observer = cast(Any, SimpleNamespace(notice=told.append, culprit=lambda rank: None))
    verdict = Verdict(JobOutcome(), observer, lambda: None, told.append)
    verdict.init = InitWatch(lambda: Arrivals(1, (1,)), {0: "h1", 1: "h1"}, timeout=30.0)
    for rank in (0, 1):
        verdict.started(rank)
    verdict.keep_time(0.0)
    assert verdict.next is not None, "the start is watched"
    verdict.settled = True
    verdict.exited("h1", Exited(1, 0))
    assert verdict.running == {0}
    assert verdict.next is None
    assert told == []
