"""Spark's messages about a job that has ended, in one line. No Spark is needed; the texts are from 3.5 and 4.x."""

from __future__ import annotations

import pytest

from hvdgloo.spark._failures import explain, refused_again, wrong_python

TRACEBACK = " ".join(["Traceback", "(most recent call last):"])
TRACE = "\n\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)\n\t... 40 more\nCaused by: x"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "org.apache.spark.SparkException: Job 3 cancelled part of cancelled job group g",
            "the Spark job was cancelled",
        ),
        ("[SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all jobs", "the Spark job was cancelled"),
        ("Job 0 cancelled because SparkContext was shut down", "the Spark session was stopped"),
        (
            "Could not recover from a failed barrier ResultStage. Most recent failure reason: "
            "Stage failed because barrier "
            "task ResultTask(1, 1) finished unsuccessfully.\nExecutorLostFailure (executor 7 "
            "exited caused by one of the "
            "running tasks) Reason: Command exited with code 137",
            "Spark lost executor 7 (exit code 137: signal 9)",
        ),
        (
            "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: "
            "Container killed by YARN "
            "for exceeding physical memory limits. 5.5 GB of 5.5 GB used.",
            "Spark lost executor 2 (Container killed by YARN for exceeding physical memory "
            "limits. 5.5 GB of 5.5 GB used)",
        ),
        (
            "ExecutorLostFailure (executor 4 exited unrelated to the running tasks) Reason: "
            "Executor heartbeat timed out "
            "after 122000 ms",
            "Spark lost executor 4 (Executor heartbeat timed out after 122000 ms)",
        ),
        (
            "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
            "a Python worker of Spark's was killed or crashed",
        ),
        (
            f'org.apache.spark.api.python.PythonException: {TRACEBACK}\n  File "a.py", line 1\n'
            "hvdgloo.errors.LaunchError: the launcher cannot be reached from h2 (10.0.0.1 port 7: timed out)\n",
            "the launcher cannot be reached from h2 (10.0.0.1 port 7: timed out)",
        ),
        (
            "[SPARK-24942]: Barrier execution mode does not support dynamic resource allocation for now.",
            "Spark refuses a barrier stage under dynamic allocation; give barrier=False",
        ),
        (
            "An error occurred while calling o1.collectToPython.\n: java.lang.OutOfMemoryError: Java heap space",
            "the Spark job failed: java.lang.OutOfMemoryError: Java heap space",
        ),
        (
            "An error occurred while calling z:x.\n: org.apache.spark.SparkException: Job aborted "
            "due to stage failure: Could "
            "not recover from a failed barrier ResultStage.\njava.io.IOException: Cannot run "
            'program "python3.99": error=2, '
            "No such file or directory",
            'the Spark job failed: java.io.IOException: Cannot run program "python3.99": '
            "error=2, No such file or directory",
        ),
        (
            "org.apache.spark.SparkException: \nError from python worker:\n    File x\n"
            "  ModuleNotFoundError: No module named 'pyspark'\nPYTHONPATH was:\n  /x\n",
            "Spark's Python did not start on an executor: ModuleNotFoundError: No module named 'pyspark'",
        ),
        ("", "the Spark job failed"),
    ],
)
def test_a_reason_is_one_line_without_frames(text: str, reason: str) -> None:
    assert explain(text + TRACE if text else text) == reason


def test_a_second_attempt_is_not_why_the_first_one_failed() -> None:
    text = (
        "LaunchError: this is attempt 3 of task 1, whose first attempt already started a rank: no rank is started twice"
    )
    assert refused_again(text) == 1
    assert refused_again("ExecutorLostFailure (executor 2 exited caused by one of the running tasks)") is None


def test_another_python_is_an_executor_s() -> None:
    text = (
        f"Lost task 0.0 in stage 0.0 (TID 0) (10.0.0.7 executor 3): {TRACEBACK}\n"
        "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different "
        "version: 3.10 than that in driver: 3.11, PySpark cannot run with different minor versions."
    )
    assert wrong_python(text) == {"10.0.0.7 (executor 3)": "it has Python 3.10, the driver has 3.11"}
    assert wrong_python("[PYTHON_VERSION_MISMATCH]") == {"an executor": "it has another Python"}
    assert wrong_python("ExecutorLostFailure") == {}
