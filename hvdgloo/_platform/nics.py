"""Network interfaces by name, for libraries that want to be told one."""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping


def nic_of(address: str) -> str:
    """Return the name of the interface that has an address of this host; empty if none has it.

    Args:
        address: an IP address, without a scope.
    """
    import psutil  # a few milliseconds that most jobs save

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name.partition(":")[0]  # eth0:1 is another address of eth0
    return ""


def nccl_variables(nic: str, *, ipv6: bool) -> dict[str, str]:
    """Set the variables that tell NCCL which interface to use for its own connections.

    Args:
        nic: one that the user has chosen; empty leaves the choice to NCCL, which takes several if it finds several.
        ipv6: the job's addresses are of this family.
    """
    chosen = {"NCCL_SOCKET_IFNAME": f"={nic}"} if nic else {}
    return {**chosen, "NCCL_SOCKET_FAMILY": "AF_INET6"} if ipv6 else chosen


def tell_nccl(address: str, environ: MutableMapping[str, str], *, chosen: bool) -> None:
    """Set the variables that a launcher would have set for NCCL, unless the user has.

    Args:
        address: at which this worker is reached.
        environ: this process's.
        chosen: the user has named the address, and thereby an interface.
    """
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return
    for name, value in nccl_variables(nic_of(address) if chosen else "", ipv6=ip.version == 6).items():
        environ.setdefault(name, value)
