"""A task's part on an executor: what it tells about itself, and what its worker finds in its environment."""

from __future__ import annotations

import os
import pickle
import sys

import psutil

from hvdgloo.errors import LaunchError
from hvdgloo.runner.inbound.task import bring_agent
from hvdgloo.spark import task


def bring(packed: bytes, index: int, python_path: str, executable: str | None, *, again: bool) -> None:
    """Bring an agent to the driver, and return when it has ended as the driver wanted.

    Raises:
        LaunchError: this is a second attempt of its task, the driver was not reached, or the agent was killed. Spark
            tries the task again, where it may.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "Spark runs this in a task"
    attempt = context.attemptNumber()
    if attempt and not again:
        raise LaunchError(
            f"this is attempt {attempt} of task {index}, and the first one has brought a rank already: none is "
            "started twice"
        )
    gpus = context.resources().get("gpu")
    first = [*python_path.split(os.pathsep), *os.environ.get("HOROVOD_SPARK_PYTHONPATH", "").split(os.pathsep)]
    status = bring_agent(
        pickle.loads(packed),  # noqa: S301 - it came with the task, which Spark has unpickled
        index,
        name=_executor(),
        env={"HOROVOD_SPARK_WORK_DIR": os.getcwd(), task.DEVICES: ",".join(gpus.addresses if gpus is not None else ())},
        path=[*filter(None, first), *sys.path],
        attempt=attempt,
        executable=executable,
    )
    if status:
        raise LaunchError(f"the agent of task {index} ended with status {status}")


def _executor() -> str:
    """How Spark calls the executor of this process; empty if that cannot be seen.

    Python is told nothing of it, but every cluster manager starts executors with their name as an argument.
    """
    try:
        for process in psutil.Process().parents():
            words = process.cmdline()
            if "--executor-id" in words[:-1]:
                return f"executor {words[words.index('--executor-id') + 1]}"
    except psutil.Error:
        pass  # one of them is another user's, or ends just now
    return ""
