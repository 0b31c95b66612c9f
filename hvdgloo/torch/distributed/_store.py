"""torch's store as hvdgloo uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from hvdgloo.errors import RendezvousTimeoutError

FIRST_LOOK, LAST_LOOK = 0.0005, 0.02
"""Seconds between looks at the store."""


class TorchStore:
    """torch's store as the rendezvous store of data planes.

    A wait inside of a store would keep all other threads of this process from using it, so keys are looked for again
    and again instead.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(key, value)  # type: ignore[arg-type]  # which the stubs do not know: bytes

    def has(self, key: str) -> bool:
        """Tell whether a key was set."""
        return bool(self._store.check([key]))

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
        """Wait for the values of keys.

        Raises:
            RendezvousTimeoutError: some were not set within ``timeout`` seconds.
        """
        deadline, pause = time.monotonic() + timeout, FIRST_LOOK
        while not self._store.check(list(keys)):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RendezvousTimeoutError(f"{', '.join(keys)}: not set within {timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_LOOK)
        return [bytes(self._store.get(key)) for key in keys]
