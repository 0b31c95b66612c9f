"""Spark's reports about failed jobs, reduced to one line for a message, without the JVM's frames."""

from __future__ import annotations

import re
from collections.abc import Callable

STOPPED = "the Spark session was stopped"
CANCELLED = "the Spark job was cancelled"

_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) exited[^)]*\)(?: Reason: ([^\n]*))?")
_CODE = re.compile(r"[Cc]ommand exited with code (\d+)")
_PYTHON = re.compile(r"PythonException: (.*?)(?:\n\s*\n\s*at |\n\tat |\Z)", re.DOTALL)
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*", re.MULTILINE)
_NO_START = re.compile(r"Error from python worker:\n(.*?)\n\s*PYTHONPATH was:", re.DOTALL)
_FRAMEWORK_S = re.compile(r"^An error occurred while calling|Job aborted due to|^org.apache.spark.SparkException: *$")
_AGAIN = re.compile(r"this is attempt \d+ of task (\d+), whose first attempt already started a rank")
_FRAME = re.compile(r"^\s*(?:at |\.\.\. \d+ more|Caused by: )")


def explain(text: str) -> str:
    """Return the reason why Spark ended a job.

    Args:
        text: text of the exception that pyspark raised.
    """
    for explanation in _EXPLANATIONS:
        if reason := explanation(text):
            return reason
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
    told = [line for line in lines if not _FRAMEWORK_S.search(line)] or lines
    return f"the Spark job failed: {told[0]}" if told else "the Spark job failed"


def wrong_python(text: str) -> dict[str, str]:
    """Return the executor whose Python version differs from the driver's, with an explanation; empty if none does.

    Spark compares the versions before it reads the task, and ends the job at the first one that differs.
    """
    if "PYTHON_VERSION_MISMATCH" not in text:
        return {}
    found = re.search(r"worker has different version:? (\d+\.\d+) than that in driver:? (\d+\.\d+)", text)
    where = re.search(r"\((\S+) executor (\S+)\)", text)
    label = f"{where[1]} (executor {where[2]})" if where else "an executor"
    return {label: f"it has Python {found[1]}, the driver has {found[2]}" if found else "it has another Python"}


def refused_again(text: str) -> int | None:
    """Return the index of the task whose retry was refused, if ``text`` is only about that; otherwise None.

    Of several failures of a task, Spark reports the last, which is not the cause.
    """
    found = _AGAIN.search(text)
    return int(found[1]) if found else None


def _stopped(text: str) -> str:
    return STOPPED if "SparkContext was shut down" in text or "SparkContext is stopped" in text else ""


def _cancelled(text: str) -> str:
    return CANCELLED if re.search(r"[Jj]ob \d+ (?:was )?cancelled|SPARK_JOB_CANCELLED", text) else ""


def _executor_lost(text: str) -> str:
    found = _EXECUTOR.search(text)
    if not found:
        return ""
    executor, why = found[1], (found[2] or "").strip().rstrip(".")
    code = _CODE.search(why)
    if code and int(code[1]) > 128:
        why = f"exit code {code[1]}: signal {int(code[1]) - 128}"
    elif code:
        why = f"exit code {code[1]}"
    return f"Spark lost executor {executor}" + (f" ({why})" if why else "")


def _python_worker(text: str) -> str:
    if "Python worker exited unexpectedly" in text or "Python worker failed to connect back" in text:
        return "a Python worker of Spark's was killed or crashed"
    if found := _NO_START.search(text):
        return f"Spark's Python did not start on an executor: {found[1].strip().splitlines()[-1].strip()}"
    found = _PYTHON.search(text)
    errors = _ERROR_LINE.findall(found[1]) if found else []
    return errors[-1].strip().removeprefix("hvdgloo.errors.LaunchError: ") if errors else ""


def _no_barrier(text: str) -> str:
    if "SPARK-24942" in text or "dynamic resource allocation" in text:
        return "Spark refuses a barrier stage under dynamic allocation; give barrier=False"
    return ""


_EXPLANATIONS: tuple[Callable[[str], str], ...] = (
    _stopped,
    _cancelled,
    _no_barrier,
    _executor_lost,
    _python_worker,
)
