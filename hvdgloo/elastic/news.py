"""Listeners in this process that are told, besides the states, that hosts are coming or going."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["NotificationManager", "notification_manager"]


class Listener(Protocol):
    """An object that can be registered: a ``State``, for example."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hear that hosts are coming or going.

        Args:
            timestamp: seconds since 1970, when this worker heard of it.
            update_res: the sum of 1 (some are removed) and 2 (some are added).
        """


class NotificationManager:
    """Programs' own listeners. States that train in ``elastic.run`` are told in any case."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self) -> None:
        """Do nothing: ``hvd.init()`` has begun to listen. For programs that call it."""

    def register_listener(self, listener: Listener) -> None:
        """Tell ``listener``, in a thread of its own, whenever hosts are coming or going."""
        with self._lock:
            if not any(known is listener for known in self._listeners):
                self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop telling ``listener``; nothing happens if it was not registered."""
        with self._lock:
            self._listeners = [known for known in self._listeners if known is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all listeners."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()
"""This process's listeners."""
