"""Backends: what estimators train on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.spark.common.backend import Backend, LocalBackend, SparkBackend, default_num_proc
from tests.support.estimators import InPlace


def _place(greeting: str = "") -> tuple[str, int, int, str | None]:
    import hvdgloo.numpy as hvd

    hvd.init()
    return greeting, hvd.rank(), hvd.size(), os.environ.get("OF_THE_CALL")


def test_a_local_backend_runs_processes_of_this_host() -> None:
    backend = LocalBackend(2, env={"OF_THE_CALL": "backend's", "TMPDIR": os.environ.get("TMPDIR", "/tmp")})
    assert backend.num_processes() == 2
    assert backend.run(_place, ("hello",), env={"OF_THE_CALL": "call's"}) == [
        ("hello", 0, 2, "call's"),
        ("hello", 1, 2, "call's"),
    ]


def test_a_local_backend_s_own_variables_hold_without_the_call_s(capfd: pytest.CaptureFixture[str]) -> None:
    assert LocalBackend(env={"OF_THE_CALL": "backend's"}).run(_place) == [("", 0, 1, "backend's")]


@pytest.mark.parametrize("number", [0, -1, "2", 1.5])
def test_a_number_of_processes_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="give a whole number of processes"):
        LocalBackend(number)
    with pytest.raises(ConfigError, match="give a whole number of processes"):
        SparkBackend(number)


def test_a_backend_of_one_s_own_has_two_methods() -> None:
    assert InPlace(2).run(sum, ([1, 2],)) == [3, 3]
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]


def test_default_processes_without_a_session_name_what_is_missing(sessions: Any) -> None:
    sessions.stop()
    with pytest.raises(LaunchError, match="active SparkContext"):
        default_num_proc()
