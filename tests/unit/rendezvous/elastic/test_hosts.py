"""Hosts of an elastic job that are parts of one machine: each has an agent, together they are a host of an epoch."""

from __future__ import annotations

from hvdgloo.rendezvous._elastic.hosts import Hosts
from hvdgloo.rendezvous._membership.assignment import Candidate, choose
from hvdgloo.runner.elastic_launch import _slots


def candidate(name: str, rank: int | None, place: int, machine: str = "") -> Candidate:
    return Candidate(f"{name}/0/1", name, 0, rank, (place, 0), machine=machine)


def test_parts_of_one_machine_have_consecutive_ranks_and_local_ranks() -> None:
    assignment = choose(
        1,
        [
            candidate("a(1)", 0, 0, "a"),
            candidate("b(1)", 1, 1, "b"),
            candidate("a(2)", None, 2, "a"),
            candidate("b(2)", None, 3, "b"),
        ],
    )
    assert [member.host for member in assignment.members] == ["a(1)", "a(2)", "b(1)", "b(2)"]
    assert [member.local_rank for member in assignment.members] == [0, 1, 0, 1]
    assert assignment.slots == (("a", 2), ("b", 2))
    slots = _slots(assignment)
    assert [(slot.hostname, slot.local_size, slot.cross_rank, slot.cross_size) for slot in slots] == [
        ("a", 2, 0, 2),
        ("a", 2, 0, 2),
        ("b", 2, 1, 2),
        ("b", 2, 1, 2),
    ]
    assert [slot.agent for slot in slots] == ["a(1)", "a(2)", "b(1)", "b(2)"]


def test_a_host_without_a_machine_is_one_by_itself() -> None:
    assignment = choose(1, [candidate("a", None, 0), candidate("b", None, 1)])
    assert assignment.slots == (("a", 1), ("b", 1))


def test_machines_are_as_they_were_listed_last() -> None:
    hosts = Hosts(1, None, lambda: 0.5)
    hosts.update([("a(1)", 1), ("b", 1)], {"a(1)": "a"})
    assert [hosts.machine(name) for name in ("a(1)", "b", "unknown")] == ["a", "", ""]
