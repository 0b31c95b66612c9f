"""Effects of a change of hosts on workers, under the name that Horovod's programs import."""

from __future__ import annotations

import enum

from hvdgloo.rendezvous._elastic.events import Update


class HostUpdateResult(enum.IntFlag):
    """The second argument of ``state.on_hosts_updated(timestamp, result)``."""

    no_update = Update.NONE
    removed = Update.REMOVED
    added = Update.ADDED
    mixed = Update.MIXED
