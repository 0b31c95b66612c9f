"""Two lines instead of a traceback from a rank that ends only because another one did (pain 22)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from hvdgloo import aftermath
from hvdgloo.errors import HorovodInternalError, JobShutdownError, PeerLostError, StallError
from hvdgloo.runner.outcome import named_culprit

LOST = "rank 2 (host b, pid 7) was lost: its connection ended"


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    log = logging.getLogger("hvdgloo")
    level = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(level)


def caught(error: BaseException) -> BaseException:
    def step() -> None:
        raise error

    try:
        step()
    except BaseException as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerLostError(LOST, rank=2), True),
        (JobShutdownError("rank 2 ...", rank=2), True),
        (JobShutdownError("this rank", rank=0), False),
        (PeerLostError("somebody"), False),
        (StallError("stalled"), False),
        (HorovodInternalError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_what_is_an_echo(error: BaseException, expected: bool) -> None:
    assert aftermath.is_echo(error, 0) is expected


def test_the_place_in_the_program_and_the_error_itself(capsys: pytest.CaptureFixture[str]) -> None:
    aftermath.install(0)
    error = caught(PeerLostError(LOST, rank=2))
    sys.excepthook(type(error), error, error.__traceback__)
    place, what = capsys.readouterr().err.splitlines()
    assert place.startswith(f"Stopped with another rank, at {__file__}:")
    assert " in step, " in place
    assert what == f"hvdgloo.errors.PeerLostError: {LOST}"
    assert named_culprit([place, what]) == 2, "the launcher recognises the echo by it"


def test_all_else_is_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    aftermath.install(0)
    error = caught(ValueError("the reason"))
    sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_who_debugs_sees_everything(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("hvdgloo").setLevel(logging.DEBUG)
    aftermath.install(0)
    error = caught(PeerLostError(LOST, rank=2))
    sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_program_s_own_way_of_showing_errors_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(sys, "excepthook", own)
    aftermath.install(0)
    assert sys.excepthook is own


def test_a_rank_that_changes_is_noticed() -> None:
    """``init()`` again after ``shutdown()`` may make it another one."""
    aftermath.install(0)
    aftermath.install(2)
    assert isinstance(sys.excepthook, aftermath._Hook)
    assert sys.excepthook.rank == 2


def test_without_a_traceback() -> None:
    assert aftermath.brief(PeerLostError(LOST, rank=2), None).startswith("Stopped with another rank (HVDGLOO_LOG_LEVEL")
