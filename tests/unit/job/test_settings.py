"""The engine's settings that a Context makes of its Config."""

from __future__ import annotations

import pytest

from hvdgloo._job.settings import engine_settings, plan_settings
from hvdgloo.config import Config
from hvdgloo.types import WireFormat


def test_a_stall_shutdown_before_the_warning_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert engine_settings(Config(stall_warning_time=10.0, stall_shutdown_time=20.0)).stall_shutdown_time == 20.0
    assert engine_settings(Config(stall_warning_time=10.0, stall_shutdown_time=10.0)).stall_shutdown_time == 10.0
    assert caplog.text == ""
    assert engine_settings(Config(stall_warning_time=10.0, stall_shutdown_time=5.0)).stall_shutdown_time == 0.0
    assert "HVDGLOO_STALL_SHUTDOWN_TIME_SECONDS=5 is less than the warning time (10 s) and is ignored" in caplog.text


def test_rank_0_decides_what_shapes_plans() -> None:
    own = Config(fusion_threshold=1, disable_group_fusion=False, cache_capacity=7)
    settings = engine_settings(own, {"fusion_threshold": 5, "separate_groups": True, "clock_offset": 1.0})
    assert (settings.fusion_threshold, settings.separate_groups, settings.cache_capacity) == (5, True, 7)


def test_rank_0_decides_how_long_a_rank_may_be_silent() -> None:
    """Otherwise a leader with a shorter time would end the whole job."""
    own = Config(operation_timeout=2.0, stall_warning_time=3.0)
    settings = engine_settings(own, plan_settings(Config(operation_timeout=40.0, stall_warning_time=50.0)))
    assert (settings.operation_timeout, settings.stall_warning_time) == (40.0, 50.0)


def test_rank_0_decides_how_gradients_cross_between_hosts() -> None:
    settings = engine_settings(Config(wire="int4", wire_threshold=1), plan_settings(Config(wire="int8")))
    assert (settings.wire, settings.wire_threshold) == (WireFormat.INT8, 256 * 1024)
