"""Workers in, ranks and topology out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hvdgloo.rendezvous._membership.admission import NotAcceptedError
from hvdgloo.rendezvous._membership.assignment import NO_MEMBERS, topology_of
from hvdgloo.rendezvous._membership.fixed import FixedMembership, State
from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.topology import Topology

HOSTS = (("h1", 2), ("h2", 1))


def info(**changes: Any) -> WorkerInfo:
    values: dict[str, Any] = {
        "rank": None,
        "index": None,
        "host_name": "h",
        "host_identity": "id",
        "address": "10.0.0.1",
        "port": 1,
        "pid": 2,
    }
    return WorkerInfo(**(values | changes))


def joined(membership: FixedMembership, *workers: WorkerInfo) -> FixedMembership:
    for number, worker in enumerate(workers):
        membership.join(f"client{number}", worker, 0.0)
    return membership


def topology(membership: FixedMembership) -> Topology:
    return topology_of(membership.assignment, membership.workers)


def ranks_by_client(membership: FixedMembership) -> list[int]:
    """The ranks of client0, client1, ..."""
    return [membership.assignment.ranks[f"client{number}"] for number in range(len(membership.assignment.ranks))]


@pytest.mark.parametrize(("fanins", "expected"), [((2, 3), 2), ((3, 2), 3), ((2, 0), 0), ((0, 2), 0)])
def test_rank_0_s_tree_is_every_rank_s_if_all_can_be_part_of_one(fanins: tuple[int, int], expected: int) -> None:
    workers = [
        info(rank=rank, host_identity=str(rank), control_fanin=fanin, control_tree_ranks=10 + rank)
        for rank, fanin in enumerate(fanins)
    ]
    built = topology(joined(FixedMembership(0, size=2), *reversed(workers)))
    assert (built.control_fanin, built.control_tree_ranks) == (expected, 10)
    assert built.restricted([1]).control_fanin == expected


class TestWithLauncher:
    def test_ranks_fill_hosts_in_order_no_matter_who_comes_first(self) -> None:
        membership = joined(
            FixedMembership(3, hosts=HOSTS),
            info(rank=2, host_identity="b", address="10.0.0.2", port=12, pid=102),
            info(rank=0, host_identity="a", port=10, pid=100),
            info(rank=1, host_identity="a", port=11, pid=101),
        )
        built = topology(membership)
        assert membership.assignment.ranks == {"client0": 2, "client1": 0, "client2": 1}
        assert built.epoch == 3
        assert [(h.name, h.identity, h.addresses) for h in built.hosts] == [
            ("h1", "a", ("10.0.0.1",)),
            ("h2", "b", ("10.0.0.2",)),
        ]
        assert [(w.rank, w.host, w.local_rank, w.port, w.pid) for w in built.workers] == [
            (0, 0, 0, 10, 100),
            (1, 0, 1, 11, 101),
            (2, 1, 0, 12, 102),
        ]

    def test_a_taken_slot(self) -> None:
        membership = joined(FixedMembership(0, hosts=HOSTS), info(rank=1, host_name="n7", pid=77))
        with pytest.raises(NotAcceptedError, match="rank 1 of epoch 0 is taken by pid 77 on host n7") as caught:
            membership.join("another", info(rank=1), 0.0)
        assert caught.value.taken
        assert membership.arrived == 1

    def test_a_process_that_a_worker_has_spawned_is_told_how_to_leave_the_job_alone(self) -> None:
        """A spawned data loader's worker imports the program again, with all that is in it."""
        membership = joined(FixedMembership(0, hosts=HOSTS), info(rank=1, host_name="n7", pid=77, host_identity="a"))
        itself = (
            r"started by rank 1 itself \(pid 77 on host n7\): .* put hvd.init\(\) under if __name__ == \"__main__\""
        )
        with pytest.raises(NotAcceptedError, match=itself) as caught:
            membership.join("another", info(rank=1, parent=77, host_identity="a"), 0.0)
        assert caught.value.taken
        with pytest.raises(NotAcceptedError, match="is taken by pid 77"):
            membership.join("another", info(rank=1, parent=77, host_identity="b"), 0.0)

    def test_so_is_one_that_would_be_a_worker_too_many(self) -> None:
        membership = joined(FixedMembership(0, size=1), info(pid=77))
        with pytest.raises(NotAcceptedError, match="started by a worker itself"):
            membership.join("another", info(parent=77), 0.0)

    def test_the_same_client_may_repeat_itself(self) -> None:
        membership = joined(FixedMembership(0, hosts=HOSTS), info(rank=1))
        membership.join("client0", info(rank=1), 0.0)
        assert membership.arrived == 1

    def test_the_same_client_as_another_worker(self) -> None:
        membership = joined(FixedMembership(0, hosts=HOSTS), info(rank=1))
        with pytest.raises(NotAcceptedError, match="as another worker"):
            membership.join("client0", info(rank=2), 0.0)

    def test_no_rank(self) -> None:
        with pytest.raises(NotAcceptedError, match="brings none"):
            FixedMembership(0, hosts=HOSTS).join("c", info(), 0.0)

    def test_a_rank_that_does_not_exist(self) -> None:
        with pytest.raises(NotAcceptedError, match="rank 3 does not exist: epoch 0 has 3 workers"):
            FixedMembership(0, hosts=HOSTS).join("c", info(rank=3), 0.0)

    def test_who_is_missing(self) -> None:
        """Pain 20."""
        membership = joined(FixedMembership(0, hosts=(("h1", 2), ("h2", 4), ("h3", 1))), info(rank=1), info(rank=3))
        assert membership.summary() == (
            "2 of 7 workers are in (hosts: h1 1 of 2, h2 1 of 4, h3 0 of 1); missing: rank 0, 2, 4-6"
        )

    def test_a_host_that_is_listed_twice(self) -> None:
        membership = joined(FixedMembership(0, hosts=(("h", 1), ("h", 1))), info(rank=0))
        assert membership.summary() == "1 of 2 workers are in (hosts: h 1 of 2); missing: rank 1"

    def test_workers_of_one_host_that_share_no_memory(self) -> None:
        workers = [info(rank=rank, host_identity=str(rank)) for rank in range(2)]
        assert topology(joined(FixedMembership(0, hosts=[("h", 2)]), *workers)).hosts[0].identity == ""


class TestWithoutLauncher:
    def test_hosts_in_order_of_first_arrival(self) -> None:
        membership = joined(
            FixedMembership(0, size=5),
            info(host_identity="b", host_name="hb"),
            info(host_identity="a", host_name="ha"),
            info(host_identity="b", host_name="hb"),
            info(host_identity="a", host_name="ha"),
            info(host_identity="b", host_name="hb"),
        )
        assert ranks_by_client(membership) == [0, 3, 1, 4, 2]
        assert [host.name for host in topology(membership).hosts] == ["hb", "ha"]
        assert topology(membership).slots == (3, 2)

    def test_the_lower_index_goes_first(self) -> None:
        membership = joined(
            FixedMembership(0, size=4),
            info(index=9, host_identity="a"),
            info(index=1, host_identity="b"),
            info(index=5, host_identity="a"),
            info(index=7, host_identity="b"),
        )
        assert ranks_by_client(membership) == [3, 0, 2, 1]

    def test_an_index_that_is_taken(self) -> None:
        membership = joined(FixedMembership(0, size=2), info(index=4))
        with pytest.raises(NotAcceptedError, match="index 4"):
            membership.join("another", info(index=4), 0.0)

    @pytest.mark.parametrize("other", [info(), info(rank=0)])
    def test_index_for_some_only(self, other: WorkerInfo) -> None:
        membership = joined(FixedMembership(0, size=2), info(index=4))
        with pytest.raises(NotAcceptedError, match="HVDGLOO_INDEX, for all workers or for none"):
            membership.join("another", other, 0.0)

    def test_ranks_that_workers_bring_are_kept(self) -> None:
        membership = joined(
            FixedMembership(0, size=2), info(rank=1, host_identity="b"), info(rank=0, host_identity="a")
        )
        assert ranks_by_client(membership) == [1, 0]

    def test_ranks_that_do_not_fill_hosts(self) -> None:
        workers = [info(rank=rank, host_identity=str(rank % 2), host_name=f"h{rank % 2}") for rank in range(4)]
        membership = joined(FixedMembership(0, size=4), *workers)
        assert membership.state is State.FAILED
        assert membership.failure.startswith("epoch 0 cannot start: rank 2 is on host h0, but ranks must fill hosts")
        assert "by that order it would be rank 1" in membership.failure

    def test_one_too_many(self) -> None:
        membership = joined(FixedMembership(0, size=1), info())
        with pytest.raises(NotAcceptedError, match="epoch 0 is complete: 1 of 1 worker is in"):
            membership.join("another", info(), 0.0)

    def test_one_that_left_before_the_start_makes_room(self) -> None:
        membership = joined(FixedMembership(0, size=2), info(index=0), info(index=1))
        assert not membership.leave("client0")  # complete: too late
        membership = joined(FixedMembership(0, size=3), info(index=0), info(index=1))
        assert membership.leave("client0")
        assert not membership.leave("client0")
        membership.join("new", info(index=0), 0.0)
        membership.join("third", info(index=2), 0.0)
        assert membership.assignment.ranks == {"new": 0, "client1": 1, "third": 2}

    @given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
    def test_whatever_the_order_ranks_fill_hosts(self, hosts: list[int]) -> None:
        workers = [info(host_identity=str(host), pid=number) for number, host in enumerate(hosts)]
        membership = joined(FixedMembership(0, size=len(hosts)), *workers)
        built = topology(membership)  # Topology validates the order
        assert sorted(membership.assignment.ranks.values()) == list(range(len(hosts)))
        assert [host.identity for host in built.hosts] == [str(host) for host in dict.fromkeys(hosts)]
        for number, host in enumerate(hosts):
            worker = built.workers[membership.assignment.ranks[f"client{number}"]]
            assert worker.pid == number
            assert built.hosts[worker.host].identity == str(host)

    @given(st.permutations(range(12)), st.lists(st.integers(0, 3), min_size=12, max_size=12))
    def test_with_an_index_arrival_does_not_matter(self, order: list[int], hosts: list[int]) -> None:
        membership = FixedMembership(0, size=12)
        for index in order:
            membership.join(str(index), info(index=index, host_identity=str(hosts[index])), 0.0)
        again = FixedMembership(0, size=12)
        for index in range(12):
            again.join(str(index), info(index=index, host_identity=str(hosts[index])), 0.0)
        assert topology(membership) == topology(again)
        assert membership.assignment.ranks == again.assignment.ranks


@pytest.mark.parametrize(
    "arguments", [{}, {"size": 2, "hosts": HOSTS}, {"size": 0}, {"hosts": ()}, {"hosts": [("h", 0)]}]
)
def test_memberships_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="epoch"):
        FixedMembership(0, **arguments)


class TestTime:
    """The time that an epoch's workers have to register: 10 seconds for the next one."""

    def test_it_starts_with_the_first_worker_that_stays(self) -> None:
        membership = FixedMembership(0, size=2, start_timeout=10.0)
        membership.join("goes away", info(), 0.0)
        assert membership.leave("goes away")
        assert membership.deadline == math.inf
        membership.join("a", info(), 9.0)
        membership.pass_time(18.0)
        membership.join("b", info(), 18.0)
        assert (membership.state, membership.gathered_in) == (State.COMPLETE, 9.0)

    def test_many_on_few_cores_start_however_late_each_registers(self) -> None:
        membership = FixedMembership(0, size=100, start_timeout=10.0)
        for number in range(100):
            membership.pass_time(9.9 * number)
            membership.join(f"worker {number}", info(), 9.9 * number)
            membership.join("worker 0", info(), 9.9 * number + 5)
            assert membership.idle(9.9 * number + 5) == pytest.approx(5), "asking again is no progress"
        assert membership.state is State.COMPLETE

    def test_one_that_is_restarted_again_and_again_keeps_no_other_waiting(self) -> None:
        membership = FixedMembership(0, size=100, start_timeout=10.0)
        membership.join("stays", info(), 0.0)
        for number in range(4):
            membership.join(f"restarted {number}", info(), 4.0 * (number + 1))
            membership.leave(f"restarted {number}")
        assert membership.deadline == 14.0
        membership.pass_time(14.0)
        assert "no further worker came for 10 s, and 1 of 100 workers are in" in membership.failure


class AnyWay(RuleBasedStateMachine):
    """Anything at any time, with and without a launcher: as for the elastic job, the invariants always hold."""

    @initialize(kind=st.sampled_from(["launcher", "rank", "index", ""]), size=st.integers(1, 4))
    def begin(self, kind: str, size: int) -> None:
        self.kind, self.size, self.now, self.clients = kind, size, 100.0, 0
        self.slots = [(f"h{host}", 1 + host % 2) for host in range(size)]
        if kind == "launcher":
            self.size = sum(slots for _, slots in self.slots)
        workers: dict[str, Any] = {"hosts": self.slots} if kind == "launcher" else {"size": size}
        self.membership = FixedMembership(0, start_timeout=10.0, **workers)
        self.before = State.GATHERING

    def told(self, number: int, host: int) -> WorkerInfo:
        rank = number % self.size if self.kind in ("launcher", "rank") else None
        return info(rank=rank, index=number if self.kind == "index" else None, host_identity=str(host), pid=number + 1)

    def gathers(self) -> bool:
        return self.membership.state is State.GATHERING

    @rule(number=st.integers(0, 7), host=st.integers(0, 2))
    def registers(self, number: int, host: int) -> None:
        told, known = self.told(number, host), dict(self.membership.workers)
        self.clients += 1
        if self.membership.state is State.FAILED:
            self.membership.join("too late", told, self.now)
            assert self.membership.workers == known
            return
        claims = {each.index if each.rank is None else each.rank for each in known.values()} - {None}
        if len(known) == self.size or (told.index if told.rank is None else told.rank) in claims:
            with pytest.raises(NotAcceptedError, match=r"taken by|is complete"):
                self.membership.join(f"client{self.clients}", told, self.now)
            assert self.membership.workers == known
        else:
            self.membership.join(f"client{self.clients}", told, self.now)
            assert self.membership.workers == {**known, f"client{self.clients}": told}

    @rule(choice=st.integers(0, 9), same=st.booleans())
    @precondition(lambda self: self.membership.workers and self.membership.state is not State.FAILED)
    def asks_again(self, choice: int, same: bool) -> None:
        client, told = list(self.membership.workers.items())[choice % len(self.membership.workers)]
        deadline = self.membership.deadline
        if same:
            self.membership.join(client, told, self.now)
        else:
            with pytest.raises(NotAcceptedError, match="as another worker"):
                self.membership.join(client, dataclasses.replace(told, pid=99), self.now)
        assert self.membership.deadline == deadline

    @rule(choice=st.integers(0, 9))
    @precondition(lambda self: self.membership.workers)
    def leaves(self, choice: int) -> None:
        client = list(self.membership.workers)[choice % len(self.membership.workers)]
        assert self.membership.leave(client) is self.gathers()
        assert (client not in self.membership.workers) is self.gathers()

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = self.now >= self.membership.deadline
        self.membership.pass_time(self.now)
        if late:
            assert self.membership.state is State.FAILED
            assert f"{self.membership.arrived} of {self.size} worker" in self.membership.failure
            missing = set(range(self.size)) - {each.rank for each in self.membership.workers.values()}
            assert self.membership.missing_ranks() == (sorted(missing) if self.kind == "launcher" else [])

    @invariant()
    def holds(self) -> None:
        state, membership = self.membership.state, self.membership
        assert state is self.before or self.before is State.GATHERING, "the other states are final"
        self.before = state
        assert bool(membership.failure) == (state is State.FAILED)
        assert (membership.deadline < math.inf) == (state is State.GATHERING and membership.arrived > 0)
        assert membership.deadline > self.now
        assert sum(membership.arrived_by_host().values()) == membership.arrived <= self.size
        if state is not State.COMPLETE:
            assert membership.assignment is NO_MEMBERS
            assert membership.arrived < self.size or "cannot start" in membership.failure
            return
        assert sorted(membership.assignment.ranks.values()) == list(range(self.size))
        for client, told in membership.workers.items():
            rank = membership.assignment.ranks[client]
            worker = topology(membership).workers[rank]
            assert worker.pid == told.pid
            assert told.rank in (None, rank)
        if self.kind == "launcher":
            assert [
                (host.name, slots)
                for host, slots in zip(topology(membership).hosts, topology(membership).slots, strict=True)
            ] == self.slots


TestAnyWay = AnyWay.TestCase
TestAnyWay.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


class TestWorkerInfo:
    @pytest.mark.parametrize(
        "changes",
        [
            {"rank": -1},
            {"rank": True},
            {"rank": "1"},
            {"index": 1.5},
            {"port": 65536},
            {"port": None},
            {"pid": 2**40},
            {"host_name": 3},
            {"host_name": "x" * 300},
            {"host_identity": "a\nb"},
            {"address": "\x1b[2J"},
        ],
    )
    def test_what_cannot_be(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(changes))):
            info(**changes)

    def test_there_and_back(self) -> None:
        worker = info(rank=3)
        assert WorkerInfo.from_dict(worker.to_dict()) == worker

    @pytest.mark.parametrize("data", [None, [], "text", {}, {**info().to_dict(), "more": 1}])
    def test_other_json(self, data: Any) -> None:
        with pytest.raises(ValueError, match="worker"):
            WorkerInfo.from_dict(data)

    def test_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            info().rank = 1  # type: ignore[misc]
