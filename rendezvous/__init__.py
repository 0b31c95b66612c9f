"""The rendezvous service: how the processes of a job find each other, get their ranks, and exchange small values.

A ``RendezvousServer`` runs in the launcher, or by itself as ``hvdgloo-rendezvous``; workers reach it with a
``RendezvousClient``. It knows nothing of tensors and never unpickles anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdgloo.rendezvous.auth import generate_secret, seal, unseal
from hvdgloo.rendezvous.client import HttpStore, Registration, RendezvousClient
from hvdgloo.rendezvous.identity import host_identity
from hvdgloo.rendezvous.membership import WorkerInfo
from hvdgloo.rendezvous.store import MemoryStore, Store

if TYPE_CHECKING:
    from hvdgloo.rendezvous.server import RendezvousServer

__all__ = [
    "HttpStore",
    "MemoryStore",
    "Registration",
    "RendezvousClient",
    "RendezvousServer",
    "Store",
    "WorkerInfo",
    "generate_secret",
    "host_identity",
    "seal",
    "unseal",
]


def __getattr__(name: str) -> Any:
    # Workers and agents do without the web server, whose import takes longer than all the rest.
    if name == "RendezvousServer":
        from hvdgloo.rendezvous.server import RendezvousServer

        return RendezvousServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
