"""``hvdgloo.run.run`` for elastic jobs: whose results it returns, and whose exception it raises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import hvdgloo.run
from hvdgloo._job.excepthook import HINT
from hvdgloo._platform import own_frames
from hvdgloo.errors import JobFailedError, RemoteTraceback
from tests.support import warm


def work(folder: str) -> tuple[int, int, str, str]:
    """Train until there are three workers again, of which rank 1 was killed in between."""
    import os

    import numpy as np

    import hvdgloo.numpy as hvd
    from hvdgloo.common.elastic import ObjectState, run_fn

    hvd.init()

    def train(state: ObjectState) -> tuple[int, int, str, str]:
        whole_again = 0
        while not whole_again:
            killed = os.path.exists(f"{folder}/killed")
            if hvd.size() == 3 and hvd.rank() == 1 and not killed:
                open(f"{folder}/killed", "w").close()
                os.kill(os.getpid(), 9)
            whole_again = hvd.allreduce(np.array([killed and hvd.size() == 3], np.int32), op=hvd.Min, name="end")[0]
            state.commit()
        return hvd.rank(), hvd.size(), os.environ["RANK"], os.environ["HVDGLOO_WORKER"]

    return run_fn(train)(ObjectState(hvd.broadcast_object, hvd.rank))  # type: ignore[no-any-return]


def test_the_results_come_from_the_last_workers_in_the_order_of_their_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = hvdgloo.run.run(work, (str(tmp_path),), np=3, min_num_proc=1, executable=warm.python(*warm.NUMPY))
    assert [(rank, size, variable) for rank, size, variable, _ in results] == [(0, 3, "0"), (1, 3, "1"), (2, 3, "2")]
    # The one that had rank 1 was killed; the one that had rank 2 has moved up, and the newcomer is the last.
    assert [worker.split("/")[1] for *_, worker in results] == ["0", "2", "1"]
    said = capsys.readouterr().err
    assert re.search(r"(?m)^hvdgloo-run: rank 1 .* was killed by signal 9 .* went on", said), "that is worth a line"


class Hosts:
    """Lists one slot more each time that it is asked, up to three."""

    def __init__(self) -> None:
        self.asked = 0

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        self.asked += 1
        return {"localhost": min(self.asked, 3)}


def test_hosts_from_an_object_and_results_of_all_who_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "killed").touch()
    hosts = Hosts()
    python = warm.python(*warm.NUMPY)
    results = hvdgloo.run.run(work, (str(tmp_path),), np=1, host_discovery=hosts, executable=python, verbose=False)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert hosts.asked >= 3
    assert "hvdgloo-run: " not in capsys.readouterr().err, "as was asked for"


def test_a_function_that_does_not_initialise_anything() -> None:
    assert hvdgloo.run.run(int, min_num_proc=2) == [0, 0]


def test_the_exception_that_could_not_be_survived_is_shown_without_our_frames(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def fail() -> None:
        import hvdgloo.numpy as hvd
        from hvdgloo.common.elastic import ObjectState, run_fn

        hvd.init()

        def train(state: ObjectState) -> None:
            raise ValueError("as planned")

        run_fn(train)(ObjectState(hvd.broadcast_object, hvd.rank))

    with pytest.raises(ValueError, match="as planned") as caught:
        hvdgloo.run.run(fail, min_num_proc=2)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    workers = capsys.readouterr().err
    sys.excepthook(ValueError, caught.value, caught.value.__traceback__)
    said = capsys.readouterr().err
    # Both ranks fail alike, and what they write is shown once: for the one that was first.
    shown = [rank for rank in (0, 1) if f"[{rank}]<stderr>:{HINT}" in workers]
    assert shown
    assert f"[{shown[0]}]<stderr>:ValueError: as planned" in workers
    assert " in train\n" in caught.value.__cause__.traceback
    assert own_frames.FOLDER not in workers + said
    assert said.count(HINT) == 1, "once for the whole"


def test_a_job_that_has_too_few_workers_left() -> None:
    def fail() -> None:
        import os

        import hvdgloo.numpy as hvd

        hvd.init()
        os._exit(7)

    with pytest.raises(JobFailedError, match="exited with status 7") as caught:
        hvdgloo.run.run(fail, min_num_proc=2, failures_per_host=1)
    assert caught.value.exit_code == 7


def test_a_worker_that_does_not_initialise_in_the_given_time_is_left_out() -> None:
    def waits() -> None:
        import os
        import signal

        import hvdgloo.numpy as hvd

        if os.environ["RANK"] == "1":
            signal.pause()
        hvd.init()

    with pytest.raises(JobFailedError, match=r"has not called hvd.init\(\) within 2 s \(--start-timeout\)"):
        hvdgloo.run.run(waits, min_num_proc=2, failures_per_host=1, start_timeout=2)
