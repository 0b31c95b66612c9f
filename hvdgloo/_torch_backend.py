"""The entry point that ``import torch`` calls to learn of the backend (torch.backends, from torch 2.5 on).

It runs in every process that imports torch, and an exception here would end that import. So it only tells torch a name,
imports nothing else, and raises nothing.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_LEAST = (2, 9)
"""The least version of torch, major and minor: with older ones, groups of several hosts fail."""


def why_too_old(version: str) -> str:
    """Return why a version of torch has too old a torch.distributed; empty if it has not."""
    numbers = version.split(".")[:2]
    if not all(number.isdigit() for number in numbers) or tuple(map(int, numbers)) >= _LEAST:
        return ""
    return (
        f"torch.distributed over hvdgloo needs torch {'.'.join(map(str, _LEAST))} or newer, and this is {version}: "
        'upgrade torch, or use the backend "gloo"'
    )


def register() -> None:
    """Tell torch.distributed of the backend "hvdgloo"; once told, do nothing."""
    try:
        from torch.distributed import distributed_c10d as c10d

        if not hasattr(c10d, "Backend") or hasattr(c10d.Backend, "HVDGLOO"):
            return  # a torch without torch.distributed, or called before
        c10d.Backend.register_backend("hvdgloo", _create, extended_api=True, devices=["cpu"])
        # From torch 2.14 on, a recorder that needs C++'s own groups is attached to every backend that is not in here.
        recording: Any = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add("hvdgloo")
        as_gloo = os.environ.get("HVDGLOO_AS_GLOO", "0").lower()
        if as_gloo in ("1", "true", "yes", "on"):
            if reason := why_too_old(sys.modules["torch"].__version__):
                _logger().warning("HVDGLOO_AS_GLOO has no effect: %s", reason)
            else:
                _replace_gloo(c10d)
        elif as_gloo not in ("", "0", "false", "no", "off"):
            _logger().warning("HVDGLOO_AS_GLOO=%s has no effect: expected 1 or 0 (true/false, yes/no, on/off)", as_gloo)
    except Exception:  # noqa: BLE001 - it would end every import of torch
        _logger().warning("torch.distributed was not told of the backend hvdgloo", exc_info=True)


def _create(options: Any, pg_options: Any) -> Any:
    from hvdgloo.torch.distributed._group import create

    return create(options, pg_options)


def _replace_gloo(c10d: Any) -> None:
    """Have groups that are gloo's alone made by hvdgloo; ``get_backend`` goes on saying gloo.

    This replaces a method of torch's that is not public. Where it is missing, a line says so, and gloo stays.
    """
    config: Any = getattr(c10d, "BackendConfig", None)
    original = getattr(config, "get_device_backend_map", None)
    if original is None:
        _logger().warning(
            "HVDGLOO_AS_GLOO has no effect: torch.distributed of this version of torch chooses its backends in another "
            'way. Write dist.init_process_group("hvdgloo") instead'
        )
        return

    def get_device_backend_map(self: Any) -> dict[str, str]:
        backends: dict[str, str] = original(self)
        if backends.get("cpu") != "gloo" or set(backends.values()) != {"gloo"}:
            return backends
        return {"cpu": "hvdgloo"}

    config.get_device_backend_map = get_device_backend_map


def _logger() -> Any:
    import logging

    return logging.getLogger("hvdgloo")
