"""The launcher's decisions before anything is probed. The rest is tested in tests/processes/test_launch_networks.py."""

from __future__ import annotations

import sys

import pytest

from hvdgloo._net import ports
from hvdgloo.rendezvous import host_identity
from hvdgloo.runner.network_discovery import is_here, probe_timeout
from hvdgloo.runner.protocol.frames import PROTOCOL, Hello
from hvdgloo.version import __version__


def hello(identity: str, port: int) -> Hello:
    return Hello(PROTOCOL, __version__, "h1", identity, pid=1, cores=1, gpus=0, port=port)


@pytest.mark.parametrize(("connect", "probe"), [(30, 3.0), (1000, 3.0), (10, 1.0), (0.5, 0.5)])
def test_probes_take_a_part_of_the_connect_timeout(connect: float, probe: float) -> None:
    assert probe_timeout(connect) == probe


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_an_agent_is_here_if_its_port_is_held_here() -> None:
    """A clone of this virtual machine has the same boot id, host name and number of network namespace."""
    with ports.hold_free_port() as hold:
        assert is_here(hello(host_identity(), hold.port))
        assert not is_here(hello("0123456789abcdef", hold.port))
    assert not is_here(hello(host_identity(), hold.port))
