"""Two lines instead of a traceback from a rank that ends only because another one did (pain 22), and for all else of
hvdgloo's a traceback that ends where the program called it."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdgloo
import hvdgloo.numpy as hvd
from hvdgloo import elastic
from hvdgloo._collectives import frontend
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.threads import python_stacks
from hvdgloo._job import excepthook
from hvdgloo._platform import own_frames, stall_causes
from hvdgloo.elastic import State
from hvdgloo.errors import (
    ConfigError,
    HorovodInternalError,
    JobShutdownError,
    NotInitializedError,
    PeerLostError,
    StallError,
)
from hvdgloo.runner.job.outcome import Failure, JobOutcome, blame, named_culprit
from tests.support.launching import wait_for

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
        (PeerLostError("a rank"), False),
        (StallError("stalled"), False),
        (HorovodInternalError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_what_is_an_echo(error: BaseException, expected: bool) -> None:
    assert excepthook.is_echo(error, 0) is expected
    assert not excepthook.is_echo(error, None)


def test_the_place_in_the_program_and_the_error_itself(capsys: pytest.CaptureFixture[str]) -> None:
    excepthook.install(0)
    error = caught(PeerLostError(LOST, rank=2))
    sys.excepthook(type(error), error, error.__traceback__)
    place, what = capsys.readouterr().err.splitlines()
    assert place.startswith(f"Stopped because rank 2 was lost, at {__file__}:")
    assert " in step, " in place
    assert what == f"hvdgloo.errors.PeerLostError: {LOST}"
    assert named_culprit(what) == 2, "the launcher recognises the echo by it"


def test_all_else_is_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    excepthook.install(0)
    error = caught(ValueError("the reason"))
    sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_who_debugs_sees_everything(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("hvdgloo").setLevel(logging.DEBUG)
    excepthook.install(0)
    error = caught(PeerLostError(LOST, rank=2))
    sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_program_s_own_way_of_showing_errors_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(sys, "excepthook", own)
    excepthook.install(0)
    assert sys.excepthook is own


def test_a_rank_that_changes_is_noticed() -> None:
    """``init()`` again after ``shutdown()`` may make it another one."""
    excepthook.install(0)
    excepthook.install(2)
    assert isinstance(sys.excepthook, excepthook._Hook)
    assert sys.excepthook.rank == 2


def test_without_a_traceback() -> None:
    assert excepthook.brief(PeerLostError(LOST, rank=2), None).startswith(
        "Stopped because rank 2 was lost (HVDGLOO_LOG_LEVEL"
    )


def test_an_echo_names_the_operation_and_who_called_it() -> None:
    handle = Handle("allreduce.loss")
    handle.resolve(error=JobShutdownError("rank 1 (host b, pid 7) exited", rank=1))

    def evaluate() -> None:
        handle.wait()

    with pytest.raises(JobShutdownError) as raised:
        evaluate()
    last = excepthook.brief(raised.value, raised.tb).splitlines()[-1]
    assert "; this rank was in allreduce.loss, called at " in last
    assert last.endswith(" in evaluate")
    blamed = blame(
        JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: 0}),
        {0: "a", 1: "b"},
        lambda rank: "" if rank else last,
    )
    assert blamed is not None
    assert "(rank 0 in allreduce.loss, called at " in blamed.reason


def without_init() -> NotInitializedError:
    """From deep within hvdgloo, which was not initialized."""
    try:
        hvd.allreduce(np.ones(3))
    except NotInitializedError as error:
        return error
    raise AssertionError


def test_the_program_s_own_line_is_right_above_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = without_init()
    assert isinstance(sys.excepthook, excepthook._Hook), "it is in place before init(), too"
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err.splitlines()
    hint, *_, place, line, what = (row for row in said if row.strip(" ~^"))  # Python 3.13 marks the call in the line
    assert "HVDGLOO_LOG_LEVEL=DEBUG" in hint
    assert place.startswith(f'  File "{__file__}", line ')
    assert line.strip() == "hvd.allreduce(np.ones(3))"
    assert what.startswith("hvdgloo.errors.NotInitializedError: hvdgloo has not been initialized")


def test_the_setting_shows_all_frames_before_init_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDGLOO_LOG_LEVEL", "DEBUG")
    error = without_init()
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert frontend.__file__ in said


def test_errors_of_ours_that_led_to_it_are_shown_likewise() -> None:
    try:
        try:
            hvd.allreduce(np.ones(3))
        except NotInitializedError as error:
            raise ConfigError("the second") from error
    except ConfigError as error:
        said = excepthook.from_outside(error, error.__traceback__)
    assert said.count("direct cause") == 1
    assert frontend.__file__ not in said
    assert said.endswith("ConfigError: the second\n")


def test_an_error_of_ours_that_the_next_one_repeats_is_shown_once() -> None:
    ours = str(Path(excepthook.__file__).with_name("made_up.py"))
    text = "try: raise ConfigError('port 1 is held')\nexcept ConfigError as e: raise StallError(f'{e}, again') from e"
    try:
        exec(compile(text, ours, "exec"), {"ConfigError": ConfigError, "StallError": StallError})
    except StallError as error:
        shown = excepthook.from_outside(error, error.__traceback__)
    assert shown.startswith(excepthook.HINT)
    assert ours not in shown
    assert shown.count("port 1 is held") == 1


def test_foreign_errors_that_led_to_it_are_shown_in_full() -> None:
    ours = str(Path(excepthook.__file__).with_name("made_up.py"))
    code = compile("try: int('x')\nexcept ValueError as error: raise ConfigError('ours') from error", ours, "exec")
    try:
        exec(code, {"ConfigError": ConfigError})
    except ConfigError as error:
        said = excepthook.from_outside(error, error.__traceback__)
    cause, itself = said.split("direct cause")
    assert ours in cause
    assert ours not in itself
    assert __file__ in itself


def test_an_error_without_anything_of_the_program_in_its_trace_is_shown_whole() -> None:
    error = StallError("from a thread of ours")
    try:
        raise error
    except StallError:
        trace = error.__traceback__
    assert trace is not None
    ours = type(trace)(None, without_init().__traceback__.tb_next.tb_frame, 0, 1)  # type: ignore[union-attr]
    assert frontend.__file__ in excepthook.from_outside(error, ours)


def test_a_variable_that_cannot_be_used_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is not in the program."""
    monkeypatch.setenv("HVDGLOO_CYCLE_TIME", "abc")
    with pytest.raises(ConfigError) as caught_error:
        hvd.init()
    sys.excepthook(ConfigError, caught_error.value, caught_error.value.__traceback__)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdgloo.errors.ConfigError: HVDGLOO_CYCLE_TIME: 'abc' cannot be used: expected a number")


def test_an_error_of_torch_distributed_that_hvdgloo_raised_ends_where_the_program_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class DistBackendError(RuntimeError): ...

    folder = Path("site-packages") / "torch" / "distributed"
    theirs, ours = str(folder / "distributed_c10d.py"), str(Path(excepthook.__file__).with_name("made_up.py"))
    scope: dict[str, Any] = {"DistBackendError": DistBackendError}
    exec(compile("def allreduce(text): raise DistBackendError(text)", ours, "exec"), scope)
    exec(compile("def all_reduce(text): allreduce(text)", theirs, "exec"), scope)
    for text, expected in (("hvdgloo: lost", False), ("NCCL: lost", True)):
        try:
            scope["all_reduce"](text)
        except DistBackendError as error:
            excepthook._Hook(0)(DistBackendError, error, error.__traceback__)
        said = capsys.readouterr().err
        assert (theirs in said, ours in said) == (expected, expected), said
        assert __file__ in said
        assert said.splitlines()[-1].endswith(text)


def test_ctrl_c_in_a_call_of_hvdgloo_is_shown_at_the_program_s_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen of hvdgloo's frames from each rank hid which line each was in."""
    ours = str(Path(excepthook.__file__).with_name("made_up.py"))
    scope: dict[str, Any] = {"json": json}
    program = "def stop(text): raise KeyboardInterrupt\ndef step(): return json.loads('1', parse_int=stop)"
    exec(compile(program, ours, "exec"), scope)
    interrupted = []
    for called in (scope["step"], lambda: scope["stop"](""), lambda: json.loads("1", parse_int=_interrupted)):
        try:
            called()
        except KeyboardInterrupt as error:
            excepthook._Hook(0)(KeyboardInterrupt, error, error.__traceback__)
        interrupted.append(capsys.readouterr().err)
    step, stop, in_the_program = interrupted
    for shown in (step, stop):
        assert shown.startswith(excepthook.HINT)
        assert ours not in shown
        assert json.__file__ not in shown, "what hvdgloo called is not shown either"
        assert __file__ in shown
        assert shown.endswith("\nKeyboardInterrupt\n")
    assert in_the_program.startswith("Traceback")
    assert json.__file__ in in_the_program


def _interrupted(text: str) -> None:
    raise KeyboardInterrupt


def test_an_argument_that_cannot_be_used_is_shown_like_any_other_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught_error:
        hvdgloo.run.run(print, np=0)
    error = caught_error.value
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert own_frames.FOLDER not in said
    assert said.splitlines()[-1].startswith("hvdgloo.errors.ConfigError: ")
    assert __file__ in said


def test_what_a_program_raises_under_elastic_run_is_shown_with_its_own_frames(
    capsys: pytest.CaptureFixture[str],
) -> None:
    excepthook.install(0)

    def lookup() -> object:
        return {}["missing"]

    @elastic.run
    def train(state: State) -> object:
        return lookup()

    class Nothing(State):
        """Has nothing to save."""

        def __init__(self) -> None:
            super().__init__(lambda value, root_rank=0: value, lambda: 0)

        def save(self) -> None:
            pass

        def restore(self) -> None:
            pass

        def sync(self) -> None:
            pass

    with pytest.raises(KeyError) as caught_error:
        train(Nothing())
    error = caught_error.value
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert own_frames.FOLDER not in said
    functions = [row.rpartition(" in ")[2] for row in said.splitlines() if row.startswith("  File ")]
    name = "test_what_a_program_raises_under_elastic_run_is_shown_with_its_own_frames"
    assert functions == [name, "train", "lookup"]


def test_a_defect_of_ours_is_shown_with_our_frames(capsys: pytest.CaptureFixture[str]) -> None:
    excepthook.install(0)
    with pytest.raises(AttributeError) as caught_error:
        excepthook.from_outside(caught(ValueError("x")), "no trace")  # type: ignore[arg-type]
    error = caught_error.value
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert own_frames.FOLDER in said
    assert excepthook.HINT not in said


def test_a_stall_report_begins_with_the_causes_that_front_ends_know(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = python_stacks().splitlines()[0]
    assert plain.startswith("thread ")
    monkeypatch.setattr(stall_causes, "_looks", [lambda: None, lambda: "All threads wait."])
    assert python_stacks().splitlines()[:2] == ["All threads wait.", plain]


def test_a_stall_report_s_stack_ends_in_the_program() -> None:
    latch = Handle("late")
    mine = "latch.wait(20)"

    def stack_of_it(part: str) -> str:
        return next((each for each in python_stacks().split("thread ") if mine in each and part in each), "")

    def waiting_here() -> None:
        latch.wait(20)

    thread = threading.Thread(target=waiting_here, name="training")
    thread.start()
    try:
        stack = wait_for(lambda: stack_of_it(mine))
        logging.getLogger("hvdgloo").setLevel(logging.DEBUG)
        whole = wait_for(lambda: stack_of_it(own_frames.FOLDER))
    finally:
        latch.resolve()
        thread.join()
    assert stack.splitlines()[-1].strip() == mine
    assert own_frames.FOLDER not in stack
    assert whole.startswith(stack), "who debugs sees everything"
