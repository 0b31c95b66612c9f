"""The rendezvous service, where the processes of a job find each other, get their ranks, and exchange small values.

A ``RendezvousServer`` runs in the launcher, or on its own as ``hvdgloo-rendezvous``; workers reach it with a
``RendezvousClient``. It knows nothing of tensors and never unpickles anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdgloo.rendezvous._auth import SEAL_BYTES, generate_secret, seal, unseal
    from hvdgloo.rendezvous._client.client import HttpStore, Registration, RendezvousClient
    from hvdgloo.rendezvous._client.elastic import Alone, ElasticClient, News, Placement
    from hvdgloo.rendezvous._host_identity import host_identity
    from hvdgloo.rendezvous._server.server import RendezvousServer
    from hvdgloo.rendezvous._store import MemoryStore, Store
    from hvdgloo.rendezvous._worker_info import WorkerInfo

_PLACES = {
    "_auth": ("SEAL_BYTES", "generate_secret", "seal", "unseal"),
    "_client.client": ("HttpStore", "Registration", "RendezvousClient"),
    "_client.elastic": ("Alone", "ElasticClient", "News", "Placement"),
    "_host_identity": ("host_identity",),
    "_worker_info": ("WorkerInfo",),
    "_server.server": ("RendezvousServer",),
    "_store": ("MemoryStore", "Store"),
}
"""Modules of the names below. They are imported when a name is first used: workers and agents need no web server,
launchers and agents no client, and what they do not import does not delay a start."""

__all__ = [
    "SEAL_BYTES",
    "Alone",
    "ElasticClient",
    "HttpStore",
    "MemoryStore",
    "News",
    "Placement",
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
    for module, names in _PLACES.items():
        if name in names:
            value = getattr(importlib.import_module(f"hvdgloo.rendezvous.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
