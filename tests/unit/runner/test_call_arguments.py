"""Messages of every function that starts a job about arguments for MPI, and about old names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.runner import call_arguments


def test_mpi_is_refused_and_what_is_for_it_has_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"^start\(use_mpi=True\): there is no MPI here"):
        call_arguments.judge_controllers("start", None, True, "mpi_args", None)
    with pytest.raises(ConfigError, match=r"^start\(\): use_gloo and use_mpi exclude each other"):
        call_arguments.judge_controllers("start", True, True, "mpi_args", None)
    with pytest.warns(UserWarning, match=r"^start\(mpi_args=\.\.\.\) has no effect"):
        call_arguments.judge_controllers("start", True, None, "mpi_args", "-x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_arguments.judge_controllers("start", True, False, "mpi_args", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((5, (), {}), r"start\(\): the first argument is a function, not 5; its arguments follow it, in args="),
        ((int, 0.1, {}), r"start\(args=0\.1\): give a tuple of arguments, even of one: args=\(0\.1,\)"),
        ((int, "10", {}), r"start\(args='10'\): give a tuple"),
        ((int, (), ["base"]), r"start\(kwargs=\['base'\]\): give a dictionary of names and values"),
        ((int, (), {1: 2}), r"start\(kwargs={1: 2}\): give a dictionary"),
    ],
)
def test_what_cannot_be_called_is_a_mistake_before_anything_is_started(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        call_arguments.check_call("start", *given)


def test_whatever_can_be_called_may_be() -> None:
    call_arguments.check_call("start", int, None, None)
    call_arguments.check_call("start", print, [1, 2], {"sep": ""})
    call_arguments.check_call("start", print, (each for each in (1, 2)), None)


def test_an_old_name_gives_a_warning_where_the_user_calls() -> None:
    def start(workers: int = 1, slots: int | None = None) -> int:
        return call_arguments.renamed("start", "workers", workers, "slots", slots, default=1)

    with pytest.warns(DeprecationWarning, match=r"^start\(slots=\.\.\.\) is an old name; write workers=$") as caught:
        assert start(slots=3) == 3
    assert caught[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="slots="),
        pytest.raises(ConfigError, match="=2 and slots=3 contradict"),
    ):
        start(2, slots=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(2) == 2


@pytest.mark.parametrize(("given", "found"), [(None, ()), ("eth0", ("eth0",)), (["eth0", "lo"], ("eth0", "lo"))])
def test_interfaces_are_one_or_several(given: str | list[str] | None, found: tuple[str, ...]) -> None:
    assert call_arguments.names(given) == found
