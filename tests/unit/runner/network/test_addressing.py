"""The choice of addresses: a pure function of the reports. Pains 7, 8, 9, 13 and 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdgloo.errors import HostsUnreachableError
from hvdgloo.runner.network.addressing import (
    ALL_PAIRS,
    NEIGHBOURS,
    Placement,
    Reports,
    choose,
    describe,
    explain,
    plan,
    settled,
    tried,
)
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import LAUNCHER, Answer, ProbeResult

Key = tuple[int, int, str]
REACHED = Answer(ProbeResult.REACHED)


def lan(nic: str, network: str, host: int) -> Address:
    """``lan("eth0", "10.0.0", 1)`` is 10.0.0.1/24, ``lan("eth0", "fd00::", 1)`` fd00::1/64."""
    return Address(nic, f"{network}{host}", 64) if ":" in network else Address(nic, f"{network}.{host}", 24)


def reports(
    candidates: Sequence[Sequence[Address]],
    *,
    launcher: Sequence[Address] = (),
    reach: Mapping[Key, bool] | None = None,
) -> Reports:
    """Every host reaches every address, from an address in the same network if there is one, but for ``reach``."""
    names = [f"h{number + 1}" for number in range(len(candidates))]
    made = Reports(names, candidates, launcher)
    answers = {}
    for source, target, address in tried(made):
        if (reach or {}).get((source, target, address.address), True):
            own = [a.address for a in candidates[source] if a.network == address.network]
            answers[source, target, address.address] = Answer(ProbeResult.REACHED, own[0] if own else "", target)
        else:
            answers[source, target, address.address] = Answer(ProbeResult.TIMED_OUT, detail="3")
    return replace(made, answers=answers)


def addresses(placement: Placement | None) -> list[str]:
    assert placement is not None
    return [address.address for address in placement.addresses]


class TestPlan:
    def test_all_pairs_both_ways(self) -> None:
        assert plan(3) == ((1, 2), (0, 2), (0, 1))
        assert all(len(targets) == ALL_PAIRS - 1 for targets in plan(ALL_PAIRS))

    def test_above_that_neighbours_and_the_first(self) -> None:
        count = ALL_PAIRS + 8
        made = plan(count)
        assert made[0] == tuple(range(1, count))
        assert made[5] == (0, 6, 7, 8, 9)
        assert made[count - 2] == (0, 1, 2, count - 1)
        assert all(len(targets) <= NEIGHBOURS + 1 for targets in made[1:])

    @given(st.integers(1, 100))
    def test_no_host_tries_itself_and_every_host_is_tried(self, count: int) -> None:
        made = plan(count)
        assert not any(host in targets for host, targets in enumerate(made))
        assert {target for targets in made for target in targets} == (set(range(count)) if count > 1 else set())


class TestChoice:
    def test_pain_7_names_of_nics_mean_nothing(self) -> None:
        hosts = [[lan("eth0", "10.0.0", 1)], [lan("enp3s0", "10.0.0", 2)], [lan("ib0", "10.0.0", 3)]]
        found = choose(reports(hosts, launcher=[lan("wlan0", "10.0.0", 9)]))
        assert found == Placement(tuple(host[0] for host in hosts), ("10.0.0.9",) * 3)

    def test_an_address_that_a_host_does_not_reach_is_not_used(self) -> None:
        hosts = [[lan("priv0", f"10.20{n}.0", 1), lan("eth0", "10.0.0", n)] for n in (1, 2, 3)]
        reach = {(source, target, f"10.20{target + 1}.0.1"): False for source in range(3) for target in range(3)}
        assert addresses(choose(reports(hosts, reach=reach))) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]

    def test_one_that_only_one_host_does_not_reach_neither(self) -> None:
        hosts = [[lan("a", "10.1.0", n), lan("b", "10.2.0", n)] for n in (1, 2, 3)]
        found = choose(reports(hosts, reach={(2, 0, "10.1.0.1"): False}))
        assert addresses(found) == ["10.2.0.1", "10.2.0.2", "10.2.0.3"]

    def test_the_address_from_which_hosts_reach_the_launcher_goes_first(self) -> None:
        hosts = [[lan("eth0", "10.1.0", n), lan("eth1", "10.2.0", n)] for n in (1, 2)]
        found = choose(reports(hosts, launcher=[lan("eth0", "10.2.0", 9)]))
        assert addresses(found) == ["10.2.0.1", "10.2.0.2"]

    def test_one_network_for_all_before_each_host_s_first(self) -> None:
        hosts = [
            [lan("eth0", "10.1.0", 1), lan("eth1", "10.2.0", 1)],
            [lan("eth0", "10.2.0", 2), lan("eth1", "10.1.0", 2)],
        ]
        assert addresses(choose(reports(hosts))) == ["10.1.0.1", "10.1.0.2"]

    def test_hosts_in_different_networks_that_a_router_joins(self) -> None:
        hosts = [[lan("eth0", "10.1.0", 1)], [lan("eth0", "10.2.0", 1)]]
        assert addresses(choose(reports(hosts))) == ["10.1.0.1", "10.2.0.1"]

    def test_pain_13_ipv4_before_ipv6(self) -> None:
        hosts = [[lan("eth0", "fd00::", n), lan("eth0", "10.0.0", n)] for n in (1, 2)]
        assert addresses(choose(reports(hosts))) == ["10.0.0.1", "10.0.0.2"]

    def test_pain_13_ipv6_if_one_host_has_nothing_else(self) -> None:
        hosts = [[lan("eth0", "10.0.0", 1), lan("eth0", "fd00::", 1)], [lan("eth0", "fd00::", 2)]]
        assert addresses(choose(reports(hosts, launcher=hosts[0]))) == ["fd00::1", "fd00::2"]

    def test_pain_13_no_mixture(self) -> None:
        hosts = [[lan("eth0", "10.0.0", 1)], [lan("eth0", "fd00::", 2)]]
        assert choose(reports(hosts)) is None
        text = str(explain(reports(hosts)))
        assert "a job uses either IPv4 or IPv6" in text
        assert "  h1 is reached by IPv4 alone: 10.0.0.1 (eth0)\n" in text
        assert "  h2 is reached by IPv6 alone: fd00::2 (eth0)\n" in text

    def test_without_an_address_of_the_launcher_that_all_reach_each_host_has_the_first_that_it_reaches(self) -> None:
        hosts = [[lan("eth0", "10.0.0", n)] for n in (1, 2, 3)]
        launcher = [lan("tun0", "fd00::", 9), lan("wlan0", "192.168.1", 9), lan("eth0", "10.0.0", 9)]
        missed = {
            (1, LAUNCHER, "192.168.1.9"): False,
            (1, LAUNCHER, "10.0.0.9"): False,
            (2, LAUNCHER, "192.168.1.9"): False,
            (2, LAUNCHER, "10.0.0.9"): False,
            (2, LAUNCHER, "fd00::9"): False,
        }
        found = choose(reports(hosts, launcher=launcher, reach=missed))
        # The third one's agent relays its workers' connections.
        assert found == Placement(tuple(host[0] for host in hosts), ("10.0.0.9", "fd00::9", ""))

    def test_shared_addresses_and_link_local_ones_go_last(self) -> None:
        docker = Address("docker0", "172.17.0.1", 16)
        link = Address("eth9", "169.254.3.4", 16)
        hosts = [[link, docker, lan("eth0", "10.0.0", n)] for n in (1, 2)]
        assert addresses(choose(reports(hosts))) == ["10.0.0.1", "10.0.0.2"]

    def test_an_address_without_a_listener_is_not_used(self) -> None:
        hosts = [[lan("a", "10.1.0", n), lan("b", "10.2.0", n)] for n in (1, 2)]
        made = replace(reports(hosts), unheard={(1, "10.1.0.2"): "no port"})
        assert addresses(choose(made)) == ["10.2.0.1", "10.2.0.2"]

    def test_a_thousand_hosts_are_no_matter(self) -> None:
        hosts = [[Address("eth0", f"10.0.{n // 250}.{n % 250 + 1}", 16)] for n in range(1000)]
        assert addresses(choose(reports(hosts, launcher=[Address("eth0", "10.0.9.9", 16)])))[-1] == "10.0.3.250"


ADDRESSES = st.lists(
    st.builds(
        lambda network, host: lan(f"nic{network}", network, host),
        st.sampled_from(["10.1.0", "10.2.0", "172.17.0", "fd01::", "169.254.1"]),
        st.integers(1, 3),
    ),
    unique_by=lambda a: a.address,
    min_size=1,
    max_size=4,
)


@st.composite
def made_reports(draw: st.DrawFn) -> tuple[Reports, list[Key]]:
    """Reports, and the keys of their answers in a random order."""
    candidates = draw(st.lists(ADDRESSES, min_size=2, max_size=4))
    made = Reports([f"h{n}" for n in range(len(candidates))], candidates, draw(st.just([]) | ADDRESSES))
    outcomes = st.sampled_from([ProbeResult.REACHED] * 4 + [ProbeResult.TIMED_OUT, ProbeResult.OTHER_HOST])
    answers = {}
    for source, target, address in tried(made):
        own = draw(st.sampled_from([a.address for a in candidates[source]]))
        answers[source, target, address.address] = Answer(draw(outcomes), own, target)
    return replace(made, answers=answers), draw(st.permutations(list(answers)))


@settings(max_examples=150, deadline=None)
@given(made_reports())
def test_what_is_chosen_was_reached_by_all_who_tried(given_: tuple[Reports, list[Key]]) -> None:
    made, _ = given_
    found = choose(made)
    if found is None:
        return
    assert len({address.version for address in found.addresses}) == 1
    for target, address in enumerate(found.addresses):
        assert address in made.candidates[target]
        for source, targets in enumerate(plan(len(made.names))):
            if target in targets:
                assert made.answers[source, target, address.address].outcome is ProbeResult.REACHED
    reached = [
        {a.address for a in made.launcher if made.answers[source, LAUNCHER, a.address].outcome is ProbeResult.REACHED}
        for source in range(len(made.names))
    ]
    assert all(own in known if known else not own for own, known in zip(found.launcher, reached, strict=True))
    common = {a.address for a in made.launcher if a.version == found.addresses[0].version}.intersection(*reached)
    assert not common or (len(set(found.launcher)) == 1 and found.launcher[0] in common)


@settings(max_examples=150, deadline=None)
@given(made_reports())
def test_there_is_a_choice_whenever_there_can_be_one(given_: tuple[Reports, list[Key]]) -> None:
    made, _ = given_
    possible = any(
        all(
            any(
                address.version == version
                and all(
                    made.answers[source, target, address.address].outcome is ProbeResult.REACHED
                    for source in range(len(made.names))
                    if source != target
                )
                for address in addresses_
            )
            for target, addresses_ in enumerate(made.candidates)
        )
        for version in (4, 6)
    )
    assert (choose(made) is not None) == possible
    if not possible:
        error = explain(made)
        assert error.pairs or " alone: " in str(error)
        for source, target in error.pairs[:6]:
            assert f"{source} -> {target}: " in str(error)


@settings(max_examples=150, deadline=None)
@given(made_reports())
def test_the_order_of_answers_does_not_matter_and_settled_means_settled(given_: tuple[Reports, list[Key]]) -> None:
    made, order = given_
    final = choose(made)
    arrived: dict[Key, Answer] = {}
    decided: list[Placement | None] = []
    for key in order:
        arrived[key] = made.answers[key]
        partial = replace(made, answers=dict(arrived))
        if decided or settled(partial):
            decided.append(choose(partial))
    assert choose(replace(made, answers=arrived)) == final
    assert all(choice == final for choice in decided)


class TestExplanations:
    def test_pain_14_the_pair_the_addresses_and_what_each_answered(self) -> None:
        hosts = [
            [lan("eth0", "10.0.0", 1), Address("docker0", "172.17.0.1", 16)],
            [lan("eth0", "10.0.0", 2), Address("docker0", "172.17.0.1", 16)],
        ]
        made = reports(hosts)
        answers = {
            **made.answers,
            (0, 1, "10.0.0.2"): Answer(ProbeResult.REFUSED),
            (0, 1, "172.17.0.1"): Answer(ProbeResult.OTHER_HOST, "172.17.0.1", 0),
        }
        error = explain(replace(made, answers=answers))
        assert isinstance(error, HostsUnreachableError)
        assert error.pairs == (("h1", "h2"),)
        assert (
            "  h1 -> h2: 10.0.0.2 (eth0) refused the connection, "
            "172.17.0.1 (docker0) answered as another host, h1 (h1 has the same address)\n"
        ) in str(error)
        assert "--nics" in str(error)

    def test_many_pairs_are_not_all_told(self) -> None:
        hosts = [[lan("eth0", "10.0.0", n)] for n in range(1, 9)]
        made = reports(hosts, reach={(s, t, f"10.0.0.{t + 1}"): False for s in range(8) for t in range(8)})
        error = explain(made)
        assert len(error.pairs) == 56
        assert "and 50 more pairs" in str(error)
        assert len(str(error).splitlines()) == 9

    def test_an_answer_that_never_came(self) -> None:
        made = replace(reports([[lan("eth0", "10.0.0", 1)], [lan("eth0", "10.0.0", 2)]]), answers={})
        assert "h1 -> h2: 10.0.0.2 (eth0) was not answered" in str(explain(made))

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (Answer(ProbeResult.TIMED_OUT, detail="3"), "timed out after 3 s"),
            (Answer(ProbeResult.NO_ROUTE, detail="No route to host"), "has no route (No route to host)"),
            (Answer(ProbeResult.SILENT, detail="3"), "accepted the connection, but said nothing within 3 s"),
            (Answer(ProbeResult.STRANGER), "was answered by something that is not this job's"),
            (Answer(ProbeResult.OTHER_HOST, host=LAUNCHER), "answered as another host, the launcher"),
            (Answer(ProbeResult.OTHER_ADDRESS, detail="10.0.0.9"), "answered as 10.0.0.9, so addresses are translated"),
            (Answer(ProbeResult.FAILED, detail="Permission denied"), "failed (Permission denied)"),
        ],
    )
    def test_words(self, answer: Answer, words: str) -> None:
        assert describe(answer, ["h1"]).startswith(words)
