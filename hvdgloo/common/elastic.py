"""Elastic training without a framework, where Horovod's programs look for it."""

from __future__ import annotations

from hvdgloo.elastic import ObjectState, State, notification_manager, run_fn

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
