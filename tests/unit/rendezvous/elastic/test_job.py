"""The members of an elastic job, whatever happens to them and in whatever order."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._elastic.attempts import ATTEMPTS
from hvdgloo.rendezvous._elastic.events import (
    RESET_LIMIT_EXCEEDED_MESSAGE,
    Dismissed,
    Fate,
    Finished,
    HostLost,
    HostsListed,
    Identified,
    Join,
    Leaving,
    Recalled,
    Registered,
    Rules,
    Spawn,
    Synced,
    TimePassed,
    Up,
    Update,
)
from hvdgloo.rendezvous._elastic.hosts import cooldown_time
from hvdgloo.rendezvous._elastic.job import RETURN_TIME, ElasticJob
from hvdgloo.rendezvous._elastic.phases import NEXT, Phase
from hvdgloo.rendezvous._membership.assignment import NO_STATE, Assignment, Candidate, choose
from hvdgloo.topology import Host, Topology, Worker
from tests.support.elastic import UNTROUBLED, Actor, Bed

NAMES = ("h1", "h2", "h3")


def running(rules: Rules | None = None, hosts: tuple[tuple[str, int], ...] = (("h1", 2), ("h2", 2))) -> Bed:
    """A job in training."""
    bed = Bed(rules or Rules(size=sum(slots for _, slots in hosts), smallest=1), hosts)
    assert bed.cooperate() is Phase.RUNNING
    return bed


class AnyWay(RuleBasedStateMachine):
    """Anything at any time: what ``Bed`` checks holds for every job on every way."""

    @initialize(
        smallest=st.integers(1, 2),
        more=st.integers(0, 2),
        largest=st.sampled_from([None, 0, 1, 3]),
        limit=st.sampled_from([None, 0, 1, 5]),
        failures=st.integers(1, 3),
        cooldown=st.sampled_from([None, (1.0, 5.0), (700.0, 3600.0)]),
        join=st.sampled_from(Join),
        hosts_may_come=st.booleans(),
        begin=st.integers(0, 2),
    )
    def begin(
        self,
        smallest: int,
        more: int,
        largest: int | None,
        limit: int | None,
        failures: int,
        cooldown: tuple[float, float] | None,
        join: Join,
        hosts_may_come: bool,
        begin: int,
    ) -> None:
        size = smallest + more
        most = None if largest is None else size + largest
        rules = Rules(size, smallest, most, 600.0, 120.0, 30.0, limit, failures, cooldown, join, True, hosts_may_come)
        self.bed = Bed(rules, (("h1", 2), ("h2", 2))[: max(1, begin)])
        if begin:
            self.bed.cooperate()

    def pick(self, choice: int, actors: list[Actor]) -> Actor:
        return actors[choice % len(actors)]

    def on(self) -> bool:
        return not self.bed.job.final

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.askers())
    def asks(self, choice: int) -> None:
        """A worker calls init() or elastic.run, or asks again."""
        self.bed.arrive(self.pick(choice, self.askers()))

    def askers(self) -> list[Actor]:
        return [a for a in self.bed.alive() if not a.dismissed and (a.epoch < 0 or a.asked is not None)]

    @rule(choice=st.integers(0, 99), error=st.booleans(), accused=st.sets(st.integers(0, 4), max_size=2))
    @precondition(lambda self: self.on() and self.in_training())
    def comes_back(self, choice: int, error: bool, accused: set[int]) -> None:
        actor = self.pick(choice, self.in_training())
        others = tuple(rank for rank in accused if rank != actor.rank)
        self.bed.come_back(actor, "a peer was lost" if error else "", others if error else ())

    def in_training(self) -> list[Actor]:
        return [a for a in self.bed.members if a.asked is None and not a.dismissed and not a.finished]

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.in_training())
    def is_up(self, choice: int) -> None:
        actor = self.pick(choice, self.in_training())
        if not actor.up:
            self.bed.say_up(actor)

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.in_training())
    def commits(self, choice: int) -> None:
        actor = self.pick(choice, self.in_training())
        if actor.synced:
            actor.serial += 1

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.bed.alive())
    def dies(self, choice: int) -> None:
        self.bed.kill(self.pick(choice, self.bed.alive()))

    @rule(choice=st.integers(0, 99), status=st.sampled_from([-9, 1, 3]))
    @precondition(lambda self: self.on() and self.unseen())
    def is_seen_to_be_dead(self, choice: int, status: int) -> None:
        self.bed.see(self.pick(choice, self.unseen()), status)

    def unseen(self) -> list[Actor]:
        return [a for a in self.bed.actors.values() if (not a.alive or a.stopped) and not a.seen]

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.bed.alive())
    def ends_well(self, choice: int) -> None:
        actor = self.pick(choice, self.bed.alive())
        if actor.asked is None:
            self.bed.see(actor, 0)

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.in_training())
    def finishes(self, choice: int) -> None:
        actor = self.pick(choice, self.in_training())
        if choice % 4 == 0:  # not too often: nothing much can happen after that
            actor.finished = True
            self.bed.feed(Finished(actor.id))

    @rule(name=st.sampled_from(NAMES))
    @precondition(lambda self: self.on())
    def host_is_lost(self, name: str) -> None:
        for actor in self.bed.actors.values():
            if actor.host == name:
                actor.alive, actor.seen, actor.asked = False, True, None
        self.bed.feed(HostLost(name, "has been silent for 5 s"))

    @rule(hosts=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 3)), max_size=3, unique_by=lambda h: h[0]))
    @precondition(lambda self: self.on())
    def hosts_change(self, hosts: list[tuple[str, int]]) -> None:
        self.bed.list(hosts)

    @rule(name=st.sampled_from(NAMES), identity=st.sampled_from("ab"))
    @precondition(lambda self: self.on())
    def another_machine(self, name: str, identity: str) -> None:
        self.bed.feed(Identified(name, identity))

    @rule(name=st.sampled_from(NAMES))
    @precondition(lambda self: self.on())
    def host_leaves(self, name: str) -> None:
        self.bed.feed(Leaving(host=name))

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.on() and self.bed.actors)
    def late_words(self, choice: int) -> None:
        """Messages of an old epoch, and of an unknown worker."""
        actor = self.pick(choice, list(self.bed.actors.values()))
        self.bed.feed(Up(actor.id, actor.epoch - 1))
        self.bed.feed(Synced("never heard of", 7))
        self.bed.feed(Registered("never heard of", 7))
        if actor.epoch >= 0 and actor.asked is None and not actor.dismissed and not actor.seen and not actor.finished:
            actor.asked = Registered(actor.id, actor.epoch - 1, ready=True)
            assert len(self.bed.feed(actor.asked)) == 1

    @rule()
    def time_passes(self) -> None:
        if self.on():
            self.bed.wait()
        else:
            assert self.bed.feed(TimePassed()) == ()

    @rule(seconds=st.floats(0.01, 700))
    @precondition(lambda self: self.on())
    def some_time_passes(self, seconds: float) -> None:
        self.bed.now += min(seconds, max(0.0, self.bed.job.deadline - self.bed.now - 0.001))

    def teardown(self) -> None:
        """Whatever has happened, it comes to an end that can be told, with or without the workers' good will."""
        if hasattr(self, "bed"):
            self.bed.time_alone()
            if not self.bed.job.final:
                assert self.bed.cooperate() in {*UNTROUBLED, Phase.WAITING, Phase.FORMING}


TestAnyWay = AnyWay.TestCase
TestAnyWay.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Explorer:
    """Every order in which a few things can happen to a small job in training.

    Args:
        bed: where it begins.
        deaths: how many processes may die on one way.
    """

    def __init__(self, bed: Bed, deaths: int) -> None:
        self.begin = pickle.dumps(bed)
        self.most = len(bed.alive()) - deaths

    def explore(self, depth: int) -> int:
        """Take all ways of that many steps; returns how many different states there are."""
        known: set[object] = set()
        level = [self.begin]
        for _ in range(depth):
            further = []
            for state in level:
                for what, id in list(self._possible(pickle.loads(state))):
                    bed = pickle.loads(state)
                    self._do(bed, what, bed.actors.get(id))
                    now = fingerprint(bed)
                    if now in known:
                        continue
                    known.add(now)
                    further.append(pickle.dumps(bed))
                    assert bed.cooperate() in {*UNTROUBLED, Phase.WAITING}
                    assert bed.time_alone() in UNTROUBLED
            level = further
        return len(known)

    def _possible(self, bed: Bed) -> Iterator[tuple[str, str]]:
        if bed.job.final:
            return
        may_die = len(bed.alive()) > self.most
        for actor in bed.actors.values():
            if actor.seen:
                continue
            if not actor.alive or actor.stopped:
                yield "is seen", actor.id
                continue
            if may_die:
                yield "dies", actor.id
            if actor.asked is not None or actor.dismissed:
                continue
            if actor.epoch < 0:
                yield "asks", actor.id
            elif bed.update or bed.broken():
                yield "comes back", actor.id
            elif not actor.up:
                yield "is up", actor.id
        yield ("h2 is removed" if "h2" in bed.listed else "h2 is added"), ""

    def _do(self, bed: Bed, what: str, actor: Actor | None) -> None:
        if actor is None:
            bed.list([("h1", 2)] if what == "h2 is removed" else [("h1", 2), ("h2", 2)])
        elif what == "comes back":
            bed.come_back(actor, "a peer was lost" if bed.broken() else "")
        else:
            {"is seen": bed.see, "dies": bed.kill, "asks": bed.arrive, "is up": bed.say_up}[what](actor)


def fingerprint(bed: Bed) -> object:
    """Return the data that distinguishes two states; numbers that only grow are relative."""
    job, epoch = bed.job, bed.assignments[-1].epoch
    actors = sorted(
        (
            a.host, a.slot, a.alive, a.asked is not None, a.epoch - epoch if a.epoch >= 0 else -9,
            -1 if a.rank is None else a.rank, a.alone, a.up, a.synced, a.dismissed, a.stopped,
        )
        for a in bed.actors.values()
        if not a.seen
    )  # fmt: skip
    return (
        job.phase, job.deadline - bed.now, tuple(actors), tuple(bed.listed.items()), bed.update, bed.voided - epoch,
        tuple((member.host, member.slot) for member in bed.assignments[-1].members), job._pool.hosts.account(bed.now),
        tuple(sorted(job._attempts.failures.values())),
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(("failures_per_host", "depth", "states"), [(1, 8, 3900), (2, 7, 4300)])
def test_two_hosts_with_two_slots_in_every_order(failures_per_host: int, depth: int, states: int) -> None:
    """Two processes die, exits are seen late, members come back, a host leaves and returns: all ways of so many steps.

    Where a slot is started again after a failure there are more states, so there the ways are a step shorter.
    """
    bed = running(Rules(size=4, smallest=2, failures_per_host=failures_per_host))
    assert Explorer(bed, deaths=2).explore(depth) > states


def ids(bed: Bed) -> list[str]:
    """The members of the newest epoch, by rank."""
    return [member.worker for member in bed.assignments[-1].members]


def lose(bed: Bed, *ranks: int) -> None:
    """Members die, which their launcher sees at once."""
    for actor in [bed.members[rank] for rank in ranks]:
        bed.see(actor)


def return_all(bed: Bed) -> None:
    for actor in bed.members:
        if actor.asked is None and not actor.dismissed:
            bed.come_back(actor)


FOUR_SLOTS = Rules(size=4, smallest=1, failures_per_host=9)


class TestStarting:
    def test_a_program_that_fails_before_training_is_not_started_as_fast_as_it_fails(self) -> None:
        bed = running(Rules(size=2, smallest=1, failures_per_host=99), (("h1", 2),))
        lose(bed, 1)
        return_all(bed)
        (survivor,) = bed.members
        bed.say_up(survivor)
        pauses = []
        for _ in range(7):
            began = bed.now
            while not (newcomers := [actor for actor in bed.alive() if actor is not survivor]):
                assert bed.wait()
            pauses.append(bed.now - began)
            bed.see(newcomers[0], 1)
        assert pauses == [0, 0, 0.5, 1, 2, 4, 5]


class TestOrder:
    def test_survivors_keep_their_order_and_rank_0_is_one_of_them(self) -> None:
        bed = running(FOUR_SLOTS)
        before = ids(bed)
        lose(bed, 0)
        return_all(bed)
        assert ids(bed) == before[1:]
        assert [member.local_rank for member in bed.assignments[-1].members] == [0, 0, 1]

    def test_a_newcomer_takes_the_free_slot_and_its_gpu(self) -> None:
        bed = running(FOUR_SLOTS)
        survivor = bed.by_rank(0, 1)
        lose(bed, 0)
        assert bed.cooperate() is Phase.RUNNING
        for actor in bed.members:
            bed.come_back(actor, "")
        assert bed.cooperate() is Phase.RUNNING
        assignment = bed.assignments[-1]
        assert assignment.size == 4
        assert bed.members[0] is survivor
        assert [(m.slot, m.local_rank) for m in assignment.members if m.host == "h1"] == [
            (1, 1),
            (0, 0),
        ]

    def test_a_host_that_shrinks_loses_its_highest_slots(self) -> None:
        bed = running(FOUR_SLOTS)
        bed.list([("h1", 1), ("h2", 2)])
        assert bed.update is Update.REMOVED
        return_all(bed)
        assert [(m.host, m.slot) for m in bed.assignments[-1].members] == [
            ("h1", 0),
            ("h2", 0),
            ("h2", 1),
        ]
        assert bed.by_rank(0, 1).dismissed  # type: ignore[union-attr]

    def test_spares_take_over_and_no_more_than_the_maximum_are_started(self) -> None:
        bed = running(Rules(size=2, smallest=1, largest=3))
        assert len(bed.assignments[-1].members) == 3
        lose(bed, 0)
        return_all(bed)
        assert {actor.host for actor in bed.members} == {"h2"}
        assert bed.cooperate() is Phase.RUNNING
        assert [actor.host for actor in bed.alive()] == ["h2", "h2"]

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True, min_size=1, max_size=12),
        st.data(),
    )
    def test_any_candidates(self, spots: list[tuple[int, int]], data: st.DataObject) -> None:
        ranks: list[int | None] = data.draw(st.permutations([*range(len(spots))]))
        fresh = data.draw(st.sets(st.integers(0, len(spots) - 1)))
        assignment = choose(
            5,
            [
                Candidate(f"{host}/{slot}", f"h{host}", slot, None if i in fresh else ranks[i], (host, slot), i % 3, "")
                for i, (host, slot) in enumerate(spots)
            ],
        )
        members = {member.worker: member for member in assignment.members}
        assert len(members) == len(spots)
        for host, slots in assignment.slots:
            on_it = [member for member in assignment.members if member.host == host]
            assert len(on_it) == slots
            assert [member.local_rank for member in sorted(on_it, key=lambda member: member.slot)] == [*range(slots)]
        assert assignment.members[0].worker not in assignment.fresh or len(fresh) == len(spots)
        hosts = tuple(Host(host, "") for host, _ in assignment.slots)
        assert Topology(5, hosts, topology_workers(assignment)).size == len(spots)


def a_lost_it(actor: Actor) -> str:
    return f"rank {actor.rank} on host {actor.host} has lost it, and it has not returned within 2 s"


def topology_workers(assignment: Assignment) -> tuple[Worker, ...]:
    hosts = [host for host, _ in assignment.slots]
    return tuple(
        Worker(rank, hosts.index(member.host), member.local_rank, 1, "127.0.0.1", 0)
        for rank, member in enumerate(assignment.members)
    )


class TestAccounting:
    def test_who_comes_back_first_waits_until_it_is_known_what_became_of_the_others(self) -> None:
        bed = running(FOUR_SLOTS)
        dead = bed.members[0]
        bed.kill(dead)
        for actor in bed.members:
            bed.come_back(actor)
        assert bed.job.phase is Phase.DRAINING
        assert all(actor.asked for actor in bed.members)
        bed.see(dead)
        assert bed.job.phase is Phase.CONNECTING
        assert len(bed.members) == 3

    def test_horovod_3014_a_member_dies_while_the_next_epoch_is_formed(self) -> None:
        """With --join now the survivors wait for newcomers, one of which never comes."""
        bed = running(Rules(size=4, smallest=2, failures_per_host=9, join=Join.NOW))
        lose(bed, 3)
        return_all(bed)
        assert bed.job.phase is Phase.FORMING
        newcomer = next(actor for actor in bed.alive() if actor.epoch < 0)
        bed.see(newcomer, 1)
        epoch = bed.job.assignment.epoch
        assert bed.job.phase is Phase.FORMING
        assert bed.cooperate() is Phase.RUNNING
        assert bed.assignments[-1].epoch == epoch
        assert bed.assignments[-1].size == 4

    def test_a_failure_while_connecting_voids_the_epoch(self) -> None:
        bed = running(FOUR_SLOTS)
        lose(bed, 3)
        return_all(bed)
        epoch = bed.job.assignment.epoch
        lose(bed, 0)
        assert bed.voided == epoch
        assert bed.cooperate() is Phase.RUNNING
        assert bed.assignments[-1].epoch > epoch
        assert bed.changes[-1].assignment.size == 2
        assert bed.job.resets == 1, "what never came to training is no reset"

    def test_horovod_3494_all_are_told_the_same_about_the_state(self) -> None:
        """Survivors below the minimum wait, newcomers come: one answer says to all who has it."""
        bed = running(Rules(size=4, smallest=4, failures_per_host=9))
        for serial, actor in enumerate(bed.members):
            actor.serial = serial + 3
        lose(bed, 3)
        return_all(bed)
        assert bed.job.phase is Phase.WAITING
        assert bed.cooperate() is Phase.RUNNING
        assignment = bed.assignments[-1]
        assert (assignment.size, assignment.root, assignment.everyone, len(assignment.fresh)) == (4, 2, False, 1)

    def test_nothing_travels_if_all_have_the_same_commit(self) -> None:
        bed = running(FOUR_SLOTS)
        lose(bed, 3)
        return_all(bed)
        assert bed.assignments[-1].everyone

    def test_without_a_survivor_that_has_the_state_the_job_ends(self) -> None:
        bed = running(Rules(size=2, smallest=1, failures_per_host=9), (("h1", 2),))
        for actor in bed.members:
            bed.kill(actor)
        for actor in [*bed.actors.values()]:
            bed.see(actor)
        assert bed.ended is not None
        assert bed.ended.text == "no worker is left that has the state of the training"
        assert bed.ended.failure is not None
        assert (bed.ended.failure.rank, bed.ended.failure.status) == (0, -9)

    def test_the_end_says_why_the_last_workers_that_had_the_state_were_ended(self) -> None:
        lost = "no worker is left that has the state of the training; "
        bed = running(Rules(size=2, smallest=1, hosts_may_come=True), (("h1", 2),))
        bed.see(bed.members[1], 5)
        bed.time_alone()
        assert bed.ended is not None
        assert bed.ended.text.startswith(f"{lost}host h1 is left out: rank 1 on host h1 ")
        bed = running(Rules(size=2, smallest=1, hosts_may_come=True), (("h1", 2),))
        bed.list([])
        return_all(bed)
        bed.time_alone()
        assert bed.ended is not None
        assert bed.ended.text == f"{lost}host h1 was removed"

    @pytest.mark.parametrize("cause", ["a worker", "its host", "a host that cannot be used"])
    def test_after_the_failure_the_end_does_not_tell_its_cause_again(self, cause: str) -> None:
        usable = cause != "a host that cannot be used"
        hosts = (("h1", 2),) if usable else (("h1", 1), ("nosuchhost", 1))
        bed = Bed(Rules(size=2, smallest=2, failures_per_host=1, hosts_may_come=False), hosts)
        if usable:
            bed = running(bed.job.rules, hosts)
            if cause == "a worker":
                bed.see(bed.members[1])
                bed.see(bed.members[0])
            else:
                bed.feed(HostLost("h1", "its agent has ended"))
        else:
            bed.feed(HostLost("nosuchhost", "its name cannot be looked up"))
        assert bed.ended is not None
        assert bed.ended.failure is not None
        told = {"a worker": "SIGKILL", "its host": "agent has ended"}.get(cause, "name cannot be looked up")
        assert told in bed.ended.failure.reason
        assert told not in bed.ended.consequence
        assert ("no worker is left" if usable else "(h1: 1; nosuchhost: left out)") in bed.ended.consequence

    def test_a_stopped_process_is_ended_when_its_peers_have_lost_it(self) -> None:
        bed = running(FOUR_SLOTS)
        stopped = bed.members[2]
        for actor in bed.members:
            if actor is not stopped:
                bed.come_back(actor, "rank 2 does not answer", accused=(2,))
        begin = bed.now
        assert bed.wait()
        assert bed.now - begin == 2.0
        assert stopped.stopped
        assert bed.job.phase is Phase.CONNECTING

    def test_one_that_is_busy_is_waited_for_and_named_after_10_seconds(self) -> None:
        bed = running(FOUR_SLOTS)
        busy = bed.members[2]
        for actor in bed.members:
            if actor is not busy:
                bed.come_back(actor, "")
        assert bed.wait()
        assert bed.told == ["waiting for rank 2 on host h2 to come back to elastic.run"]
        assert bed.time_alone() is Phase.FAILED
        assert not busy.stopped
        assert bed.ended is not None
        assert bed.ended.text == "rank 2 on host h2 did not come back within 600 s"

    def test_a_host_that_others_cannot_connect_with_is_left_out_the_third_time(self) -> None:
        bed = running(FOUR_SLOTS)
        return_all(bed)
        for _ in range(ATTEMPTS):
            assert bed.job.phase is Phase.CONNECTING
            for rank, actor in enumerate(bed.members):
                bed.come_back(actor, "cannot connect", accused=(2,) if rank < 2 else (0,) if rank == 2 else ())
        assert bed.told == ["host h2 is left out: others have failed to connect with it 3 times"]
        assert bed.cooperate() is Phase.RUNNING
        assert {actor.host for actor in bed.members} == {"h1"}

    def test_it_ends_if_connecting_fails_and_no_worker_is_accused(self) -> None:
        bed = running(FOUR_SLOTS)
        return_all(bed)
        for _ in range(ATTEMPTS):
            for actor in bed.members:
                bed.come_back(actor, "no shared memory")
        assert bed.ended is not None
        assert "failed to connect 3 times: rank 0 on host h1: no shared memory" in bed.ended.text


class TestNewcomers:
    def test_horovod_2652_they_cost_nothing_until_they_are_ready(self) -> None:
        bed = running()
        bed.list([("h1", 2), ("h2", 2), ("h3", 1)])
        newcomer = next(actor for actor in bed.alive() if actor.epoch < 0)
        bed.arrive(newcomer)
        assert newcomer.alone
        assert bed.update is Update.NONE
        bed.arrive(newcomer)
        assert bed.update is Update.ADDED
        assert bed.job.phase is Phase.RUNNING
        for actor in bed.members:
            bed.come_back(actor, "")
        assert newcomer.rank == 4

    def test_several_interrupt_training_once(self) -> None:
        bed = running()
        bed.list([("h1", 2), ("h2", 2), ("h3", 2)])
        first, second = (actor for actor in bed.alive() if actor.epoch < 0)
        for actor in (first, second, first):
            bed.arrive(actor)
        assert bed.update is Update.NONE, "the other is about to be ready"
        bed.arrive(second)
        assert bed.update is Update.ADDED

    def test_one_that_never_is_ready_delays_the_others_by_a_moment(self) -> None:
        bed = running()
        bed.list([("h1", 2), ("h2", 2), ("h3", 2)])
        first = next(actor for actor in bed.alive() if actor.epoch < 0)
        bed.arrive(first)
        bed.arrive(first)
        begin = bed.now
        bed.wait()
        assert (bed.now - begin, bed.update) == (1.0, Update.ADDED)

    def test_join_now_announces_them_as_soon_as_there_are_slots(self) -> None:
        bed = running(Rules(size=4, smallest=1, join=Join.NOW))
        bed.list([("h1", 2), ("h2", 2), ("h3", 1)])
        assert bed.update is Update.ADDED
        return_all(bed)
        assert bed.job.phase is Phase.FORMING
        assert bed.cooperate() is Phase.RUNNING
        assert bed.assignments[-1].size == 5

    def test_horovod_1872_an_undone_change_is_no_update(self) -> None:
        bed = running()
        bed.list([("h1", 2)])
        assert bed.update is Update.REMOVED
        bed.list([("h1", 2), ("h2", 2)])
        assert (bed.update, bed.job.phase) == (Update.NONE, Phase.RUNNING)

    def test_both_kinds_of_change(self) -> None:
        bed = running()
        bed.list([("h1", 2), ("h3", 2)])
        for actor in [actor for actor in bed.alive() if actor.epoch < 0] * 2:
            bed.arrive(actor)
        assert bed.update is Update.MIXED

    def test_a_program_that_never_enters_elastic_run_keeps_its_size(self) -> None:
        bed = Bed(FOUR_SLOTS, (("h1", 2), ("h2", 2)))
        for actor in bed.alive():
            bed.arrive(actor)
        for actor in bed.alive():
            bed.feed(Up(actor.id, 0))
        for slots in (1, 2):
            bed.list([("h1", 2), ("h2", 2), ("h3", slots)])
        assert len(bed.actors) == 4
        (told,) = bed.told
        assert told.startswith("there are free slots (h3); they are used once all workers have entered elastic.run")


class TestHosts:
    def test_a_failure_takes_the_host_and_its_other_workers(self) -> None:
        bed = running()
        lose(bed, 2)
        assert bed.told == ["host h2 is left out: rank 2 on host h2 was killed by signal 9 (SIGKILL)"]
        assert bed.by_rank(0, 3).stopped  # type: ignore[union-attr]
        return_all(bed)
        assert [actor.host for actor in bed.members] == ["h1", "h1"]

    def test_before_its_last_failure_only_the_slot_is_started_again(self) -> None:
        bed = running(Rules(size=4, smallest=1, failures_per_host=2))
        lose(bed, 3)
        assert [(actor.host, actor.slot) for actor in bed.alive() if actor.epoch < 0] == [("h2", 1)]
        assert not any(actor.stopped for actor in bed.alive())
        bed.cooperate()
        lose(bed, 2)
        assert "host h2 is left out" in bed.told[-1]

    def test_after_its_cooldown_it_is_used_again(self) -> None:
        bed = running(Rules(size=4, smallest=1, cooldown=(10.0, 100.0)))
        lose(bed, 2)
        assert bed.cooperate() is Phase.RUNNING
        begin = bed.now
        bed.wait()
        assert bed.now - begin == 25.0, "twice the shortest, and by chance half of that"
        assert {actor.host for actor in bed.alive() if actor.epoch < 0} == {"h2"}

    @pytest.mark.parametrize("way", ["it leaves the list and returns", "another machine"])
    def test_horovod_1926_a_host_that_comes_back_is_used_again(self, way: str) -> None:
        bed = running()
        bed.feed(Identified("h2", "the first pod"))
        lose(bed, 2)
        assert bed.cooperate() is Phase.RUNNING
        bed.feed(Identified("h2", "the first pod"))
        assert not any(actor.epoch < 0 for actor in bed.alive())
        if way == "another machine":
            bed.feed(Identified("h2", "the second pod"))
        else:
            bed.list([("h1", 2)])
            bed.list([("h1", 2), ("h2", 2)])
        assert [actor.host for actor in bed.alive() if actor.epoch < 0] == ["h2", "h2"]

    def test_horovod_2030_it_ends_at_once_when_all_hosts_are_left_out(self) -> None:
        bed = Bed(Rules(size=2, smallest=1), (("h1", 1), ("h2", 1)))
        first, second = bed.alive()
        bed.see(first, 3)
        assert bed.ended is None
        bed.see(second, 1)
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert (bed.ended.failure.host, bed.ended.failure.status) == ("h1", 3)

    def test_horovod_2030_too_few_workers_are_waited_for_until_the_elastic_timeout(self) -> None:
        bed = running(Rules(size=4, smallest=3, elastic_timeout=60.0))
        begin = bed.now
        lose(bed, 2)
        return_all(bed)
        assert bed.job.phase is Phase.WAITING
        assert bed.time_alone() is Phase.FAILED
        assert bed.now - begin == 60.0
        assert bed.ended is not None
        assert bed.ended.text == (
            "2 of 3 workers are ready (h1: 2; h2: left out, as rank 2 on host h2 was killed by signal 9 (SIGKILL)) "
            "after 60 s (--elastic-timeout)"
        )
        assert bed.ended.failure is not None
        assert bed.ended.failure.status == -9

    def test_a_host_that_comes_ends_the_wait(self) -> None:
        bed = running(Rules(size=4, smallest=3))
        lose(bed, 2)
        return_all(bed)
        assert bed.told[-1].startswith("host h2 is left out")
        bed.list([("h1", 2), ("h2", 2), ("h3", 1)])
        assert bed.cooperate() is Phase.RUNNING
        assert [actor.host for actor in bed.members] == ["h1", "h1", "h3"]

    def test_a_fixed_list_that_cannot_be_enough_is_not_waited_for(self) -> None:
        bed = running(Rules(size=4, smallest=3, hosts_may_come=False))
        lose(bed, 2)
        return_all(bed)
        assert bed.ended is not None
        assert bed.ended.text.endswith("and no others can come")

    @pytest.mark.parametrize("way", ["removed", "leaving"])
    def test_a_host_that_leaves_costs_no_step_and_is_no_failure(self, way: str) -> None:
        bed = running()
        if way == "removed":
            bed.list([("h1", 2)])
        else:
            bed.feed(Leaving(host="h2"))
        assert bed.update is Update.REMOVED
        leavers = bed.members[2:]
        for actor in bed.members:
            bed.come_back(actor, "")
        assert all(actor.dismissed for actor in leavers)
        bed.feed(HostLost("h2", "its agent has ended"))
        assert bed.cooperate() is Phase.RUNNING
        assert (bed.assignments[-1].size, bed.told) == (2, [])

    def test_one_that_does_not_leave_is_ended_after_30_seconds(self) -> None:
        bed = running()
        bed.list([("h1", 2)])
        stays = bed.members[3]
        for actor in bed.members[:3]:
            bed.come_back(actor, "")
        for actor in bed.members:
            bed.say_up(actor)
        begin = bed.now
        while not stays.stopped and bed.wait():
            pass
        assert bed.now - begin == 30.0

    def test_a_lost_host_loses_all_its_workers(self) -> None:
        bed = running()
        for actor in bed.members[2:]:
            actor.alive, actor.seen = False, True
        bed.feed(HostLost("h2", "has been silent for 5 s"))
        return_all(bed)
        assert bed.cooperate() is Phase.RUNNING
        assert bed.changes[-1].why == "rank 2 on host h2 was lost: has been silent for 5 s"


class TestHowLongItStood:
    def test_it_counts_from_when_the_first_survivor_was_held_up(self) -> None:
        """A process that is stopped is noticed only when it has not answered for some time."""
        bed = running()
        bed.now += 100.0
        for actor, stood in zip(bed.members[:3], (2.5, 3.0, 0.1), strict=True):
            bed.come_back(actor, accused=(3,), stood=stood)
        bed.now += 2.0
        bed.see(bed.members[3])
        assert bed.cooperate() is Phase.RUNNING
        assert bed.changes[-1].stood == 5.0

    def test_but_not_from_before_the_training(self) -> None:
        bed = running()
        bed.now += 1.0
        lose(bed, 0)
        for actor in bed.members:
            bed.come_back(actor, stood=50.0)
        assert bed.cooperate() is Phase.RUNNING
        assert bed.changes[-1].stood == 1.0

    def test_nor_from_the_change_before(self) -> None:
        bed = running(FOUR_SLOTS)
        lose(bed, 3)
        for actor in bed.members:
            bed.come_back(actor, stood=0.0)
        assert bed.cooperate() is Phase.RUNNING
        bed.now += 100.0
        lose(bed, 1)
        bed.now += 1.5
        return_all(bed)
        assert bed.cooperate() is Phase.RUNNING
        assert bed.changes[-1].stood == 1.5


def calls_at_the_start(size: int, *, launched: bool) -> int:
    """Return the number of functions that the job calls until ``size`` workers are in training."""
    job = ElasticJob(Rules(size=size, smallest=1, launched=launched), 0.0)
    hosts = [f"h{number}" for number in range(size // 8)]
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        spawned = job.feed(HostsListed(tuple((host, 8) for host in hosts)), 0.0) if launched else ()
        workers = [order.worker for order in spawned if isinstance(order, Spawn)] or [str(n) for n in range(size)]
        for number, worker in enumerate(workers):
            job.feed(Registered(worker, host="" if launched else hosts[number // 8]), 0.0)
            assert job.deadline > 0
        for event in (Up, Synced):
            for worker in workers:
                job.feed(event(worker, 0), 0.0)
                assert job.deadline > 0
    finally:
        sys.setprofile(None)
    assert (job.phase, job.assignment.size) == (Phase.RUNNING, size)
    return calls


class TestTheStart:
    @pytest.mark.parametrize("launched", [True, False])
    def test_twice_as_many_workers_are_twice_the_work(self, launched: bool) -> None:
        few, many = (calls_at_the_start(size, launched=launched) for size in (128, 256))
        assert many < 2.2 * few

    def test_it_waits_for_np_slots_and_uses_all_there_are(self) -> None:
        bed = Bed(Rules(size=3, smallest=1), (("h1", 2),))
        assert not bed.actors
        bed.list([("h1", 2), ("h2", 2)])
        assert len(bed.actors) == 4
        assert bed.cooperate() is Phase.RUNNING

    def test_too_few_slots_are_waited_for_until_the_elastic_timeout(self) -> None:
        bed = Bed(Rules(size=3, smallest=1, elastic_timeout=20.0), (("h1", 2),))
        begin = bed.now
        assert bed.wait()
        assert bed.now - begin == 2.0
        assert bed.told == [
            "waiting for workers: 2 of 3 slots are available (h1: 2). The job ends if they do not arrive within 18 s; "
            "--elastic-timeout and -np set that"
        ]
        assert bed.time_alone() is Phase.FAILED
        assert bed.ended is not None
        assert bed.ended.text == "2 of 3 slots are available (h1: 2) after 20 s (--elastic-timeout)"

    def test_hosts_that_are_not_known_yet_are_not_complained_about(self) -> None:
        """If no host is listed yet, an agent is still asked for its slots: that is shown in another way."""
        bed = Bed(Rules(size=3, smallest=1), ())
        assert bed.wait()
        assert bed.now == 1010.0
        bed.list([("h1", 2)])
        assert bed.wait()
        assert (bed.now, len(bed.told)) == (1012.0, 2)

    def test_fewer_than_min_np_are_said_to_be_waited_for(self) -> None:
        bed = running(Rules(size=4, smallest=3, elastic_timeout=60.0))
        lose(bed, 2)
        return_all(bed)
        begin = bed.now
        assert bed.wait()
        assert bed.now - begin == 2.0
        assert bed.told[-1].startswith("waiting for workers: 2 of 3 workers are ready (h1: 2; h2: left out, as ")
        assert bed.told[-1].endswith("within 58 s; --elastic-timeout and --min-np set that")

    @pytest.mark.parametrize("first", ["lost", "done"])
    def test_a_host_that_cannot_be_used_is_no_failure_if_enough_are_left(self, first: str) -> None:
        """A program without hvd.init() has done its work on the others before or after that is known."""
        bed = Bed(Rules(size=1, smallest=1, hosts_may_come=False), (("nosuchhost", 1), ("h1", 1)))
        other = next(actor for actor in bed.actors.values() if actor.host == "h1")
        if first == "done":
            bed.see(other, 0)
        bed.feed(HostLost("nosuchhost", "its name cannot be looked up"))
        if first == "lost":
            bed.see(other, 0)
        assert bed.job.phase is Phase.OVER
        assert bed.ended is not None
        assert bed.ended.failure is None

    @pytest.mark.parametrize("first", ["lost", "done"])
    def test_a_host_that_cannot_be_used_is_the_failure_if_too_few_are_left(self, first: str) -> None:
        bed = Bed(Rules(size=2, smallest=2, hosts_may_come=False), (("nosuchhost", 1), ("h1", 1)))
        if first == "done":
            bed.see(next(actor for actor in bed.actors.values() if actor.host == "h1"), 0)
        bed.feed(HostLost("nosuchhost", "its name cannot be looked up"))
        assert bed.job.phase is Phase.FAILED
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert bed.ended.failure.reason == "host nosuchhost could not be used: its name cannot be looked up"
        assert not bed.ended.failure.worker, "no worker of it was lost: none has ever run"

    def test_a_worker_that_fails_with_others_that_have_done_their_work_is_a_failure(self) -> None:
        bed = Bed(Rules(size=2, smallest=1), (("h1", 2),))
        first, second = bed.alive()
        bed.see(first, 0)
        bed.see(second, 3)
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert bed.ended.failure.status == 3

    def test_one_that_does_not_call_init_is_left_out_after_the_start_timeout(self) -> None:
        bed = Bed(Rules(size=2, smallest=1), (("h1", 1), ("h2", 1), ("h3", 1)))
        late, *others = bed.alive()
        for actor in others:
            bed.arrive(actor)
        begin = bed.now
        while bed.job.phase is Phase.FORMING and bed.wait():
            pass
        assert bed.now - begin == 120.0
        assert late.stopped
        assert bed.told[0] == "waiting for a new worker on host h1 to call hvd.init()"
        assert [actor.host for actor in bed.members] == ["h2", "h3"]

    def test_a_program_without_init_is_not_waited_for(self) -> None:
        bed = Bed(Rules(size=2, smallest=1), (("h1", 2),))
        assert bed.time_alone() is Phase.FORMING
        for actor in bed.alive():
            bed.see(actor, 0)
        assert bed.ended is not None
        assert bed.ended.failure is None

    def test_one_that_ends_without_init_while_others_wait_in_it_is_a_failure(self) -> None:
        bed = Bed(Rules(size=2, smallest=1), (("h1", 2),))
        first, second = bed.alive()
        bed.arrive(first)
        bed.see(second, 0)
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert "has ended with status 0 without calling hvd.init(), in which others waited for it" in bed.ended.text


class TestTheEnd:
    def test_horovod_3852_success_needs_every_member(self) -> None:
        bed = running()
        first, *others = bed.members
        first.finished = True
        bed.feed(Finished(first.id))
        bed.see(first, 0)
        assert bed.ended is None
        for actor in others[:-1]:
            bed.see(actor, 0)
        bed.see(others[-1], 1)
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert bed.ended.failure.status == 1

    def test_all_finish(self) -> None:
        bed = running()
        for actor in bed.members:
            bed.feed(Finished(actor.id))
        for actor in bed.alive():
            bed.see(actor, 0)
        assert bed.ended is not None
        assert bed.ended.failure is None

    def test_workers_that_were_removed_do_not_count(self) -> None:
        bed = running()
        bed.list([("h1", 2)])
        return_all(bed)
        bed.cooperate()
        for actor in bed.members:
            bed.see(actor, 0)
        assert bed.ended is not None
        assert bed.ended.failure is None

    def test_who_comes_back_after_another_has_finished_is_told_so(self) -> None:
        bed = running()
        bed.feed(Finished(bed.members[1].id))
        actions = bed.ask(bed.members[0], ready=True, serial=3, error="a peer was lost")
        assert actions == (Dismissed(bed.members[0].id, Fate.OVER, "rank 1 on host h1 has finished its training"),)

    def test_who_is_killed_between_its_training_s_end_and_its_own_has_failed(self) -> None:
        bed = running()
        for actor in bed.members:
            bed.feed(Finished(actor.id))
        first, *others = bed.members
        bed.see(first, -9)
        for actor in others:
            bed.see(actor, 0)
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert bed.ended.text == (
            "rank 0 on host h1 has finished its training, but not every worker has ended with status 0"
        )

    def test_the_status_is_the_one_of_the_failure_that_could_not_be_survived(self) -> None:
        bed = running(Rules(size=4, smallest=1, failures_per_host=9))
        bed.see(bed.members[3], 77)
        return_all(bed)
        assert bed.cooperate() is Phase.RUNNING
        for status, actor in enumerate(bed.members, 4):
            bed.see(actor, status)
        assert bed.ended is not None
        assert bed.ended.failure is not None
        assert bed.ended.failure.status == 4

    @pytest.mark.parametrize("limit", [0, 1])
    def test_the_limit_of_resets(self, limit: int) -> None:
        bed = running(Rules(size=4, smallest=1, failures_per_host=9, reset_limit=limit))
        for _ in range(limit):
            return_all(bed)
            assert bed.cooperate() is Phase.RUNNING
        bed.list([("h1", 2), ("h2", 2), ("h3", 1)])
        assert not any(actor.epoch < 0 for actor in bed.alive()), "it could never join"
        return_all(bed)
        assert bed.ended is not None
        assert bed.ended.text == RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)
        assert bed.ended.failure is not None
        assert bed.ended.failure.status == 1

    def test_the_status_at_the_limit_of_resets_is_the_one_of_the_failure_that_was_not_survived(self) -> None:
        bed = running(Rules(size=4, smallest=1, failures_per_host=9, reset_limit=1))
        for status in (77, 5):
            bed.see(bed.members[-1], status)
            return_all(bed)
            bed.cooperate()
        assert bed.ended is not None
        assert bed.ended.text == RESET_LIMIT_EXCEEDED_MESSAGE.format(1)
        assert bed.ended.failure is not None
        assert bed.ended.failure.status == 5


class TestWithoutALauncher:
    RULES = Rules(size=2, smallest=1, largest=3, launched=False)

    def come(self, bed: Bed, id: str, host: str, **details: Any) -> Actor:
        actor = bed.actors[id] = Actor(id, host, 0)
        bed.ask(actor, host=host, **details)
        return actor

    def test_workers_come_and_go_and_return(self) -> None:
        bed = Bed(self.RULES, ())
        a, b = self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")
        assert (a.rank, b.rank) == (0, 1)
        for actor in (a, b):
            bed.say_up(actor)
        c = self.come(bed, "c", "pod-3")
        assert c.alone
        bed.arrive(c)
        assert bed.update is Update.ADDED
        return_all(bed)
        assert bed.cooperate() is Phase.RUNNING
        assert [actor.id for actor in bed.members] == ["a", "b", "c"]
        bed.see(a, None)
        return_all(bed)
        assert [actor.id for actor in bed.members] == ["b", "c"]
        for actor in bed.members:
            bed.say_up(actor)
        again = self.come(bed, "a2", "pod-1")
        assert again.alone, "its host is not left out"

    def test_the_index_gives_the_order_of_the_start(self) -> None:
        bed = Bed(self.RULES, ())
        later, sooner = self.come(bed, "a", "pod-1", index=5), self.come(bed, "b", "pod-2", index=2)
        assert (sooner.rank, later.rank) == (0, 1)

    def test_a_server_that_was_restarted_takes_up_where_the_workers_are(self) -> None:
        bed = Bed(self.RULES, ())
        for id, rank, serial in (("a", 1, 8), ("b", 2, 9)):
            actor = bed.actors[id] = Actor(id, id, 0, epoch=6, rank=rank, serial=serial)
            bed.ask(actor, host=id, rank=rank, ready=True, serial=serial)
        begin = bed.now
        assert bed.wait()
        assert bed.now - begin == RETURN_TIME
        assignment = bed.assignments[-1]
        assert (assignment.epoch, assignment.root, [member.worker for member in assignment.members]) == (
            7,
            1,
            ["a", "b"],
        )

    def recalled(self, bed: Bed, id: str, rank: int, size: int = 3, epoch: int = 6) -> Actor:
        """A member of an epoch of which this server knows nothing."""
        actor = bed.actors[id] = Actor(id, f"host of {id}", 0, epoch=epoch, rank=rank, serial=8, up=True)
        bed.feed(Recalled(epoch, rank, size, True, worker=id, host=actor.host))
        return actor

    def test_a_server_that_was_restarted_while_they_train(self) -> None:
        """A newcomer interrupts them as if nothing had been, whenever it comes."""
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        early = self.come(bed, "early", "pod-9")
        assert early.asked is not None, "it cannot be known yet whether others are in training"
        members = [self.recalled(bed, id, rank) for id, rank in (("c", 2), ("a", 0), ("b", 1))]
        assert bed.job.phase is Phase.RUNNING
        assert early.alone
        assert [member.worker for member in bed.job.assignment.members] == ["a", "b", "c"]
        bed.arrive(early)
        assert bed.update is Update.NONE, "there is no room"
        bed.see(members[2], None)
        for actor in (members[0], members[1]):
            bed.come_back(actor)
        assert [member.worker for member in bed.assignments[-1].members] == ["a", "c", "early"]
        assert bed.assignments[-1].epoch == 7

    def test_a_member_of_which_nothing_was_heard_may_still_return(self) -> None:
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        a, b = self.recalled(bed, "a", 0), self.recalled(bed, "b", 1)
        assert bed.update is Update.NONE, "the third one is not removed, but only unknown"
        for actor in (a, b):
            bed.come_back(actor)
        assert not bed.assignments
        c = bed.actors["c"] = Actor("c", "host of c", 0, epoch=6, rank=2, serial=8)
        bed.ask(c, ready=True, serial=8, host=c.host, rank=2)
        bed.wait()
        assert [member.worker for member in bed.assignments[-1].members] == ["a", "b", "c"]

    def test_one_that_is_back_before_the_others_were_heard_of(self) -> None:
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        b = bed.actors["b"] = Actor("b", "host of b", 0, epoch=6, rank=1, serial=8)
        bed.ask(b, ready=True, serial=8, host=b.host, rank=1)
        a = self.recalled(bed, "a", 0, size=2)
        assert bed.job.phase is Phase.DRAINING, "it will notice"
        bed.come_back(a)
        assert [member.worker for member in bed.assignments[-1].members] == ["a", "b"]

    def test_patience_that_ends_before_workers_of_an_earlier_server_had_time_to_come(self) -> None:
        """A deadline that stayed in the past would keep the clock's thread busy, and its lock."""
        rules = Rules(size=2, smallest=2, launched=False, elastic_timeout=RETURN_TIME / 2)
        bed = Bed(rules, (), hold=RETURN_TIME)
        begin = bed.now
        self.come(bed, "a", "pod-1")
        while bed.job.phase is Phase.WAITING:
            assert bed.job.deadline > bed.now
            assert bed.wait()
        assert (bed.job.phase, bed.now - begin) == (Phase.FAILED, RETURN_TIME)

    def test_the_others_are_told_of_one_whose_connection_was_lost(self) -> None:
        """Its host may have been cut off, and then they would wait for it until the operation timeout."""
        bed = Bed(self.RULES, ())
        a, b = self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")
        for actor in (a, b):
            bed.say_up(actor)
        bed.see(b, None)
        assert bed.voided == 0

    def test_all_may_be_lost_before_they_were_heard_of(self) -> None:
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        begin = bed.now
        bed.see(self.recalled(bed, "a", 0), None)
        self.come(bed, "new", "pod-9")
        assert bed.time_alone() is Phase.FAILED
        assert bed.now - begin == self.RULES.elastic_timeout, "the others may only take longer"
        assert bed.ended is not None
        assert "no worker is left that has the state of the training" in bed.ended.text

    def test_the_latest_epoch_that_any_worker_knows_is_the_one(self) -> None:
        """The first who finds the server may have been lost by the others before it was restarted."""
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        cut_off = self.recalled(bed, "a", 0, epoch=6)
        for id, rank in (("b", 0), ("c", 1)):
            self.recalled(bed, id, rank, size=2, epoch=7)
        assert bed.job.phase is Phase.RUNNING
        assert (bed.job.assignment.epoch, [member.worker for member in bed.job.assignment.members]) == (7, ["b", "c"])
        bed.ask(cut_off, ready=True, serial=8, host=cut_off.host, rank=0)
        assert bed.update is Update.ADDED

    def test_members_of_an_epoch_that_others_have_outlived_are_not_waited_for(self) -> None:
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        self.recalled(bed, "a", 0, size=4, epoch=6)
        for id, rank in (("b", 0), ("c", 1)):
            actor = bed.actors[id] = Actor(id, f"host of {id}", 0, epoch=7, rank=rank, serial=9)
            bed.ask(actor, ready=True, serial=9, host=actor.host, rank=rank)
        begin = bed.now
        bed.wait()
        assert bed.now - begin == RETURN_TIME
        assert (bed.assignments[-1].epoch, [member.worker for member in bed.assignments[-1].members]) == (8, ["b", "c"])

    def test_a_member_that_told_of_its_last_epoch_is_one_of_the_next(self) -> None:
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        self.recalled(bed, "a", 0, size=3, epoch=6)
        a, b = self.recalled(bed, "a", 0, size=2, epoch=7), self.recalled(bed, "b", 1, size=2, epoch=7)
        for actor in (a, b):
            bed.come_back(actor)
        assert (bed.assignments[-1].epoch, [member.worker for member in bed.assignments[-1].members]) == (8, ["a", "b"])

    def test_who_recalls_what_is_over_is_a_newcomer(self) -> None:
        bed = Bed(self.RULES, ())
        for actor in (self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")):
            bed.say_up(actor)
        before = bed.job.assignment
        bed.feed(Recalled(0, 1, 2, True, worker="c", host="pod-3"))
        bed.feed(Recalled(7, 0, 5, True, worker="d", host="pod-3"))
        bed.feed(Recalled(0, 1, 2, True, worker="a", host="pod-1"))
        assert bed.job.assignment == before
        assert bed.job.phase is Phase.RUNNING

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def test_restarts_at_any_time(self, data: st.DataObject) -> None:
        """No matter which workers are heard of, and what happens to them: it ends in training, or with a reason."""
        bed = Bed(self.RULES, (), hold=RETURN_TIME)
        size = data.draw(st.integers(1, 3))
        unheard = [(f"m{rank}", rank) for rank in range(size)]
        for _ in range(data.draw(st.integers(1, 12))):
            what = data.draw(st.sampled_from(["recall", "return", "late", "newcomer", "die", "time"]))
            alive = [actor for actor in bed.alive() if actor.asked is None and not actor.dismissed]
            if bed.job.final:
                break
            if what == "recall" and unheard:
                self.recalled(bed, *unheard.pop(data.draw(st.integers(0, len(unheard) - 1))), size=size)
            elif what == "return" and unheard:
                id, rank = unheard.pop()
                actor = bed.actors[id] = Actor(id, f"host of {id}", 0, epoch=6, rank=rank, serial=8)
                bed.ask(actor, ready=True, serial=8, host=actor.host, rank=rank)
                if actor.asked is not None and bed.job._pool.workers[id].fresh:
                    actor.rank, actor.serial = None, NO_STATE
            elif what == "late":  # the others went on without it
                self.recalled(bed, f"l{len(bed.actors)}", 0, size=size + 1, epoch=5)
            elif what == "newcomer":
                id = f"n{len(bed.actors)}"
                self.come(bed, id, f"host of {id}")
            elif what == "die" and alive:
                bed.see(data.draw(st.sampled_from(alive)), None)
            elif what == "time":
                bed.wait()
        assert bed.time_alone() in UNTROUBLED or bed.job.phase is Phase.WAITING
        assert bed.cooperate() in UNTROUBLED or bed.time_alone() is Phase.FAILED or not bed.job._pool.workers

    def test_one_that_others_have_lost_comes_back_as_a_newcomer(self) -> None:
        """It was cut off from them, and from the server, without any of its connections having ended."""
        bed = Bed(self.RULES, ())
        a, b = self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")
        for actor in (a, b):
            bed.say_up(actor)
        bed.come_back(a, accused=(b.rank or 0,))
        while bed.assignments[-1].size != 1:
            assert bed.wait()
        assert bed.told[-1] == f"rank 1 on host pod-2 is no longer waited for: {a_lost_it(a)}"
        bed.say_up(a)
        b.asked, b.rank, b.serial = Registered("b", 0, True, 99, host="pod-2", rank=1), None, NO_STATE
        bed.feed(b.asked)
        assert not b.dismissed
        assert bed.update is Update.ADDED

    def test_lines_for_the_user(self) -> None:
        bed = Bed(self.RULES, ())
        a, b = self.come(bed, "id-1", "pod-1", host_name="h1"), self.come(bed, "id-2", "pod-2", host_name="h2")
        for actor in (a, b):
            bed.say_up(actor)
        assert not bed.told
        self.come(bed, "id-3", "pod-3", host_name="h3", pid=7)
        bed.see(b, None)
        bed.feed(Leaving(worker="id-1"))
        return_all(bed)
        assert bed.told == [
            "a new worker on host h3 (process 7) has arrived",
            "rank 1 on host h2 has ended",
            "rank 0 on host h1 leaves, as it was asked to end",
        ]

    def test_one_that_was_cut_off_comes_back_as_a_newcomer(self) -> None:
        bed = Bed(self.RULES, ())
        a, b = self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")
        for actor in (a, b):
            bed.say_up(actor)
        bed.see(b, None)
        return_all(bed)
        bed.say_up(a)
        b.alive, b.seen, b.serial = True, False, 99
        b.asked, b.rank, b.serial = Registered("b", 0, True, 99, host="pod-2", rank=1), None, NO_STATE
        bed.feed(b.asked)
        assert bed.update is Update.ADDED
        bed.come_back(a, "")
        assert bed.assignments[-1].root == 0, "what it has committed since is not the job's"

    def test_all_finish(self) -> None:
        bed = Bed(self.RULES, ())
        for actor in (self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")):
            bed.feed(Finished(actor.id))
        assert bed.ended is not None
        assert bed.ended.failure is None

    def test_one_is_preempted(self) -> None:
        bed = Bed(self.RULES, ())
        a, b = self.come(bed, "a", "pod-1"), self.come(bed, "b", "pod-2")
        for actor in (a, b):
            bed.say_up(actor)
        b.was_out = True
        bed.feed(Leaving(worker="b"))
        assert bed.update is Update.REMOVED
        return_all(bed)
        assert b.dismissed
        assert [actor.id for actor in bed.members] == ["a"]


class TestTheRules:
    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"size": 2, "smallest": 3}, "--min-np 3 exceeds -np 2"),
            ({"size": 4, "smallest": 1, "largest": 3}, "--max-np 3 is below -np 4"),
            ({"size": 0, "smallest": 0}, "-np must be at least 1, not 0"),
            ({"size": 1, "smallest": 1, "reset_limit": -1}, "--reset-limit must be at least 0"),
            ({"size": 1, "smallest": 1, "failures_per_host": 0}, "--failures-per-host must be at least 1"),
            ({"size": 1, "smallest": 1, "elastic_timeout": 0}, "--elastic-timeout must be more than 0"),
            ({"size": 1, "smallest": 1, "cooldown": (0, 10)}, "give two times from 1 to 3600 seconds"),
            ({"size": 1, "smallest": 1, "cooldown": (20, 10)}, "the shorter one first"),
            ({"size": 1, "smallest": 1, "cooldown": (10, 4000)}, "from 1 to 3600 seconds"),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, values: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(text)):
            Rules(**values)

    def test_phases_follow_as_the_table_says(self) -> None:
        assert set(NEXT) == set(Phase)
        assert {phase for following in NEXT.values() for phase in following} | {Phase.WAITING} == set(Phase)


@given(st.floats(1, 3600), st.floats(1, 3600), st.lists(st.floats(0, 1), min_size=1, max_size=70))
def test_cooldowns_stay_within_their_range_and_never_get_shorter(a: float, b: float, chances: list[float]) -> None:
    cooldown = min(a, b), max(a, b)
    times = [cooldown_time(failures, cooldown, chance) for failures, chance in enumerate(chances, 1)]
    assert all(cooldown[0] <= time <= cooldown[1] for time in times)
    assert times == sorted(times)
