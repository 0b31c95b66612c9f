"""Which package Gloo is taken from, and what is said where it cannot be. No package is imported."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from hvdgloo import basics
from hvdgloo.backends.pygloo import rounds
from hvdgloo.backends.pygloo_helper import Command, Op, Type, Verb
from hvdgloo.config import Config
from hvdgloo.errors import MissingDependencyError
from hvdgloo.planes import Planes, gloo_provider, plane_settings
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.runner.check_build import build_table
from hvdgloo.topology import Host, Topology, Worker


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that there are, as far as anybody asks."""
    packages: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in packages else None)
    return packages


@pytest.mark.parametrize(
    ("packages", "setting", "provider"),
    [
        (("torch", "pygloo"), "auto", "torch"),
        (("pygloo",), "auto", "pygloo"),
        (("torch",), "auto", "torch"),
        ((), "auto", ""),
        (("torch", "pygloo"), "pygloo", "pygloo"),
        (("pygloo",), "torch", "torch"),
    ],
)
def test_torch_comes_first_unless_somebody_chooses(
    installed: set[str], packages: tuple[str, ...], setting: str, provider: str
) -> None:
    installed.update(packages)
    assert gloo_provider(setting) == provider
    assert plane_settings(Config(gloo_provider=setting))["gloo_provider"] == provider
    assert basics.gloo_built() == bool(packages)


def _open(config: Config, decided: Config) -> None:
    """What rank 1, on the second host, does after rank 0 has decided."""
    topology = Topology(
        0,
        (Host("h1", "one"), Host("h2", "two")),
        tuple(Worker(rank, rank, 0, 7, "127.0.0.1", 0) for rank in range(2)),
    )
    planes = Planes(config, plane_settings(decided), topology, 1, MemoryStore(), "t/", "127.0.0.1")
    planes.open(0, range(2))


def test_a_rank_without_what_was_chosen_names_itself(installed: set[str]) -> None:
    installed.add("torch")
    text = r"rank 1.*h2.* does not have pygloo, through which rank 0 has decided .*\(--gloo-provider\); pip install"
    with pytest.raises(MissingDependencyError, match=text):
        _open(Config(), Config(gloo_provider="pygloo"))


def test_its_own_setting_does_not_count(installed: set[str]) -> None:
    installed.add("torch")
    with pytest.raises(MissingDependencyError, match="does not have pygloo"):
        _open(Config(gloo_provider="torch"), Config(gloo_provider="pygloo"))


def test_without_either_both_ways_to_install_are_named(installed: set[str]) -> None:
    text = r"neither torch nor pygloo is installed; pip install 'hvdgloo\[torch\]'.*'hvdgloo\[pygloo\]'.*several hosts"
    with pytest.raises(MissingDependencyError, match=text):
        _open(Config(), Config())


@pytest.mark.parametrize("package", ["torch", "pygloo"])
def test_check_build_shows_which(installed: set[str], package: str) -> None:
    if package == "pygloo":  # else torch is asked for NCCL
        installed.add(package)
    table = build_table()
    here = "X" if package == "pygloo" else " "
    assert f"    [{here}] Gloo\n" in table
    assert table.endswith(f"Available Gloo Providers:\n    [ ] torch\n    [{here}] pygloo\n")


@pytest.mark.parametrize("size", range(1, 10))
def test_every_two_ranks_meet_once_in_the_same_round(size: int) -> None:
    """If all go through their rounds in order, nobody waits for somebody who waits for a third."""
    met = [rounds(rank, size) for rank in range(size)]
    assert [sorted(peers) for peers in met] == [[r for r in range(size) if r != rank] for rank in range(size)]
    while any(met):
        pairs = {rank: peers[0] for rank, peers in enumerate(met) if peers}
        free = [rank for rank, peer in pairs.items() if pairs.get(peer) == rank]
        assert free
        for rank in free:
            met[rank].pop(0)


def test_commands_travel_as_they_are() -> None:
    command = Command(Verb.BROADCAST, Type.Float16, Op.MAX, 3, 1 << 40, 5, 7)
    assert Command.decode(command.encode()) == command
