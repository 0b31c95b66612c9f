"""How a job has ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdgloo._platform.spelling import in_one_line
from hvdgloo.errors import JobFailedError
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.job.spec import Slot

if TYPE_CHECKING:
    from hvdgloo.rendezvous._elastic.events import Changed


@dataclass(frozen=True)
class Restart:
    """A failure after which all workers were started again.

    Attributes:
        failure: in words.
        after: seconds from the start, or the restart before, to the failure's end.
    """

    failure: str
    after: float


@dataclass(frozen=True)
class LaunchResult:
    """A job that has ended.

    Attributes:
        outcome: how it ended.
        slots: where its workers were; those of an elastic job that were together last.
        last_lines: the end of the output of the first worker that failed.
        in_sight: they have just been shown, so that the command line need not repeat them.
        exception: what it ended with, as the last line of its traceback has it; empty if it printed none.
        advice: what to do about them, in one line; empty if that is not known.
        restarts: those that came before, in order.
        numbers: of the workers in ``slots``, by rank; -1 for one that was never started.
        workers: the ids of the same workers in an elastic job; empty in others.
        changes: of the workers of an elastic job: see ``ElasticDriver``.
        why_over: why an elastic job could not survive the failure.
        files: sentences that say where files are that were asked for.
        unwritten: what could not be written, each with the reason.
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
        """The launcher's own: 0 only if the job has succeeded, and all that it said could be written."""
        return self.outcome.exit_code or int(bool(self.unwritten))

    def summary(self, *, whole: bool = True) -> str:
        """How the job ended, in words; empty after success at the first attempt.

        Args:
            whole: with the worker's last lines, also if they are in sight.
        """
        end = self._end(whole)
        past = self._changes() or (history(self.restarts) if self.restarts else "")
        lost = f"not all could be written: {'; '.join(self.unwritten[:3])}" if self.unwritten else ""
        if lost and not end:
            end = f"all workers succeeded, but {lost}"
            lost = ""
        text = f"{end or 'the job succeeded'}\n{past}" if past else end
        return "\n".join(filter(None, [text, lost, *self.files]))

    def headline(self) -> str:
        """How the job has failed, in a line; empty if it has not."""
        return first_line(self._end(whole=False))

    def _changes(self) -> str:
        if len(self.changes) < 2:
            return ""
        from hvdgloo.rendezvous._elastic.history import summarize  # what jobs of a fixed size do not need

        return summarize(self.changes)

    def failure(self, *, whole: bool = True) -> str:
        """What failed first, in words, with what the worker said last."""
        assert self.outcome.first is not None
        text = describe_failure(self.outcome.first)
        if self.exception and self.outcome.first.signal is None:  # what a signal ended, an exception did not
            shown = in_one_line(self.exception)
            text += "" if shown in text else f": {shown}"
        if self.why_over and self.why_over != self.outcome.first.reason:
            text += f"; {self.why_over}"
        if self.last_lines and (whole or not self.in_sight):
            text += "\nIts last lines were:\n" + "\n".join(f"  {line}" for line in self.last_lines)
        return f"{text}\n{self.advice}" if self.advice else text

    def _end(self, whole: bool) -> str:
        if self.outcome.interrupted == signal.SIGPIPE:
            return "stopped, because nobody reads the output any longer"
        if self.outcome.interrupted is not None:
            return f"stopped by {signal.Signals(self.outcome.interrupted).name}"
        return f"the job failed: {self.failure(whole=whole)}" if self.outcome.first is not None else ""

    def error(self) -> JobFailedError:
        """The failure as an exception."""
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
    """What is most important of a text with several lines."""
    return text.partition("\n")[0]


def history(restarts: Sequence[Restart]) -> str:
    """A line for each failure after which the job was started again."""
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    lines = [f"  after {restart.after:.1f} s: {restart.failure}" for restart in restarts]
    return "\n".join([f"it was started again {times}:", *lines])


def describe_failure(failure: Failure) -> str:
    """``rank 3 on host h2 was killed by signal 9 (SIGKILL)``."""
    return failure.reason if failure.rank is None else f"rank {failure.rank} on host {failure.host} {failure.reason}"
