"""The rendezvous service: how the processes of a job find each other, get their ranks, and exchange small values.

A ``RendezvousServer`` runs in the launcher, or by itself as ``hvdgloo-rendezvous``; workers reach it with a
``RendezvousClient``. It knows nothing of tensors and never unpickles anything.
"""

from hvdgloo.rendezvous.auth import generate_secret, seal, unseal
from hvdgloo.rendezvous.client import HttpStore, Registration, RendezvousClient
from hvdgloo.rendezvous.identity import host_identity
from hvdgloo.rendezvous.membership import WorkerInfo
from hvdgloo.rendezvous.server import RendezvousServer
from hvdgloo.rendezvous.store import MemoryStore, Store

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
