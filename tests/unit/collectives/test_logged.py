"""Arguments of ``hvd.log``: values, progress and notes that can be shown, and clear errors for all others."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.logged import Pause, averaged, check_note, check_progress, checked, fitting, record_metrics
from hvdgloo._observe.counters import Counters
from hvdgloo._observe.progress import Progress
from hvdgloo.errors import InvalidArgumentError, MismatchError


def test_numbers_of_any_kind_become_floats() -> None:
    given = {"a/b": 1, "c": np.float32(0.5), "d": np.ones(1), "e": True, "f": Decimal("0.25"), "g": np.int64(7)}
    assert checked(given, {"loss": 2.5}, None) == {
        "a/b": 1.0, "c": 0.5, "d": 1.0, "e": 1.0, "f": 0.25, "g": 7.0, "loss": 2.5,
    }  # fmt: skip
    assert math.isnan(checked(None, {"loss": math.nan}, None)["loss"])
    assert checked(None, {}, None) == {}


@pytest.mark.parametrize("value", ["0.5", b"1", None, [1.0], np.ones(2), 1j, object(), 10**400, {"x": 1}])
def test_a_value_that_is_not_one_number_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"hvd\.log\(loss=\.\.\.\).* is not one number .*single element"):
        checked(None, {"loss": value}, None)


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, 7])
def test_a_name_that_cannot_be_shown_is_an_error(name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="names are texts of 1 to 100 characters"):
        checked({name: 1.0}, {}, None)


def test_a_number_without_a_name_is_an_error_that_says_how_to_give_it_one() -> None:
    with pytest.raises(InvalidArgumentError, match=r"0\.5 has no name; write hvd\.log\(loss=\.\.\.\)"):
        checked(0.5, {}, None)  # type: ignore[arg-type]


def test_names_that_change_with_the_step_are_an_error_before_they_fill_the_page() -> None:
    before = {f"loss_{n}": 1.0 for n in range(64)}
    assert checked(None, {"loss_0": 2.0}, before) == {"loss_0": 2.0}
    with pytest.raises(InvalidArgumentError, match=r"more than 64 names; .* the step as step="):
        checked(None, {"loss_64": 2.0}, before)


def test_progress_is_given_in_whole_numbers_from_0() -> None:
    given = check_progress(step=0, steps=np.int32(5), epoch=None, epochs=1)
    assert given == {"step": 0, "steps": 5, "epochs": 1}


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("step", -1, 0), ("step", 1.5, 0), ("epoch", "3", 0), ("steps", 0, 1), ("epochs", True, 1), ("epochs", 2.0, 1)],
)
def test_progress_that_is_no_count_is_an_error(name: str, value: Any, least: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name} is a whole number, at least {least}"):
        check_progress(**{name: value})


def test_callbacks_look_at_numbers_ten_times_a_second_at_first_and_then_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("hvdgloo._collectives.logged.time.monotonic", lambda: now[0])
    pause, looks = Pause(), []
    for n in range(30_000):
        now[0] = 1000.0 + n / 1000
        if pause.over():
            looks.append(now[0])
    pauses = [later - before for before, later in itertools.pairwise(looks)]
    assert pauses[:63] == pytest.approx([0.1] * 63, abs=0.002)
    assert pauses[64:] == pytest.approx([1.0] * len(pauses[64:]), abs=0.002)
    assert len(pauses) > 80


def test_what_cannot_be_logged_of_a_library_s_metrics_is_left_out() -> None:
    counters = Counters()
    metrics = {"loss": np.float32(0.5), "confusion": np.ones((2, 2)), "x" * 101: 1.0, "best": None, "acc": 1}
    record_metrics(counters, metrics, step=3, steps=math.inf, epoch=0, epochs=-1)
    assert counters.logged == {"loss": 0.5, "acc": 1.0}
    assert counters.progress == Progress(step=3, epoch=0)


def test_of_too_many_metrics_of_a_library_the_first_are_logged_each_time() -> None:
    metrics = {f"class {n}": float(n) for n in range(70)}
    first = fitting(metrics, {"loss": 0.1})
    assert list(first) == [f"class {n}" for n in range(63)]
    assert fitting(metrics, {"loss": 0.1, **first}) == first


@pytest.mark.parametrize("note", ["", 7, "x" * 1001])
def test_a_note_is_a_text(note: Any) -> None:
    check_note(None)
    check_note("saved a checkpoint")
    with pytest.raises(InvalidArgumentError, match="a note is a text of 1 to 1000 characters"):
        check_note(note)


def test_averages_are_over_the_ranks_that_take_part() -> None:
    other = {"loss": 3.0, "accuracy": 0.5}
    parts = []
    averaged(other, lambda array: parts.append(array) or array)  # type: ignore[func-returns-value]
    assert averaged({"accuracy": 1.0, "loss": 1.0}, lambda array: array + parts[0]) == {"accuracy": 0.75, "loss": 2.0}
    joined = np.zeros_like(parts[0])  # what a rank adds that has joined
    assert averaged(other, lambda array: array + joined) == other


def test_ranks_that_average_different_names_are_told() -> None:
    parts = []
    averaged({"accuracy": 1.0}, lambda array: parts.append(array) or array)  # type: ignore[func-returns-value]
    with pytest.raises(MismatchError, match="this rank logs loss, and another rank logs other names"):
        averaged({"loss": 1.0}, lambda array: array + parts[0])
