"""Results and errors of a function on all ranks: for ``hvdgloo.run.run``, and for jobs on other systems."""

from __future__ import annotations

import pickle
import signal
import tempfile
from typing import IO, Any

from hvdgloo.errors import JobFailedError, RemoteTraceback
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.worker import function_task


class ResultFiles:
    """Results of the workers, by their number: in a job of a fixed size, the number is the rank.

    They are kept in files until the job is over: results may be too large for pipes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._files: dict[int, IO[bytes]] = {}

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all results so far, because the workers are restarted."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def add(self, number: int, data: bytes) -> None:
        if number not in self._files:
            self._files[number] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._files[number].write(data)

    def outcome(self, report: LaunchResult, rank: int) -> function_task.TaskResult | None:
        """Return the result of the worker that had this rank in the end; None if it ended before it could write one."""
        name = function_task.name_of(rank, report.workers[rank] if report.workers else None)
        file = self._files.pop(report.numbers[rank], None)
        if file is None:
            return None
        with file:
            file.seek(0)
            return function_task.unpack_outcome(file.read(), name, self._secret)


def conclude(report: LaunchResult, results: ResultFiles) -> list[Any]:
    """Return the function's results, in the order of ranks.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the job.
        JobFailedError: a worker was killed, exited, or left no result.
        Exception: the exception that the function raised; its cause is a ``RemoteTraceback``.
    """
    if report.outcome.interrupted == signal.SIGINT:
        raise KeyboardInterrupt
    if report.outcome.exit_code != 0:
        raise _failure(report, results)
    values = []
    for slot in report.slots:
        outcome = results.outcome(report, slot.rank)
        if outcome is None or outcome.result is None:
            what = outcome.text if outcome is not None else "ended by itself"
            raise JobFailedError(
                f"rank {slot.rank} on host {slot.agent} {what} and left no result",
                rank=slot.rank,
                host=slot.agent,
            )
        values.append(pickle.loads(outcome.result))  # noqa: S301 - part of what was sealed
    return values


def _failure(report: LaunchResult, results: ResultFiles) -> BaseException:
    """Return the exception that represents the job's failure: the first failed worker's own, if it left one."""
    first = report.outcome.first
    if first is None or first.rank is None:
        return report.error()
    left = {}
    for rank, status in report.outcome.statuses.items():
        outcome = results.outcome(report, rank) if status else None
        if outcome is not None:
            left[rank] = outcome
    chosen = left.get(first.rank)
    rank = first.rank
    if chosen is not None and chosen.secondary:
        # This rank only noticed the failure of another rank that had not ended yet.
        causes = [other for other, outcome in left.items() if outcome.traceback and not outcome.secondary]
        rank = causes[0] if causes else rank
        chosen = left[rank]
    if chosen is None:
        return report.error()
    host = next(slot.agent for slot in report.slots if slot.rank == rank)
    return exception_of(chosen, rank, host, exit_code=report.outcome.exit_code, last_lines=report.last_lines)


def exception_of(
    outcome: function_task.TaskResult,
    rank: int,
    host: str,
    *,
    exit_code: int = 1,
    last_lines: tuple[str, ...] = (),
) -> BaseException:
    """Return the exception that a function raised on a rank, with a ``RemoteTraceback`` as its cause.

    Args:
        outcome: the rank's outcome.
        exit_code, last_lines: for a JobFailedError in place of an exception that did not survive pickling.
    """
    error = _unpickled(outcome)
    if error is None:
        return JobFailedError(
            f"rank {rank} on host {host} {'raised ' if outcome.traceback else ''}{outcome.text}"
            + (f"\n\n{outcome.traceback}" if outcome.traceback else ""),
            rank=rank,
            host=host,
            exit_code=exit_code,
            last_lines=last_lines,
        )
    error.__cause__ = RemoteTraceback(
        f"raised by rank {rank} on host {host}\n\n{outcome.traceback}",
        rank=rank,
        host=host,
        traceback=outcome.traceback,
    )
    for name, value in (("rank", rank), ("host", host)):
        if not hasattr(error, name):  # an hvdgloo error may have a rank of its own: the one that was lost
            try:
                setattr(error, name, value)
            except AttributeError:
                pass  # a class with __slots__
    return error


def _unpickled(outcome: function_task.TaskResult) -> BaseException | None:
    if outcome.exception is None:
        return None
    try:
        error = pickle.loads(outcome.exception)  # noqa: S301 - part of what was sealed
    except Exception:  # noqa: BLE001 - a class that only the worker can import; only its text is left
        return None
    assert isinstance(error, BaseException)
    return error
