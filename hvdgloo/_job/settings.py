"""A job's settings as the engine needs them, with rank 0's values for those that must be the same everywhere."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdgloo._backends.select import plane_settings
from hvdgloo._engine.engine import EngineSettings
from hvdgloo._engine.settings import Choice
from hvdgloo._platform.machine import usable_cores
from hvdgloo.config import Config
from hvdgloo.types import WireFormat

if TYPE_CHECKING:
    from hvdgloo._engine.tuning import AutotuneSettings

logger = logging.getLogger(__name__)

_SPIN_SECONDS = 100e-6
"""Seconds that a blocking call polls for the others' answers before it goes to sleep, where every rank has a core:
ranks that call at the same time answer each other within that."""


def plan_settings(config: Config) -> dict[str, Any]:
    """Return the settings that all ranks must take from rank 0."""
    return {
        "fusion_threshold": config.fusion_threshold,
        "separate_groups": config.disable_group_fusion,
        "deterministic": config.deterministic,
        "operation_timeout": config.operation_timeout,
        "stall_warning_time": config.stall_warning_time,
        "wire": config.wire,
        "wire_threshold": config.wire_threshold,
        **plane_settings(config),
    }


def engine_settings(
    config: Config, decided: Mapping[str, Any] | None = None, local_size: int | None = None
) -> EngineSettings:
    """Return the engine's settings, with rank 0's values where they must be the same everywhere.

    Args:
        local_size: ranks on this host. Either each has a core of its own on which to poll for answers, or none does.
    """
    shutdown_time = config.stall_shutdown_time
    if 0 < shutdown_time < config.stall_warning_time:
        logger.warning(
            "HVDGLOO_STALL_SHUTDOWN_TIME_SECONDS=%g is less than the warning time (%g s) and is ignored",
            shutdown_time,
            config.stall_warning_time,
        )
        shutdown_time = 0.0
    shared = plan_settings(config)
    shared.update({name: value for name, value in (decided or {}).items() if name in shared})
    return EngineSettings(
        fusion_threshold=int(shared["fusion_threshold"]),
        inline_threshold=config.inline_threshold,
        separate_groups=bool(shared["separate_groups"]),
        deterministic=bool(shared["deterministic"]),
        operation_timeout=float(shared["operation_timeout"]),
        wire=WireFormat(shared["wire"]),
        wire_threshold=int(shared["wire_threshold"]),
        cache_capacity=config.cache_capacity,
        cycle_time=config.cycle_time / 1000,
        stall_check=not config.stall_check_disable,
        stall_warning_time=float(shared["stall_warning_time"]),
        stall_shutdown_time=shutdown_time,
        follow_streams=config.gpu_completion == "stream",
        autotune=_autotune(config) if config.autotune else None,
        spin_time=_SPIN_SECONDS if local_size is not None and 1 < local_size <= usable_cores() else 0.0,
    )


def _autotune(config: Config) -> AutotuneSettings:
    """Return the settings of autotuning; what the user has chosen stays."""
    from hvdgloo._engine.tuning import AutotuneSettings  # most jobs do without

    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    tried = [field.name for field in dataclasses.fields(Choice)]
    return AutotuneSettings(
        log=config.autotune_log,
        warmup_samples=config.autotune_warmup_samples,
        steps_per_sample=config.autotune_steps_per_sample,
        most=config.autotune_max_samples,
        noise=config.autotune_noise,
        fixed=frozenset(name for name in tried if getattr(config, name) != defaults[name]),
    )
