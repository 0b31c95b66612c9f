"""The exceptions that training loops catch, where Horovod's programs look for them."""

from __future__ import annotations

from hvdgloo.errors import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message of ``HorovodVersionMismatchError``."""
    return str(HorovodVersionMismatchError(name, version, installed_version))
