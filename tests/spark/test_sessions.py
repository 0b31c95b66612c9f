"""The sessions that other tests run on are what they are said to be; and what ranks have of a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hvdgloo.spark
import hvdgloo.spark.task
from tests.support.pages import ROOT


def _parents(_: Any) -> Any:
    import hvdgloo

    yield os.getpid(), os.getppid(), os.path.dirname(os.path.dirname(os.path.realpath(hvdgloo.__file__)))


def test_executors_of_the_cluster_are_processes_of_their_own_and_have_this_checkout(cluster: Any) -> None:
    found = cluster.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(_parents).collect()
    assert len({parent for _, parent, _ in found}) == 2
    assert {folder for *_, folder in found} == {os.path.realpath(ROOT)}


def test_workers_of_a_standalone_master_run_tasks(standalone: Any) -> None:
    found = standalone.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(_parents).collect()
    assert len({parent for _, parent, _ in found}) == 2
    assert standalone.sparkContext.master.startswith("spark://")


def test_ranks_have_the_gpus_modules_and_folders_of_their_tasks(standalone: Any, tmp_path: Path) -> None:
    module = tmp_path / "brought_along.py"
    module.write_text("value = 7")
    standalone.sparkContext.addPyFile(str(module))

    def look() -> tuple[list[str], int, str, str | None, int]:
        import brought_along  # type: ignore[import-not-found]

        import hvdgloo.numpy as hvd

        hvd.init()
        devices = hvdgloo.spark.task.get_available_devices()
        return devices, brought_along.value, os.getcwd(), os.environ.get("HOROVOD_SPARK_WORK_DIR"), hvd.local_size()

    found = hvdgloo.spark.run(look, num_proc=2, verbose=0)
    assert sorted(devices for devices, *_ in found) == [["1"], ["2"]]
    assert [value for _, value, *_ in found] == [7, 7]
    folders = [folder for _, _, folder, *_ in found]
    assert all(os.path.basename(os.path.dirname(folder)).startswith("app-") for folder in folders)
    assert folders == [told for *_, told, _ in found]
    assert len(set(folders)) == 2
    assert [local_size for *_, local_size in found] == [2, 2]  # of one machine, whichever their executors
