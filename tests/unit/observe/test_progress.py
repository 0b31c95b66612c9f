"""The progress of a training as the program tells it, in every way that programs count, and the time that remains."""

from __future__ import annotations

import pytest

from hvdgloo._observe import samples
from hvdgloo._observe.progress import Pace, Progress, done

Given = dict[str, int]


def after(*calls: Given, counted: int = 0) -> Progress:
    progress = Progress()
    for call in calls:
        numbers = [call.get(name) for name in ("step", "steps", "epoch", "epochs")]
        progress = progress.after(*numbers, counted)
    return progress


@pytest.mark.parametrize(
    ("calls", "told", "share"),
    [
        ([{"step": 4, "steps": 10}], (4, 10, None, None), 0.5),
        ([{"steps": 10}, {"step": 4}], (4, 10, None, None), 0.5),
        ([{"steps": 10}], (None, 10, None, None), 0.0),
        ([{"step": 4, "steps": 10, "epoch": 1, "epochs": 4}], (4, 10, 1, 4), 0.375),
        ([{"step": 9, "steps": 10, "epoch": 1, "epochs": 4}], (9, 10, 1, 4), 0.5),
        ([{"epoch": 1, "epochs": 4}], (None, None, 1, 4), 0.5),  # an epoch without a step has ended
        ([{"step": 7, "steps": 10, "epoch": 1, "epochs": 4}, {"epoch": 1}], (None, 10, 1, 4), 0.5),
        ([{"epoch": 1, "epochs": 4, "steps": 10}, {"step": 4}], (4, 10, 1, 4), 0.375),
        ([{"epochs": 4}], (None, None, None, 4), 0.0),
        ([{"step": 4}], (4, None, None, None), None),
        ([{"epoch": 1}], (None, None, 1, None), None),
        ([{"step": 4, "steps": 10, "epoch": 1}], (4, 10, 1, None), None),
        ([{"step": 12, "steps": 10}], (12, 10, None, None), 1.0),  # more than was announced
        ([{"epoch": 9, "epochs": 4}], (None, None, 9, 4), 1.0),
    ],
)
def test_share_of_a_training_follows_from_what_the_program_tells(
    calls: list[Given], told: tuple[int | None, ...], share: float | None
) -> None:
    sample = after(*calls).sample(0)
    assert sample == samples.Progress(*told)
    assert done(sample) == share


def test_nothing_is_told_of_a_program_that_tells_nothing() -> None:
    assert after().sample(5) is None


def test_steps_of_the_optimizer_count_where_the_program_tells_only_how_many_there_will_be() -> None:
    progress = after({"steps": 100}, counted=7)  # seven of an earlier training in this process
    assert progress.sample(7) == samples.Progress(steps=100)
    assert progress.sample(32) == samples.Progress(step=24, steps=100)
    again = progress.after(None, 100, None, None, 40)  # with every step
    assert again.sample(42) == samples.Progress(step=34, steps=100)
    assert progress.after(None, 50, None, None, 40).sample(42) == samples.Progress(step=1, steps=50)


def test_remaining_time_follows_the_speed_of_the_last_half() -> None:
    pace = Pace()
    assert pace.remaining(None, 0.0) is None
    assert pace.remaining(0.0, 0.0) is None
    told = [pace.remaining(n / 1000, 10.0 * n) for n in range(1, 101)]
    assert told[0] == pytest.approx(9990)
    assert told[-1] == pytest.approx(9000)
    for n in range(1, 801):  # ten times as fast from here
        left = pace.remaining(0.1 + n / 1000, 1000.0 + n)
    assert left == pytest.approx(100, rel=0.2)


def test_remaining_time_goes_down_between_two_reports_and_not_below_nothing() -> None:
    pace = Pace()
    pace.remaining(0.0, 0.0)
    assert pace.remaining(0.5, 100.0) == 100.0
    assert pace.remaining(0.5, 130.0) == 70.0
    assert pace.remaining(0.5, 900.0) == 0.0


def test_a_training_that_begins_again_has_a_speed_of_its_own() -> None:
    pace = Pace()
    pace.remaining(0.5, 0.0)  # resumed from a checkpoint
    assert pace.remaining(0.6, 10.0) == pytest.approx(40.0)
    assert pace.remaining(0.0, 20.0) is None
    assert pace.remaining(0.1, 21.0) == pytest.approx(9.0)
