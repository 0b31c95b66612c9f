"""The part of a task that needs hvdgloo: the task's identity for the driver, and its worker's environment."""

from __future__ import annotations

import os
import pickle
import sys

import psutil

from hvdgloo.errors import LaunchError
from hvdgloo.runner.inbound.task import bring_agent
from hvdgloo.spark import task


def bring(packed: bytes, index: int, python_path: str, executable: str | None, *, again: bool) -> None:
    """Bring an agent to the driver, and return when the driver has ended it.

    Raises:
        LaunchError: this is a second attempt of its task, the driver could not be reached, or the agent was killed.
            Spark then retries the task, if it is allowed to.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "Spark runs this in a task"
    attempt = context.attemptNumber()
    if attempt and not again:
        raise LaunchError(
            f"this is attempt {attempt} of task {index}, whose first attempt already started a rank: no rank is "
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
    """Return Spark's name for the executor of this process; empty if it cannot be found.

    Spark does not pass it to Python, but every cluster manager starts executors with their name as an argument.
    """
    try:
        for process in psutil.Process().parents():
            words = process.cmdline()
            if "--executor-id" in words[:-1]:
                return f"executor {words[words.index('--executor-id') + 1]}"
    except psutil.Error:
        pass  # a parent is another user's, or is just ending
    return ""
