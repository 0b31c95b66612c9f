"""``hvdgloo.run.run`` for elastic jobs: whose results it returns, and whose exception it raises."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvdgloo.run
from hvdgloo.errors import JobFailedError, RemoteTraceback


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


def test_the_results_are_those_of_the_last_workers_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    results = hvdgloo.run.run(work, (str(tmp_path),), np=3, min_num_proc=1)
    assert [(rank, size, variable) for rank, size, variable, _ in results] == [(0, 3, "0"), (1, 3, "1"), (2, 3, "2")]
    # The one that had rank 1 was killed; whoever had rank 2 has moved up, and the newcomer is the last.
    assert [worker.split("/")[1] for *_, worker in results] == ["0", "2", "1"]


class Hosts:
    """Lists one slot more each time that it is asked, up to three."""

    def __init__(self) -> None:
        self.asked = 0

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        self.asked += 1
        return {"localhost": min(self.asked, 3)}


def test_hosts_from_an_object_and_results_of_all_who_came(tmp_path: Path) -> None:
    (tmp_path / "killed").touch()
    hosts = Hosts()
    results = hvdgloo.run.run(work, (str(tmp_path),), np=1, host_discovery=hosts)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert hosts.asked >= 3


def test_a_function_that_does_not_initialise_anything() -> None:
    assert hvdgloo.run.run(int, min_num_proc=2) == [0, 0]


def test_the_exception_that_could_not_be_survived() -> None:
    def fail() -> None:
        import hvdgloo.numpy as hvd

        hvd.init()
        raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned") as caught:
        hvdgloo.run.run(fail, min_num_proc=2)
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def test_a_job_that_has_too_few_workers_left() -> None:
    def fail() -> None:
        import os

        import hvdgloo.numpy as hvd

        hvd.init()
        os._exit(7)

    with pytest.raises(JobFailedError, match="exited with status 7") as caught:
        hvdgloo.run.run(fail, min_num_proc=2, failures_per_host=1)
    assert caught.value.exit_code == 7
