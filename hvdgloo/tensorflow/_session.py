"""TensorFlow 1's way to train: sessions and their hooks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdgloo.tensorflow.functions import broadcast_global_variables

__all__ = ["BroadcastGlobalVariablesHook"]


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks' variables the root's values as soon as a session has been made.

    For ``tf.compat.v1.train.MonitoredTrainingSession(hooks=[...])``, so that ranks begin alike, whether the root
    initialised its variables or restored a checkpoint.

    Args:
        root_rank: global rank of the source.
        device: accepted for programs that pass it.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._broadcast: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Called by the session before its graph is closed to changes."""
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast[0] is not graph:
            self._broadcast = graph, broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Called by the session once it is there."""
        assert self._broadcast is not None
        session.run(self._broadcast[1])
