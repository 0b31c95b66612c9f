"""The thread on which the hosts of an elastic job are discovered again and again, since a discovery may block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hvdgloo.runner.elastic.discovery import HostManager
from hvdgloo.runner.job.spec import Discovery

HANG_TIME = 30.0
"""Seconds after which a line reports that a discovery has not answered."""

_JOIN_TIME = 1.0
"""Seconds for a discovery to return at the end; otherwise its thread ends with the process."""

_JOIN_PAUSE = 0.05
"""Seconds after which the discovery is interrupted again: it may have been about to start its script."""


class HostPolling:
    """A context in which a discovery is called repeatedly.

    Args:
        discovery: lists the hosts; a manager if it has been called already.
        listed: receives the hosts on entering and whenever they change, on the thread that called the discovery.
        tell: shows a line to the user. Any thread may call it.
        interval: seconds between two calls of the discovery.
        hang_time: seconds after which the user is told that the discovery does not answer.

    Raises:
        DiscoveryError: on entering, if hosts cannot be determined.
    """

    def __init__(
        self,
        discovery: Discovery | HostManager,
        listed: Callable[[Sequence[tuple[str, int | None]]], None],
        tell: Callable[[str], None],
        *,
        interval: float = 1.0,
        hang_time: float = HANG_TIME,
    ) -> None:
        self._manager = discovery if isinstance(discovery, HostManager) else HostManager(discovery)
        self._listed = listed
        self._tell = tell
        self._interval = interval
        self._hang_time = hang_time
        self._asked_at: float | None = None
        self._told_of_hang = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="hvdgloo-discovery", daemon=True)

    def __enter__(self) -> HostPolling:
        if not self._manager.asked:
            self._manager.update_available_hosts()
        self._listed(self._manager.current_hosts)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        give_up_at = time.monotonic() + _JOIN_TIME
        while self._thread.is_alive() and time.monotonic() < give_up_at:
            self._manager.interrupt()
            self._thread.join(_JOIN_PAUSE)

    def keep_time(self, now: float) -> None:
        """Report a discovery that does not answer. Called in each turn of the loop, with monotonic time."""
        asked_at = self._asked_at
        if asked_at is None or self._told_of_hang or now - asked_at < self._hang_time:
            return
        self._told_of_hang = True
        self._tell(
            f"host discovery has not answered for {now - asked_at:.0f} s. The job goes on with the hosts that were "
            "listed before"
        )

    def _poll(self) -> None:
        while not self._over.wait(self._interval):
            self._asked_at = time.monotonic()
            listing = self._manager.update_available_hosts()
            if self._over.is_set():
                return  # an interrupted script is no news
            self._asked_at, self._told_of_hang = None, False
            if listing.notice:
                self._tell(listing.notice)
            if listing.changed:
                self._listed(listing.hosts)
