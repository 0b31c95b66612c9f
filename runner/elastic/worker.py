"""What a change of hosts means to workers, under the name by which Horovod's programs import it."""

from __future__ import annotations

import enum

from hvdgloo.rendezvous._elastic.events import Update


class HostUpdateResult(enum.IntFlag):
    """What ``state.on_hosts_updated(timestamp, result)`` is told."""

    no_update = Update.NONE
    removed = Update.REMOVED
    added = Update.ADDED
    mixed = Update.MIXED
