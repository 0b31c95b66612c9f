"""Progress of a training, as far as the program tells it, and the time that remains. Pure."""

from __future__ import annotations

from typing import NamedTuple

from hvdgloo._observe import samples


class Progress(NamedTuple):
    """Numbers that the program gave to ``hvd.log``; None for one that it did not give.

    Steps and epochs are counted from 0, and the ones named here have ended.

    Attributes:
        step, steps: step of the epoch (or of the training, without epochs), and their number.
        epoch, epochs: epoch of the training, and their number.
        before: number of steps that had been counted when ``steps`` was given.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    before: int = 0

    def after(
        self, step: int | None, steps: int | None, epoch: int | None, epochs: int | None, counted: int
    ) -> Progress:
        """Return the progress after a call that gave some of the numbers; the others stay as they are.

        Args:
            step, steps, epoch, epochs: numbers of the call. An epoch without a step has ended: it is not about one of
                its steps.
            counted: number of steps counted so far.
        """
        return Progress(
            step if step is not None or epoch is not None else self.step,
            self.steps if steps is None else steps,
            self.epoch if epoch is None else epoch,
            self.epochs if epochs is None else epochs,
            counted if steps is not None and steps != self.steps else self.before,
        )

    def sample(self, counted: int) -> samples.Progress | None:
        """Return the form in which it is reported; None if the program told nothing.

        Args:
            counted: number of steps counted so far. They stand for ``step`` if the program told only how many there
                will be.
        """
        step, steps, epoch, epochs, before = self
        if (step, steps, epoch, epochs) == (None, None, None, None):
            return None
        if step is None and epoch is None and epochs is None and counted > before:
            step = counted - before - 1
        return samples.Progress(step, steps, epoch, epochs)


def done(progress: samples.Progress) -> float | None:
    """Return the share of the training that has been done, from 0 to 1; None if the program did not tell enough."""
    step, steps, epoch, epochs = progress.step, progress.steps, progress.epoch, progress.epochs
    if epochs is None and steps is None:
        return None
    in_epoch = 0.0 if step is None or not steps else min(1.0, (step + 1) / steps)
    if epochs is None:
        return in_epoch if epoch is None else None
    if epoch is None:
        return 0.0 if step is None else None
    if step is None:
        in_epoch = 1.0
    return min(1.0, (epoch + in_epoch) / epochs) if epochs else None


class Pace:
    """The speed of a training: an average over at least half of the time in which its progress was observed."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._middle = self._last = 0.0, 0.0

    def remaining(self, part: float | None, now: float) -> float | None:
        """Return the seconds until the end; None if they cannot be told yet.

        Args:
            part: share of the training that is done; None if the program does not tell it.
            now: current time.
        """
        if part is None:
            return None
        if self._first is None or part < self._last[1]:  # it begins, or begins again
            self._first = self._middle = self._last = now, part
            return None
        if part > self._last[1]:
            if now - self._first[0] >= 2 * (self._middle[0] - self._first[0]) > 0:
                self._first, self._middle = self._middle, (now, part)
            elif self._middle == self._first:
                self._middle = now, part
            self._last = now, part
        begun, had = self._first
        at, has = self._last
        if has == had or at == begun:
            return None
        return max(0.0, (1.0 - has) * (at - begun) / (has - had) - (now - at))
