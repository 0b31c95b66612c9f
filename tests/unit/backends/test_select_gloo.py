"""The choice of the package that Gloo is taken from, and the messages if there is none. No package is imported."""

from __future__ import annotations

import importlib.util
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdgloo._backends.pygloo import PyglooBackend, rounds
from hvdgloo._backends.pygloo_helper import Command, Op, Type, Verb
from hvdgloo._backends.select import Planes, gloo_provider, idle_provider, plane_settings
from hvdgloo._collectives import basics
from hvdgloo._platform.machine import has_package
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, MissingDependencyError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.runner.cli.build_report import build_table
from tests.support.topologies import on_hosts


def test_a_helper_that_may_not_have_a_connection_for_each_rank_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """pygloo connects all with all, in a process that inherits this one's limits."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    with pytest.raises(ConfigError, match=r"^rank 3 of a Gloo group needs 1023 more open files for connections with"):
        PyglooBackend(MemoryStore(), "test/", 3, 1024, "127.0.0.1", 1.0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be installed."""
    packages: set[str] = set()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"{name}.py") if name in packages else None
    )
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
def test_torch_comes_first_unless_the_user_chooses(
    installed: set[str], packages: tuple[str, ...], setting: str, provider: str
) -> None:
    installed.update(packages)
    assert gloo_provider(setting) == provider
    assert plane_settings(Config(gloo_provider=setting))["gloo_provider"] == provider
    assert basics.gloo_built() is True  # a host alone needs no package


def test_a_folder_without_code_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchlike").mkdir()
    (tmp_path / "torchlike/train.txt").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_package("torchlike")
    (tmp_path / "torchlike/__init__.py").touch()
    importlib.invalidate_caches()
    assert has_package("torchlike")


def _open(config: Config, decided: Config, hosts: int = 2) -> None:
    """Act as rank 1, on the last host, after rank 0 has decided."""
    topology = on_hosts(*[2 // hosts] * hosts, first=1)
    planes = Planes(config, plane_settings(decided), topology, 1, MemoryStore(), "t/", "127.0.0.1")
    planes.open(0, range(2))


def _refused(config: Config, decided: Config, hosts: int = 2) -> str:
    with pytest.raises(MissingDependencyError) as raised:
        _open(config, decided, hosts)
    return str(raised.value)


def test_a_rank_without_what_was_chosen_names_itself(installed: set[str]) -> None:
    text = _refused(Config(), Config(gloo_provider="pygloo"))
    assert re.search(r"rank 1 .*h2.* does not have pygloo, which rank 0 has chosen .*\(--gloo-provider\);", text)
    assert text.endswith("; pip install 'hvdgloo[pygloo]' (Python 3.10)")


@pytest.mark.parametrize(("wanted", "other"), [("pygloo", "torch"), ("torch", "pygloo")])
def test_the_setting_is_to_be_left_away_where_the_other_package_is_there(
    installed: set[str], wanted: str, other: str
) -> None:
    installed.add(other)
    text = _refused(Config(gloo_provider=wanted), Config(gloo_provider=wanted))
    assert f"leave out --gloo-provider (HVDGLOO_GLOO_PROVIDER), as {other} is installed, or pip install" in text
    assert f"'hvdgloo[{wanted}]'" in text
    assert f"'hvdgloo[{other}]'" not in text


def test_its_own_setting_does_not_count(installed: set[str]) -> None:
    installed.add("torch")
    text = _refused(Config(gloo_provider="torch"), Config(gloo_provider="pygloo"))
    assert "does not have pygloo" in text
    assert "; run with --gloo-provider torch, if all hosts have it as this one has, or pip install" in text


def test_without_either_both_ways_to_install_are_named(installed: set[str]) -> None:
    text = _refused(Config(), Config())
    assert text.startswith("ranks on several hosts need Gloo, and where rank 0 runs neither torch nor pygloo is ")
    assert re.search(r"installed; pip install 'hvdgloo\[torch\]'.*'hvdgloo\[pygloo\]'", text)


@pytest.mark.parametrize("provider", ["auto", "torch"])
def test_on_one_host_the_setting_that_asks_for_gloo_is_what_to_leave_away(installed: set[str], provider: str) -> None:
    text = _refused(Config(), Config(cpu_operations="gloo", gloo_provider=provider), hosts=1)
    assert text.startswith("HVDGLOO_CPU_OPERATIONS=gloo (--cpu-operations gloo) asks for Gloo, and ")
    assert "; leave out --cpu-operations to share memory, or pip install" in text
    assert "several hosts" not in text


def test_on_several_hosts_leaving_it_away_would_not_help(installed: set[str]) -> None:
    text = _refused(Config(), Config(cpu_operations="gloo"))
    assert "on several hosts" in text
    assert "--cpu-operations" not in text


def test_ranks_that_cannot_share_memory_are_told_why(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planes, "_shared_memory", lambda *_: (None, "no memfd_create"))
    text = _refused(Config(), Config(), hosts=1)
    assert text.startswith("ranks that cannot share memory need Gloo (no memfd_create), and where rank 0 runs neither")


def test_a_choice_without_effect_is_remarked_on(installed: set[str]) -> None:
    assert idle_provider("auto") == ""
    said = idle_provider("pygloo")
    assert said.startswith("HVDGLOO_GLOO_PROVIDER=pygloo (--gloo-provider) has no effect here")
    assert "pygloo is not installed" in said
    installed.add("pygloo")
    assert idle_provider("pygloo") == ""


@pytest.mark.parametrize("package", ["torch", "pygloo"])
def test_check_build_shows_which(installed: set[str], package: str) -> None:
    if package == "pygloo":  # else torch is asked for NCCL
        installed.add(package)
    table = build_table()
    here = "X" if package == "pygloo" else " "
    assert f"    [{here}] Gloo\n    [X] Shared memory (between ranks of one host)\n" in table
    assert table.endswith(f"Available Gloo Providers:\n    [ ] torch\n    [{here}] pygloo\n")


@pytest.mark.parametrize("size", range(1, 10))
def test_every_two_ranks_meet_once_in_the_same_round(size: int) -> None:
    """If all go through their rounds in order, no rank waits for another that waits for a third."""
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
