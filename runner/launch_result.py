"""The result of a launch, and its description in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdgloo._platform.spelling import in_one_line
from hvdgloo.errors import JobFailedError
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.job.spec import Slot
from hvdgloo.topology import ranges

if TYPE_CHECKING:
    from hvdgloo.rendezvous._elastic.events import Changed


@dataclass(frozen=True)
class Restart:
    """A failure after which all workers were started again.

    Attributes:
        failure: the failure in words.
        after: seconds from the start, or the previous restart, to the failure's end.
    """

    failure: str
    after: float


@dataclass(frozen=True)
class LaunchResult:
    """The result of a job that has ended.

    Attributes:
        outcome: the job's outcome.
        slots: its workers' slots; in an elastic job, the last members'.
        last_lines: the end of the output of the first worker that failed.
        in_sight: True if these lines were just shown, so that the command line need not repeat them.
        exception: the exception that ended it, from the last line of its traceback; empty if it printed none.
        advice: one line that says what to do about it; empty if that is not known.
        restarts: earlier restarts, in order.
        numbers: numbers of the workers in ``slots``, by rank; -1 for one that was never started.
        workers: ids of the same workers in an elastic job; empty in others.
        changes: changes of the workers of an elastic job: see ``ElasticJob``.
        why_over: why an elastic job could not survive the failure.
        files: sentences that tell the paths of requested files.
        unwritten: files and output that could not be written, each with the reason.
    """

    outcome: JobOutcome
    slots: tuple[Slot, ...]
    last_lines: tuple[str, ...] = ()
    advice: str = ""
    in_sight: bool = False
    exception: str = ""
    restarts: tuple[Restart, ...] = ()
    numbers: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    changes: tuple[tuple[float, Changed], ...] = ()
    why_over: str = ""
    files: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The launcher's exit status: 0 only if the job succeeded and all its output could be written."""
        return self.outcome.exit_code or int(bool(self.unwritten))

    def summary(self, *, whole: bool = True) -> str:
        """Describe the job's end; empty after success at the first attempt.

        Args:
            whole: include the worker's last lines even if they are in sight.
        """
        end = self._end(whole)
        past = self._changes() or (history(self.restarts) if self.restarts else "")
        lost = f"not all could be written: {'; '.join(self.unwritten[:3])}" if self.unwritten else ""
        if lost and not end:
            end = f"all workers succeeded, but {lost}"
            lost = ""
        text = f"{end or 'the job succeeded'}\n{past}" if past else end
        return "\n".join(filter(None, [text, self._overdue(), lost, *self.files]))

    def headline(self) -> str:
        """Describe the job's failure in a line; empty if it did not fail."""
        return first_line(self._end(whole=False))

    def _overdue(self) -> str:
        """Describe the workers that outlasted the grace period."""
        late = sorted(self.outcome.overdue)
        if not late:
            return ""
        who, were = ("ranks", "they were") if len(late) > 1 else ("rank", "it was")
        return (
            f"{who} {ranges(late)} did not end within {self.outcome.grace:g} s of being told to, so {were} killed "
            "(--grace-period sets that time)"
        )

    def _changes(self) -> str:
        if len(self.changes) < 2:
            return ""
        from hvdgloo.rendezvous._elastic.history import summarize  # what jobs of a fixed size do not need

        return summarize(self.changes)

    def failure(self, *, whole: bool = True) -> str:
        """Describe the first failure, with the worker's last lines."""
        assert self.outcome.first is not None
        text = describe_failure(self.outcome.first)
        if self.exception and self.outcome.first.signal is None:  # otherwise the signal ended it
            shown = in_one_line(self.exception)
            text += "" if shown in text else f": {shown}"
        if self.why_over and self.why_over != self.outcome.first.reason:
            text += f"; {self.why_over}"
        if self.last_lines and (whole or not self.in_sight):
            text += "\nIts last lines were:\n" + "\n".join(f"  {line}" for line in self.last_lines)
        return f"{text}\n{self.advice}" if self.advice else text

    def _end(self, whole: bool) -> str:
        if self.outcome.interrupted == signal.SIGPIPE:
            return "stopped, because the reader of the output is gone"
        if self.outcome.interrupted is not None:
            return f"stopped by {signal.Signals(self.outcome.interrupted).name}"
        return f"the job failed: {self.failure(whole=whole)}" if self.outcome.first is not None else ""

    def error(self) -> JobFailedError:
        """Return the failure as an exception."""
        first = self.outcome.first
        return JobFailedError(
            self.summary(),
            rank=first.rank if first else None,
            host=first.host if first else None,
            exit_code=self.outcome.exit_code,
            signal=first.signal if first else None,
            last_lines=self.last_lines,
        )


def first_line(text: str) -> str:
    """Return the first line of a text, which is the most important one."""
    return text.partition("\n")[0]


def history(restarts: Sequence[Restart]) -> str:
    """Return a line for each failure after which the job was started again."""
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    lines = [f"  after {restart.after:.1f} s: {restart.failure}" for restart in restarts]
    return "\n".join([f"it was started again {times}:", *lines])


def describe_failure(failure: Failure) -> str:
    """Describe a failure: ``rank 3 on host h2 was killed by signal 9 (SIGKILL)``."""
    return failure.reason if failure.rank is None else f"rank {failure.rank} on host {failure.host} {failure.reason}"
