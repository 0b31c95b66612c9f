"""The arithmetic of benchmarks/scaling.py: limits that follow without a calculator, and what must grow with what."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._job import control_plane
from tests.support.pages import ROOT

FOLDER = ROOT / "benchmarks"
MODULES = ("scaling", "scaling_model", "scaling_pieces")


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    """The program, which finds its other modules beside itself."""
    pytest.importorskip("torch")  # whose Gloo the model is of
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("scaling")
    finally:
        sys.path[:] = path
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(program: ModuleType) -> ModuleType:
    return sys.modules["scaling_model"]


def costs_of(model: ModuleType, **some: float) -> Any:
    """Costs, of which those that are not given are nothing."""
    names = ("agreement", "member", "message", "ring", "ring_byte", "exchange", "byte", "peer", "meeting")
    return model.Costs(**{**dict.fromkeys(names, 0.0), **some})


def test_a_curve_is_read_between_its_points(model: ModuleType) -> None:
    curve = ((0.2, 0.6), (1, 1))
    assert [model.ready(curve, share) for share in (0, 0.3, 0.6, 0.8, 1)] == pytest.approx([0, 0.1, 0.2, 0.6, 1])


def test_one_rank_only_computes(model: ModuleType) -> None:
    costs = costs_of(model, agreement=1e-3, message=1e-3, ring=1e-3, byte=1e-9)
    for network in model.NETWORKS.values():
        assert model.efficiency(network, model.Cluster(1, 4, 1e6), costs) == 1


def test_a_slow_wire_takes_what_its_bytes_take(model: ModuleType) -> None:
    """Two hosts send each byte once; nothing else costs anything here."""
    nothing = costs_of(model)
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
        pytest.param(4, 1, 1e6, 6, id="few hosts have no cube"),
        pytest.param(128, 1, 1e3, 7, id="what is small goes whole to each neighbour"),
        pytest.param(4, 2, 1e3, 3, id="or among few leaders to all at once"),
    ],
)
def test_the_way_between_hosts_is_the_one_that_gloo_takes(
    model: ModuleType, hosts: int, slots: int, nbytes: float, steps: int
) -> None:
    costs = costs_of(model, ring=1e-3, exchange=1e-3, peer=1e-3)
    cluster = model.Cluster(hosts * slots, slots, math.inf, latency=0)
    assert model.across(cluster, costs, nbytes) == pytest.approx(steps * 1e-3)


def test_hosts_in_pairs_receive_everything_first_and_send_it_afterwards(model: ModuleType) -> None:
    nothing = costs_of(model)
    assert model.across(model.Cluster(64, 1, 1e6, latency=0), nothing, 1e6) == pytest.approx(2 * 63 / 64)
    assert model.across(model.Cluster(65, 1, 1e6, latency=0), nothing, 1e6) == pytest.approx(2 * 63 / 64 + 2)


def test_a_tree_begins_where_the_engine_s_does(model: ModuleType) -> None:
    assert model.TREE_FROM_HOSTS == control_plane._FEWEST_HOSTS


def test_a_small_tensor_travels_once_in_each_dimension(model: ModuleType) -> None:
    """1 KiB goes whole to each of the 3 neighbours; 1 MiB in halves, and back."""
    cluster, nothing = model.Cluster(8, 1, 1e6, latency=0), costs_of(model)
    assert model.across(cluster, nothing, 1024) == pytest.approx(3 * 1024 / 1e6)
    assert model.across(cluster, nothing, 1 << 20) == pytest.approx(2 * 7 / 8 * (1 << 20) / 1e6)


def test_processors_that_ranks_share_take_turns(model: ModuleType) -> None:
    costs = costs_of(model, agreement=2e-3, member=1e-3, ring=1e-3, peer=1e-3, meeting=1e-3)
    alone, shared = (model.Cluster(8, 2, math.inf, latency=0, processors=number) for number in (8, 2))
    assert model.across(shared, costs, 1 << 20) == pytest.approx(4 * model.across(alone, costs, 1 << 20))
    assert model.across(shared, costs, 8) == pytest.approx(2 * model.across(alone, costs, 8)), "4 leaders"
    assert model.within(shared, costs, 8) == pytest.approx(4 * model.within(alone, costs, 8))
    assert model.agreement(alone, costs) == pytest.approx(2e-3)
    assert model.agreement(shared, costs) == pytest.approx(2e-3 + 3e-3), "what they wait for is no longer"


def test_agreements_take_processors_from_what_is_under_way(model: ModuleType) -> None:
    """The second bucket is ready while the first one is on its way; both agreements and both transfers are work."""
    costs = costs_of(model, agreement=1e-3, member=1e-3, peer=5e-3)
    shared = model.Cluster(4, 1, math.inf, latency=0, processors=1)
    assert model.queue([(0.0, 8), (0.05, 8)], shared, costs) == pytest.approx(4e-3 + 60e-3 + 3e-3 + 60e-3)
    assert model.queue([(0.0, 8), (0.10, 8)], shared, costs) == pytest.approx(0.1 + 4e-3 + 60e-3), "one by one"
    own = replace(shared, processors=math.inf)
    assert model.queue([(0.0, 8), (0.01, 8)], own, costs) == pytest.approx(1e-3 + 15e-3 + 15e-3)


PIECES = st.floats(0, 1e-3)
CLUSTERS = st.tuples(st.integers(1, 12), st.integers(1, 4), st.sampled_from([1e7, 1e9, math.inf]))


@given(CLUSTERS, st.lists(PIECES, min_size=5, max_size=5), st.integers(1, 8), st.floats(1, 1e8))
def test_a_step_is_never_shorter_than_its_work(
    model: ModuleType, shape: tuple[int, int, float], pieces: list[float], processors: int, nbytes: float
) -> None:
    """All ranks' processor time, divided by the processors, and whatever they wait for come besides, or more."""
    hosts, slots, rate = shape
    exchange, ring, peer, member, meeting = pieces
    costs = costs_of(model, exchange=exchange, ring=ring, peer=peer, agreement=member, member=member, meeting=meeting)
    many = model.Cluster(hosts * slots, slots, rate, processors=processors)
    own = replace(many, processors=math.inf)
    took, alone = model.queue([(0.0, nbytes)], many, costs), model.queue([(0.0, nbytes)], own, costs)
    assert took >= alone
    assert took >= model.within(own, costs, nbytes) * many.ranks / processors * (1 - 1e-9)
    if processors >= many.ranks:
        assert took == alone, "it is the same formula for a cluster"


def test_a_link_lets_pass_at_once_what_it_has_saved_up(model: ModuleType) -> None:
    nothing = costs_of(model)
    cluster = model.Cluster(8, 1, 1e6, latency=0, burst=1e5)
    plain = replace(cluster, burst=0)
    assert model.across(cluster, nothing, 1e6) == pytest.approx(model.across(plain, nothing, 1e6) - 0.1)
    assert model.across(cluster, nothing, 1e4) == 0, "less than it has saved"
    # Where the processors need longer, it saves up meanwhile; what they need is all that it takes.
    slow = costs_of(model, byte=2e-6)
    assert model.across(cluster, slow, 1e6) == pytest.approx(2e-6 * 2 * 7 / 8 * 1e6)
    wire = model.Wire(1e6, 1e5, 0.0)
    wire.rest(0.05)
    assert wire.send(1e5) == pytest.approx(0.05)
    wire.rest(10.0)
    assert wire.send(3e5) == pytest.approx(0.2)


def test_a_link_that_is_never_idle_saves_nothing_up(model: ModuleType) -> None:
    """Two hosts send each byte once. The second bucket waits for the first, or comes after a pause."""
    cluster = model.Cluster(2, 1, 1e6, latency=0, burst=1e5)
    nothing = costs_of(model)
    assert model.queue([(0.0, 1e6), (0.5, 1e6)], cluster, nothing) == pytest.approx(2 - 0.1)
    assert model.queue([(0.0, 1e6), (5.0, 1e6)], cluster, nothing) == pytest.approx(5 + 0.9)
    assert model.queue([(0.0, 1e6), (0.95, 1e6)], cluster, nothing) == pytest.approx(0.95 + 1 - 0.05)


@pytest.mark.parametrize(("form", "share"), [("full", 1), ("bf16", 1 / 2), ("int8", 260 / 1024), ("int4", 36 / 256)])
@pytest.mark.parametrize("hosts", [2, 4, 8, 64])
def test_encoded_values_take_fewer_bytes_on_a_wire(model: ModuleType, form: str, share: float, hosts: int) -> None:
    free = replace(costs_of(model), codec={form: (0.0, 0.0)})
    cluster = model.Cluster(hosts, 1, 1e6, latency=0, form=form)
    assert model.across(cluster, free, 25e6) == pytest.approx(2 * (hosts - 1) / hosts * 25 * share)
    small = model.ENCODED_FROM - 4
    assert model.across(cluster, free, small) == model.across(replace(cluster, form="full"), free, small)


@pytest.mark.parametrize(
    ("hosts", "encoded", "decoded"),
    [
        pytest.param(2, 1, 1.5, id="each value once, and back; the own sum as well"),
        pytest.param(4, 1, 1.75, id="a few hosts"),
        pytest.param(8, 7 / 8 + 1 / 8, 7 / 8 + 1, id="pairs of hosts, and every sum at the end"),
        pytest.param(9, 1 + 7 / 8 + 1 / 8, 1 + 7 / 8 + 1, id="and the host that speaks for two"),
    ],
)
def test_what_is_encoded_and_decoded_is_work(model: ModuleType, hosts: int, encoded: float, decoded: float) -> None:
    cluster = model.Cluster(hosts, 1, math.inf, latency=0, form="int8")
    for codec, times in (((1e-9, 0.0), encoded), ((0.0, 1e-9), decoded)):
        costs = replace(costs_of(model), codec={"int8": codec})
        assert model.across(cluster, costs, 25e6) == pytest.approx(times * 25e-3)


def test_the_tree_grows_by_its_levels(model: ModuleType) -> None:
    """A star's agreement grows with its ranks, a tree's with its levels: 16 children each, of hosts with one rank."""
    costs = costs_of(model, agreement=1e-3, message=1e-4)

    def took(ranks: int) -> float:
        return float(model.agreement(model.Cluster(ranks, 1, 1.0, latency=0), costs))

    assert took(32) == pytest.approx(1e-3 + 30e-4)
    one, two, three = 1 + 16, 1 + 16 + 256, 1 + 16 + 256 + 4096
    assert took(two) == pytest.approx(2e-3 + 16e-4)
    assert took(two) == took(one + 100)
    assert took(three) == pytest.approx(3e-3 + 16e-4)


def test_what_is_worse_never_makes_a_step_faster(model: ModuleType) -> None:
    costs = costs_of(model, agreement=1e-4, message=2e-5, ring=2e-4, exchange=2e-4, ring_byte=3e-10, byte=3e-10)
    for network in model.NETWORKS.values():
        found = [model.efficiency(network, model.Cluster(ranks, 4, 1e9), costs) for ranks in (1, 8, 32, 128, 1024)]
        assert found == sorted(found, reverse=True)
        cluster = model.Cluster(64, 4, 1e9)
        base = model.step(network, cluster, costs)
        for worse in (replace(cluster, rate=5e8), replace(cluster, jitter=0.1), replace(cluster, memory=1e9)):
            assert model.step(network, worse, costs) > base


def test_every_number_says_where_it_comes_from(
    program: ModuleType,
    model: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    costs = costs_of(model, agreement=1e-4, exchange=2e-4, byte=3e-10, agent=2e-3, worker=1e-3)
    costs = replace(costs, codec=dict.fromkeys(("bf16", "int8", "int4"), (3e-10, 2e-10)))
    monkeypatch.setattr(program, "measure", lambda: costs)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--json", str(tmp_path / "found.json")])
    program.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"measured", "assumed", "predicted", "predicted by wire", "published"}
    assert found["published"] == {"ResNet-101": 0.9, "Inception V3": 0.9, "VGG-16": 0.68}
    assert set(found["predicted"]) == set(model.NETWORKS)
    for by_rate in found["predicted"].values():
        assert list(by_rate) == ["1", "10", "25", "100"]
        for cells in by_rate.values():
            assert list(cells) == [str(ranks) for ranks in program.RANKS]
    kinds = [line.split()[0].rstrip(":,") for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert kinds == ["measured", "assumed", "predicted", "predicted", "predicted"]
    for by_rate in found["predicted by wire"].values():
        for forms in by_rate.values():
            assert list(forms) == ["full", "bf16", "int8", "int4"]
            assert all(list(cells) == ["4", "8", "16", "32", "64"] for cells in forms.values())
    slow = found["predicted by wire"]["VGG-16"]["1"]
    assert slow["int4"]["8"] > slow["int8"]["8"] > slow["bf16"]["8"] > slow["full"]["8"], "bytes are what counts"


@pytest.mark.parametrize(("rate", "found"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates_as_tc_spells_them(program: ModuleType, rate: str, found: float) -> None:
    assert program.bits(rate) == found


def test_pieces_that_were_measured_elsewhere_are_refused(
    program: ModuleType, model: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step on this machine's hosts is not put together from pieces over loopback, nor the other way round."""
    found = tmp_path / "found.json"
    monkeypatch.setattr(program, "measure", lambda: costs_of(model))
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--json", str(found)])
    program.main()
    monkeypatch.setattr("tests.support.hosts.available", lambda: "")
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--validate", "--measured", str(found)])
    with pytest.raises(SystemExit, match="its pieces were measured elsewhere"):
        program.main()


@pytest.mark.parametrize(("crowd", "hosts"), [("ALONE", 2), ("CROWDED", 8)])
def test_all_pieces_come_from_jobs_of_their_own(program: ModuleType, crowd: str, hosts: int) -> None:
    """Each piece is tested where every figure of a job is known."""
    asked = []

    class Counted:
        def run(self, argv: list[str], hosts: int, slots: int) -> None:
            _, _, case, result = argv
            asked.append((case, hosts, slots))
            found = {"elapsed": 5.0, "used": 2.0, "busy": 3.0 + hosts}
            for way in ("cube", "ring", "at_once", "slices"):
                found.update({f"{way}_small_used": hosts, f"{way}_large_used": 1e3 * hosts, f"{way}_small_elapsed": 9})
            Path(result).write_text(json.dumps(found))

    pieces = program.scaling_pieces
    few, pairs, dimensions = (2, 1, 1) if crowd == "ALONE" else (4, 8, 3)
    costs, latency, memory = pieces.measure(Counted(), getattr(pieces, crowd))
    sent = 2 * (hosts - 1) / hosts * pieces.LARGE
    assert (costs.agreement, costs.member, costs.message) == (5, 2, 1)
    assert costs.ring == pytest.approx(hosts / (2 * (hosts - 1)))
    assert costs.ring_byte == pytest.approx(999 * hosts / sent)
    assert costs.exchange == pytest.approx(hosts / dimensions)
    assert costs.byte == pytest.approx((1000 - 2) * hosts / sent)
    assert costs.peer == pytest.approx(few / (few - 1))
    assert costs.meeting == pairs / 2
    assert latency == 9 - 2
    assert memory == pytest.approx(pieces.LARGE / (999 * pairs))
    jobs = {("agreements", 2, 1), ("agreements", 6, 1), ("hosts", 2, 1), ("hosts", few, 1), ("hosts", hosts, 1)}
    assert set(asked) == jobs | {("memory", pairs, 2)}
