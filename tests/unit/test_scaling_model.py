"""The arithmetic of benchmarks/scaling.py: limits that follow without a calculator, and what must grow with what."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hvdgloo._job import links

PROGRAM = Path(__file__).parents[2] / "benchmarks/scaling.py"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.modules["scaling"] = module  # where dataclasses look for annotations
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
        del sys.modules["scaling"]
    return module


def test_a_curve_is_read_between_its_points(model: ModuleType) -> None:
    curve = ((0.2, 0.6), (1, 1))
    assert [model.ready(curve, share) for share in (0, 0.3, 0.6, 0.8, 1)] == pytest.approx([0, 0.1, 0.2, 0.6, 1])


def test_one_rank_only_computes(model: ModuleType) -> None:
    costs = model.Costs(1e-3, 1e-3, 1e-3, 1e-3, 1e-9)
    for network in model.NETWORKS.values():
        assert model.efficiency(network, model.Cluster(1, 4, 1e6), costs) == 1


def test_a_slow_wire_takes_what_its_bytes_take(model: ModuleType) -> None:
    """Two hosts send each byte once; nothing else costs anything here."""
    nothing = model.Costs(0, 0, 0, 0, 0)
    cluster = model.Cluster(2, 1, 1e6, latency=0, jitter=0)
    assert model.queue([(0.0, 1e6), (0.5, 2e6)], cluster, nothing) == pytest.approx(3)
    assert model.queue([(0.0, 1e6), (5.0, 2e6)], cluster, nothing) == pytest.approx(7)


@pytest.mark.parametrize(
    ("hosts", "slots", "nbytes", "steps"),
    [
        pytest.param(128, 1, 1e6, 14, id="through the cube"),
        pytest.param(32, 1, 25e6, 62, id="a large tensor round the ring"),
        pytest.param(32, 4, 25e6, 10, id="its slices through the cube"),
        pytest.param(100, 1, 1e6, 14, id="ranks that speak for two"),
        pytest.param(100, 1, 25e6, 198, id="not where they are many bytes"),
        pytest.param(4, 1, 1e3, 6, id="few hosts have no cube"),
    ],
)
def test_the_way_between_hosts_is_the_one_that_gloo_takes(
    model: ModuleType, hosts: int, slots: int, nbytes: float, steps: int
) -> None:
    costs = model.Costs(0, 0, 1e-3, 1e-3, 0)
    cluster = model.Cluster(hosts * slots, slots, math.inf, latency=0)
    assert model.across(cluster, costs, nbytes) == pytest.approx(steps * 1e-3)


def test_hosts_in_pairs_receive_and_send_everything_once_more(model: ModuleType) -> None:
    nothing = model.Costs(0, 0, 0, 0, 0)
    assert model.across(model.Cluster(64, 1, 1e6, latency=0), nothing, 1e6) == pytest.approx(2 * 63 / 64)
    assert model.across(model.Cluster(65, 1, 1e6, latency=0), nothing, 1e6) == pytest.approx(2 * 63 / 64 + 1)


def test_a_tree_begins_where_the_engine_s_does(model: ModuleType) -> None:
    assert model.TREE_FROM_HOSTS == links._FEWEST_HOSTS


def test_cores_that_hosts_share_take_turns(model: ModuleType) -> None:
    costs = model.Costs(1e-3, 0, 1e-3, 1e-3, 0)
    alone, shared = (model.Cluster(4, 1, math.inf, latency=0, share=share) for share in (0.5, 3.0))
    assert model.across(shared, costs, 1.0) == pytest.approx(3 * model.across(alone, costs, 1.0))
    assert model.agreement(shared, costs) == pytest.approx(3 * model.agreement(alone, costs))


def test_the_tree_grows_by_its_levels(model: ModuleType) -> None:
    """A star's agreement grows with its ranks, a tree's with its levels: 16 children each, of hosts with one rank."""
    costs = model.Costs(1e-3, 1e-4, 0, 0, 0)

    def took(ranks: int) -> float:
        return float(model.agreement(model.Cluster(ranks, 1, 1.0, latency=0), costs))

    assert took(32) == pytest.approx(1e-3 + 30e-4)
    one, two, three = 1 + 16, 1 + 16 + 256, 1 + 16 + 256 + 4096
    assert took(two) == pytest.approx(2e-3 + 16e-4)
    assert took(two) == took(one + 100)
    assert took(three) == pytest.approx(3e-3 + 16e-4)


def test_what_is_worse_never_makes_a_step_faster(model: ModuleType) -> None:
    costs = model.Costs(1e-4, 2e-5, 2e-4, 2e-4, 3e-10)
    for network in model.NETWORKS.values():
        found = [model.efficiency(network, model.Cluster(ranks, 4, 1e9), costs) for ranks in (1, 8, 32, 128, 1024)]
        assert found == sorted(found, reverse=True)
        cluster = model.Cluster(64, 4, 1e9)
        base = model.step(network, cluster, costs)
        for worse in (replace(cluster, rate=5e8), replace(cluster, jitter=0.1), replace(cluster, memory=1e9)):
            assert model.step(network, worse, costs) > base


def test_every_number_says_where_it_comes_from(
    model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "measure", lambda: model.Costs(1e-4, 2e-5, 2e-4, 2e-4, 3e-10, 2e-3, 1e-3))
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--json", str(tmp_path / "found.json")])
    model.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"measured", "assumed", "predicted", "published"}
    assert found["published"] == {"ResNet-101": 0.9, "Inception V3": 0.9, "VGG-16": 0.68}
    assert set(found["predicted"]) == set(model.NETWORKS)
    for by_rate in found["predicted"].values():
        assert list(by_rate) == ["1", "10", "25", "100"]
        for cells in by_rate.values():
            assert list(cells) == [str(ranks) for ranks in model.RANKS]
    kinds = [line.split()[0].rstrip(":,") for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert kinds == ["measured", "assumed", "predicted", "predicted"]


@pytest.mark.parametrize(("rate", "found"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates_as_tc_spells_them(model: ModuleType, rate: str, found: float) -> None:
    assert model.bits(rate) == found
