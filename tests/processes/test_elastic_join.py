"""Elastic jobs of processes without a launcher: what their members see of themselves, from epoch to epoch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.job import Job
from tests.support.rendezvous import until

PROGRAM = """
    import json, logging, os, sys
    import numpy as np
    import hvdgloo.numpy as hvd
    from hvdgloo._job import process
    from hvdgloo.errors import HorovodInternalError

    NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def tell():
        values = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
        for family in ("HVDGLOO", "HOROVOD"):
            assert tuple(int(os.environ[f"{family}_{name}"]) for name in NAMES) == values
        assert tuple(int(os.environ[name]) for name in TORCH) == values[:4]
        assert tuple(int(os.environ[name]) for name in ("ROLE_RANK", "ROLE_WORLD_SIZE")) == values[:2]
        assert tuple(int(os.environ[name]) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")) == (0, 1, 0)
        place = process.membership().placement
        assert place is None or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == place.topology.epoch
        told = {"values": values, "epoch": place and place.topology.epoch, "pid": os.getpid(),
                "master": (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))}
        logging.getLogger("hvdgloo").warning("in epoch %s", told["epoch"])
        print(json.dumps(told), flush=True)

    def wants_to_go_on():
        return not os.path.exists(os.environ["JOB_FOLDER"] + "/stop")

    hvd.init()
    job = process.membership()
    tell()
    if job.placement is None:
        print(json.dumps({"alone": hvd.allreduce(np.ones(1), op=hvd.Sum).tolist()}), flush=True)
    step = 0
    placement = job.enter()
    while True:
        try:
            tell()
            step = hvd.broadcast_object(step, placement.root)
            job.synced()
            while True:
                total = hvd.allreduce(np.ones(1), op=hvd.Sum)
                assert total.tolist() == [hvd.size()]
                step += 1
                serial, flags = job.update()
                stop = not wants_to_go_on()
                agreed = hvd.allreduce(np.array([serial, flags, stop]), op=hvd.Max)
                if agreed[2]:
                    job.finished()
                    sys.exit(0)
                if agreed[1]:
                    placement = job.again(step, "", None)
                    break
        except HorovodInternalError as error:
            print(json.dumps({"error": type(error).__name__}), flush=True)
            placement = job.again(step, "", error)
"""


def told(job: Job, worker: int) -> list[dict[str, Any]]:
    """Return what a worker has printed about itself so far."""
    return [json.loads(line) for line in job.output(worker).stdout.splitlines(keepends=True) if line.endswith("\n")]


def in_epoch(job: Job, workers: Sequence[int], size: int) -> dict[int, dict[str, Any]]:
    """Wait until these workers are together in an epoch of that size; what each says of itself there, by rank."""

    def there() -> dict[int, dict[str, Any]] | None:
        last = [(told(job, worker) or [{}])[-1] for worker in workers]
        if any("values" not in each or each["values"][1] != size for each in last):
            ended = [job.output(worker) for worker in workers if job.workers[worker].poll() is not None]
            assert not ended, ended
            return None
        same = {each["epoch"] for each in last}
        return {each["values"][0]: each for each in last} if len(same) == 1 and None not in same else None

    found = until(there, f"workers {workers} to be {size} in one epoch", timeout=30)
    assert sorted(found) == list(range(size))
    return found


def kill(job: Job, worker: int) -> None:
    os.kill(job.workers[worker].pid, signal.SIGKILL)
    job.workers[worker].wait()


def stop(job: Job, workers: Sequence[int], folder: Path) -> None:
    (folder / "stop").touch()
    for worker in workers:
        job.workers[worker].wait(20)
        assert job.output(worker).returncode == 0, job.output(worker)


def epochs(**rules: Any) -> ElasticEpochs:
    return ElasticEpochs(Rules(**{"size": 3, "smallest": 1, "launched": False, "failures_per_host": 99, **rules}))


def test_processes_stay_what_they_are_while_others_are_killed_and_come(tmp_path: Path) -> None:
    with Job(3, PROGRAM, tmp_path, elastic=epochs()) as job:
        first = in_epoch(job, [0, 1, 2], 3)
        order = [
            worker for rank in range(3) for worker in range(3) if told(job, worker)[0]["pid"] == first[rank]["pid"]
        ]
        kill(job, order[0])
        second = in_epoch(job, order[1:], 2)
        assert [second[rank]["pid"] for rank in (0, 1)] == [first[rank]["pid"] for rank in (1, 2)]
        assert second[0]["master"] == second[1]["master"] != first[0]["master"]
        job.add()
        third = in_epoch(job, [*order[1:], 3], 3)
        assert [third[rank]["pid"] for rank in (0, 1)] == [first[rank]["pid"] for rank in (1, 2)]
        alone = told(job, 3)
        assert alone[0]["values"][:2] == [2, 3]
        assert alone[0]["epoch"] is None
        assert alone[1] == {"alone": [1.0]}
        assert "until it is in elastic.run, collectives act on it alone" in job.output(3).stderr
        stop(job, [*order[1:], 3], tmp_path)
        said = [line.partition("] ")[2] for line in job.output(order[1]).stderr.splitlines() if "in epoch" in line]
        assert list(dict.fromkeys(said)) == ["[1]: in epoch 0", "[0]: in epoch 1", "[0]: in epoch 2"]


def test_a_forked_child_does_not_hide_its_parent_s_death(tmp_path: Path) -> None:
    """It has copies of all connections: to the other ranks, and to the server, which knows of nothing else."""
    program = PROGRAM.replace(
        "    step = 0\n",
        """
    descriptors = job._participant.client.descriptors
    if not os.fork():
        name = f"{os.environ['JOB_FOLDER']}/child.{os.getppid()}"
        with open(name + ".part", "w") as file:
            print(*{os.readlink(f"/proc/self/fd/{number}") for number in descriptors}, file=file, end="")
        os.rename(name + ".part", name)
        time.sleep(60)
        os._exit(0)
    step = 0
""",
    ).replace("import json, logging, os, sys", "import json, logging, os, sys, time")
    with Job(2, program, tmp_path, elastic=epochs(size=2)) as job:
        first = in_epoch(job, [0, 1], 2)
        victim = next(number for number in (0, 1) if told(job, number)[0]["pid"] == first[0]["pid"])
        # Without this the others' word would still do, but later.
        until(lambda: (tmp_path / f"child.{first[0]['pid']}").exists(), "the child")
        assert (tmp_path / f"child.{first[0]['pid']}").read_text() == "/dev/null"
        kill(job, victim)
        second = in_epoch(job, [1 - victim], 1)
        assert second[0]["pid"] == first[1]["pid"]
        stop(job, [1 - victim], tmp_path)


def test_a_worker_that_ends_in_the_middle_ends_nothing_for_the_others(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "            while True:\n", "            while True:\n                if leaves(): sys.exit(3)\n"
    )
    program = program.replace(
        "    hvd.init()\n",
        "    leaves = lambda: os.path.exists(f\"{os.environ['JOB_FOLDER']}/{os.getpid()}\")\n    hvd.init()\n",
    )
    with Job(2, program, tmp_path, elastic=epochs(size=2)) as job:
        first = in_epoch(job, [0, 1], 2)
        (tmp_path / str(first[0]["pid"])).touch()
        victim = next(number for number in (0, 1) if told(job, number)[0]["pid"] == first[0]["pid"])
        assert job.workers[victim].wait(20) == 3
        assert in_epoch(job, [1 - victim], 1)[0]["pid"] == first[1]["pid"]
        # The worker itself says so, and the server does: either may be heard first.
        assert {line.get("error") for line in told(job, 1 - victim)} & {"JobShutdownError", "PeerLostError"}
        stop(job, [1 - victim], tmp_path)


def test_a_program_without_elastic_run_ends_as_in_a_job_of_fixed_size(tmp_path: Path) -> None:
    """It may shut down and start again, too. Its end is its success, though it never says so."""
    program = """
    import numpy as np
    import hvdgloo.numpy as hvd
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]
    hvd.barrier()
    """
    elastic = epochs(size=2)
    with Job(2, program, tmp_path, elastic=elastic) as job:
        job.succeed()
        until(lambda: elastic.status()["elastic"]["phase"] == "over", "the end of the job")
