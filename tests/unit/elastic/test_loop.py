"""The treatment of failures, updates and the end of a training by ``elastic.run``, with a job that follows a script."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo.elastic.loop import Loop, run_fn
from hvdgloo.elastic.news import NotificationManager, notification_manager
from hvdgloo.elastic.state import ObjectState, State
from hvdgloo.errors import (
    BackendError,
    ConnectError,
    DismissedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidArgumentError,
    JobShutdownError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    StallError,
)
from tests.support.elastic_loop import FakeJob, placement
from tests.support.world import World

FAILURES = [
    PeerLostError("lost", rank=1),
    JobShutdownError("shut down", rank=1),
    BackendError("the plane"),
    ConnectError("no route"),
    StallError("stalled"),
    HorovodInternalError("as a program raises it"),
]
PROGRAMS_OWN = [
    MismatchError("shapes"),
    NotInitializedError(),
    InvalidArgumentError("argument"),
    ValueError("value"),
    KeyboardInterrupt(),
    SystemExit(3),
]


@pytest.fixture(scope="module")
def context() -> Any:
    with World(1) as world:
        yield world.contexts[0]


class Recorded(ObjectState):
    """Says what is done with it."""

    def __init__(self, context: Context, log: list[str], **values: Any) -> None:
        self.log: list[str] = []
        super().__init__(lambda value, root_rank=0: value, lambda: 0, **values)
        self.log = log
        self._context = lambda: context

    def save(self) -> None:
        self.log.append("save")
        super().save()

    def restore(self) -> None:
        self.log.append("restore")
        super().restore()

    def sync(self) -> None:
        self.log.append("sync")
        super().sync()

    def reset(self) -> None:
        self.log.append("reset")


def raising(*errors: BaseException | None) -> Callable[[], str]:
    """A function that raises them one after the other; None stands for returning."""
    left = list(errors)

    def func() -> str:
        error = left.pop(0)
        if error is not None:
            raise error
        return "trained"

    return func


@pytest.fixture
def job() -> FakeJob:
    return FakeJob([placement(epoch) for epoch in range(8)])


@pytest.fixture
def state(context: Context, job: FakeJob) -> Recorded:
    return Recorded(context, job.log, step=0)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_failures_of_the_job_lead_to_its_next_epoch(job: FakeJob, state: Recorded, error: BaseException) -> None:
    state.register_reset_callbacks([lambda: job.log.append("callback")])
    assert Loop(job, state).run(raising(error, None)) == "trained"
    first = ["enter", "sync", "save", "synced"]
    assert job.log == [*first, "again", "restore", "reset", "callback", "sync", "save", "synced", "finished"]
    assert job.asked[0].error is error
    assert job.listener is None


@pytest.mark.parametrize("error", PROGRAMS_OWN, ids=lambda error: type(error).__name__)
def test_errors_of_the_program_are_its_own(job: FakeJob, state: Recorded, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        Loop(job, state).run(raising(error))
    assert caught.value is error
    assert "again" not in job.log
    assert "finished" not in job.log
    assert job.listener is None


def test_a_failure_in_any_part_of_a_turn_leads_to_the_next(context: Context) -> None:
    """Horovod's reset and sync are outside of its loop: a second failure there ends survivors (#2030)."""

    class Failing(Recorded):
        failures: list[str] = []

        def fail(self, where: str) -> None:
            if self.failures and self.failures[0] == where:
                raise PeerLostError(f"in {self.failures.pop(0)}", rank=1)

        def restore(self) -> None:
            self.fail("restore")
            super().restore()

        def sync(self) -> None:
            self.fail("sync")
            super().sync()

    job = FakeJob([placement(epoch, pid=100 + epoch) for epoch in range(4)])
    state = Failing(context, job.log, step=0)
    state.register_reset_callbacks([lambda: state.fail("callback")])
    state.failures = ["sync", "restore", "callback"]
    assert Loop(job, state).run(raising(None)) == "trained"
    assert state.failures == []
    assert [str(asked.error) for asked in job.asked] == ["in sync", "in restore", "in callback"]


def test_causes_in_a_circle_hold_up_nothing(job: FakeJob, state: Recorded) -> None:
    """A program may raise an error from one that was raised from it."""
    errors = [BackendError("one"), BackendError("another")]
    errors[0].__cause__, errors[1].__cause__ = errors[1], errors[0]
    assert Loop(job, state).run(raising(errors[0], None)) == "trained"
    assert all(error.__traceback__ is None for error in errors)


def test_an_update_loses_no_step(context: Context, job: FakeJob) -> None:
    """Horovod's plain attributes go back to the last commit, and its model does not (#3399, #3143)."""
    state = Recorded(context, job.log, step=0)
    seen = []

    def train() -> None:
        seen.append(state.step)
        state.step += 5
        if len(seen) == 1:
            job.announce(1)
        state.check_host_updates()

    Loop(job, state).run(train)
    assert seen == [0, 5]
    assert job.asked[0].error is None
    assert "restore" not in job.log
    assert job.log[job.log.index("again") - 1] == "save"


def test_state_is_synced_also_after_removals(job: FakeJob, state: Recorded) -> None:
    """Horovod's workers decide for themselves whether to sync: those that do wait for ever for those that do not
    (#3494)."""
    Loop(job, state).run(raising(HostsUpdatedInterrupt(skip_sync=True), None))
    assert job.log.count("sync") == 2


def test_an_update_that_was_withdrawn_interrupts_nothing(job: FakeJob, state: Recorded) -> None:
    """Horovod resets for hosts that came and went (#1872)."""

    def train() -> str:
        job.announce(2)
        job.announce(0)
        assert not state._host_messages.empty()
        state.commit()
        assert state._host_messages.empty()
        return "trained"

    assert Loop(job, state).run(train) == "trained"
    assert job.asked == []


def test_newcomers_run_reset_callbacks_and_members_of_the_first_epoch_do_not(context: Context) -> None:
    for epoch, called in ((0, []), (3, ["callback"])):
        job = FakeJob([placement(epoch)])
        state = Recorded(context, job.log, step=0)
        state.register_reset_callbacks([lambda job=job: job.log.append("callback")])
        Loop(job, state).run(raising(None))
        assert [entry for entry in job.log if entry == "callback"] == called


def test_serials_count_saves_of_any_class_once(context: Context, job: FakeJob) -> None:
    state = Recorded(context, job.log, step=0)
    assert state._progress.serial == 0

    def train() -> None:
        if not job.asked:
            state.save()
            state.commit()
            raise PeerLostError("lost", rank=1)

    Loop(job, state).run(train)
    assert job.asked[0].serial == 0 + 2  # the sync's is 0 on all workers
    assert state._progress.serial == 3


def test_commits_are_counted_for_the_page_and_other_saves_are_not(context: Context, job: FakeJob) -> None:
    state = Recorded(context, job.log, step=0)
    before, _ = process.group_counters().saves.get("commit", (0, 0.0))

    def train() -> None:
        state.commit()
        state.save()
        state.check_host_updates()
        state.commit()

    Loop(job, state).run(train)
    assert process.group_counters().saves["commit"][0] == before + 2


def test_a_worker_that_has_never_had_the_state_says_so(context: Context) -> None:
    job = FakeJob([placement(0), placement(1)])
    state = Recorded(context, job.log, step=0)
    failing = [PeerLostError("in the sync", rank=1)]

    class Failing(Recorded):
        def sync(self) -> None:
            if failing:
                raise failing.pop()
            super().sync()

    state = Failing(context, job.log, step=0)
    Loop(job, state).run(raising(None))
    assert [asked.serial for asked in job.asked] == [-1]


def test_equal_states_have_equal_digests_and_others_do_not(context: Context) -> None:
    def digest(**values: Any) -> str:
        return Recorded(context, [], **values)._digest()

    assert digest(a=1, b=[1.5, "x"]) == digest(a=1, b=[1.5, "x"])
    assert (
        len({digest(a=1), digest(a=2), digest(a=1.0), digest(b=1), digest(a=[1]), digest(a=(1,)), digest(a="1")}) == 7
    )


def test_failing_three_times_in_one_place_ends_the_job(
    job: FakeJob, state: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [BackendError(f"number {n}") for n in range(5)]
    with pytest.raises(BackendError, match="number 2"), caplog.at_level(logging.ERROR):
        Loop(job, state).run(raising(*errors))
    assert job.log.count("again") == 3
    assert "have failed 3 times since the last commit" in caplog.text


def test_a_commit_in_between_is_a_new_beginning(context: Context, job: FakeJob, state: Recorded) -> None:
    left = [BackendError(f"number {n}") for n in range(6)]

    def train() -> str:
        if not left:
            return "trained"
        if len(left) in (2, 4):
            state.commit()
        raise left.pop()

    assert Loop(job, state).run(train) == "trained"


def test_other_members_are_a_new_beginning(context: Context) -> None:
    job = FakeJob([placement(epoch, pid=100 if epoch < 3 else 200) for epoch in range(8)])
    state = Recorded(context, job.log, step=0)
    assert Loop(job, state).run(raising(*[BackendError("again") for _ in range(5)], None)) == "trained"


def test_a_worker_whose_host_was_removed_leaves_with_0_and_one_line(
    state: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    job = FakeJob([placement(), DismissedError("host h2 was removed", fate="removed")])
    with pytest.raises(SystemExit) as left, caplog.at_level(logging.WARNING):
        Loop(job, state).run(raising(HostsUpdatedInterrupt()))
    assert left.value.code == 0
    assert [record.getMessage() for record in caplog.records] == ["host h2 was removed; this worker leaves the job"]


def test_who_comes_back_after_the_end_raises_what_led_there(state: Recorded) -> None:
    lost = PeerLostError("lost", rank=1)
    dismissed = DismissedError("over: rank 0 has finished", fate="over")
    with pytest.raises(PeerLostError) as caught:
        Loop(FakeJob([placement(), dismissed]), state).run(raising(lost))
    assert caught.value is lost
    assert caught.value.__cause__ is dismissed


@pytest.mark.parametrize("fate", ["failed", "over"])
def test_a_job_that_has_failed_says_so(state: Recorded, fate: str) -> None:
    reason: BaseException = PeerLostError("lost", rank=1) if fate == "failed" else HostsUpdatedInterrupt()
    with pytest.raises(DismissedError, match="because"):
        Loop(FakeJob([placement(), DismissedError("because", fate=fate)]), state).run(raising(reason))


def test_a_server_that_is_gone_ends_the_worker(state: Recorded) -> None:
    with pytest.raises(RendezvousError, match="gone"):
        Loop(FakeJob([placement(), RendezvousError("gone")]), state).run(raising(PeerLostError("lost", rank=1)))


def test_errors_of_a_framework_may_stand_for_failures(job: FakeJob, state: Recorded) -> None:
    def failure(error: BaseException) -> HorovodInternalError | None:
        return PeerLostError("behind it", rank=1) if "unknown" in str(error) else None

    assert Loop(job, state, failure).run(raising(RuntimeError("unknown"), None)) == "trained"
    assert isinstance(job.asked[0].error, PeerLostError)
    with pytest.raises(RuntimeError, match="other"):
        Loop(job, state, failure).run(raising(RuntimeError("other")))


def test_what_a_failed_function_worked_on_is_let_go(job: FakeJob, state: Recorded) -> None:
    """Horovod's failed operations keep memory (#3109)."""
    import weakref

    class Memory:
        pass

    held: list[weakref.ref[Memory]] = []

    def train() -> str:
        if held:
            assert held[0]() is None
            return "trained"
        memory = Memory()
        held.append(weakref.ref(memory))
        raise BackendError("the plane")

    job.asked = Forgetful()
    assert Loop(job, state).run(train) == "trained"


class Forgetful(list[Any]):
    def append(self, _: Any) -> None:
        pass


def test_in_a_job_of_fixed_size_errors_pass_through(context: Context) -> None:
    log: list[str] = []
    state = Recorded(context, log, step=1)
    calls = []

    def train(state: State, by: int, *, to: str) -> str:
        calls.append((by, to))
        if to == "fail":
            raise PeerLostError("lost", rank=1)
        return to

    elastic = run_fn(train, lambda: calls.append("reset"))
    assert elastic(state, 1, to="here") == "here"
    assert log == ["sync", "save"]
    with pytest.raises(PeerLostError):
        elastic(state, 1, to="fail")
    assert calls == [(1, "here"), (1, "fail")]
    assert elastic.__name__ == "train"


def test_a_function_is_given_a_state() -> None:
    with pytest.raises(InvalidArgumentError, match=r"first, not a dict: .* or hvdgloo\.elastic\.ObjectState"):
        run_fn(lambda state: None)({})


def test_announced_updates_reach_states_and_listeners(job: FakeJob, state: Recorded) -> None:
    heard: list[int] = []

    class Listener:
        def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
            heard.append(update_res)

    listener = Listener()
    notification_manager.init()
    notification_manager.register_listener(listener)
    try:

        def train() -> str:
            if not job.asked:
                assert state._host_messages.empty()
                job.announce(3)
                assert not state._host_messages.empty()
                with pytest.raises(HostsUpdatedInterrupt) as update:
                    state.check_host_updates()
                assert not update.value.skip_sync
                raise update.value
            assert state._host_messages.empty()
            return "trained"

        assert Loop(job, state).run(train) == "trained"
        assert heard == [3]
    finally:
        notification_manager.remove_listener(listener)
    job.announce(1)
    assert heard == [3]


def test_listeners_are_told_once() -> None:
    heard: list[int] = []

    class Listener:
        def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
            heard.append(update_res)

    manager, listener = NotificationManager(), Listener()
    manager.register_listener(listener)
    manager.register_listener(listener)
    manager.handle_hosts_updated(1.0, 2)
    manager.remove_listener(listener)
    manager.handle_hosts_updated(2.0, 2)
    assert heard == [2]


def test_programs_may_announce_updates_themselves(state: Recorded) -> None:
    state.on_hosts_updated(5.0, 1)
    with pytest.raises(HostsUpdatedInterrupt) as update:
        state.commit()
    assert update.value.skip_sync
    state.on_hosts_updated(4.0, 2)
    state.check_host_updates()
    state._last_updated_timestamp = 0
    state.on_hosts_updated(4.0, 2)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
