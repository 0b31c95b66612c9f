"""Small blocking allreduces that ranks of one host offer to each other, without an order from rank 0."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends.shm.lane import Lane
from hvdgloo._backends.shm.segment import LISTENING
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import global_process_set
from hvdgloo._collectives.spec import reduction
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Request
from hvdgloo._engine.offering import Offers
from hvdgloo._job.context import Context
from hvdgloo.errors import HorovodInternalError, MismatchError
from hvdgloo.types import Buffer, Collective, DType, ReduceOp
from tests.support.frameworks import load
from tests.support.threads import Task
from tests.support.world import MakeWorld, World, closed_later

SIZE = 3


@pytest.fixture
def world() -> Iterator[MakeWorld]:
    with closed_later(lambda size=SIZE, backend="shm", **settings: World(size, backend, **settings)) as make:
        yield make


frontend_of = load("numpy").frontend


def member_of(context: Context) -> Member:
    return context.engine._member


def total(frontend: Frontend[Any], value: float, name: str | None = "x") -> list[float]:
    result: list[float] = frontend.allreduce(np.full(3, value), op=ReduceOp.SUM, name=name).tolist()
    return result


def test_what_all_ranks_wait_for_needs_no_order(world: MakeWorld) -> None:
    def body(context: Context) -> tuple[int, int]:
        frontend = frontend_of(context)
        for step in range(20):
            assert total(frontend, step + context.rank) == [3 * step + 3] * 3
        return member_of(context)._ordered, member_of(context).turn

    assert world().run(body) == [(1, 19)] * SIZE  # the first call agrees upon the number


def test_calls_without_names_need_no_order(world: MakeWorld) -> None:
    """And are shown under the automatic names that they have everywhere else."""

    def body(context: Context) -> tuple[int, int, str]:
        frontend = frontend_of(context)
        for step in range(20):
            assert total(frontend, float(step + context.rank), None) == [3 * step + 3] * 3
            assert frontend.allreduce(np.full(2, 1.0), op=ReduceOp.SUM).tolist() == [3.0] * 2
        handle = frontend.start(reduction(None, ReduceOp.SUM, 1.0, 1.0, global_process_set), [np.ones(3)], waits=True)
        handle.wait()
        return member_of(context)._ordered, member_of(context).turn, handle.name

    assert world().run(body) == [(2, 39, "allreduce.noname.41")] * SIZE


def test_calls_without_names_match_in_order_however_ranks_make_them(world: MakeWorld) -> None:
    """Some wait and some do not, some calls are made by an offer and some by an order, and ranks join."""

    def body(context: Context) -> int:
        frontend, rng = frontend_of(context), random.Random(context.rank)
        schedule = random.Random(7)
        for round_ in range(4):
            for step in range(30):
                count = schedule.choice((1, 3, 5))
                value = np.full(count, float(step + context.rank))
                if schedule.random() < 0.2 and rng.random() < 0.5:
                    result = frontend.synchronize(frontend.allreduce_async(value, op=ReduceOp.SUM))
                else:
                    result = frontend.allreduce(value, op=ReduceOp.SUM)
                assert result.tolist() == [3 * step + 3] * count
            if context.rank != round_:
                assert total(frontend, 1.0, None)[0] in (2.0, 3.0)
            frontend.join()
        return member_of(context).turn

    turns = world().run(body)
    assert len(set(turns)) == 1
    assert turns[0] > 10


def test_ranks_whose_calls_without_names_disagree_get_the_error_and_go_on(world: MakeWorld) -> None:
    def body(frontend: Frontend[Any]) -> None:
        for _ in range(3):
            for count in (3, 4):
                assert frontend.allreduce(np.ones(count), op=ReduceOp.SUM).tolist() == [3.0] * count
            with pytest.raises(MismatchError, match=r"allreduce\.noname\.\d+: ranks disagree about its shape"):
                frontend.allreduce(np.ones(3 + (frontend.rank() == 2)), op=ReduceOp.SUM)

    world().run(body, frontend_of)


@pytest.mark.parametrize("pipes", [False, True])
def test_where_numbers_travel_through_pipes_everything_is_ordered(world: MakeWorld, pipes: bool) -> None:
    def body(context: Context) -> int:
        frontend = frontend_of(context)
        for _ in range(4):
            total(frontend, 1.0)
        return member_of(context).turn

    assert world(backend="shm-pipes" if pipes else "shm").run(body) == [0 if pipes else 3] * SIZE


def test_a_rank_that_does_not_wait_has_it_ordered_for_all(world: MakeWorld) -> None:
    """The ranks that do not wait change from step to step, so that offers are made and declined in turn."""

    def body(context: Context) -> int:
        frontend = frontend_of(context)
        for step in range(130):
            value = np.full(3, float(step + context.rank))
            if 1 <= step < 64 and step % SIZE == context.rank:
                handle = frontend.allreduce_async(value, op=ReduceOp.SUM, name="x")
                result = frontend.synchronize(handle)
            else:
                result = frontend.allreduce(value, op=ReduceOp.SUM, name="x")
            assert result.tolist() == [3 * step + 3] * 3
        return member_of(context).turn

    turns = world().run(body)
    assert len(set(turns)) == 1
    assert turns[0] >= 60, "once all ranks wait again, they offer again"


def test_a_rank_that_joins_is_not_waited_for(world: MakeWorld) -> None:
    joined = threading.Event()

    def body(context: Context) -> int:
        frontend = frontend_of(context)
        for round_ in range(3):
            for _ in range(3):
                assert total(frontend, 1.0) == [3.0] * 3
            if context.rank == round_:
                frontend.join()
            else:
                assert total(frontend, 1.0) == [2.0] * 3
                assert total(frontend, 1.0) == [2.0] * 3
                frontend.join()
        joined.set()
        assert total(frontend, 1.0) == [3.0] * 3
        return member_of(context).turn

    turns = world().run(body)
    assert len(set(turns)) == 1
    assert turns[0] > 0


def test_offers_that_were_made_before_a_rank_joined_are_ordered(world: MakeWorld) -> None:
    made = threading.Semaphore(0)
    original = Offers.attend

    def attend(self: Offers, handle: Handle) -> None:
        made.release()
        original(self, handle)

    def body(frontend: Frontend[Any]) -> None:
        for _ in range(2):
            total(frontend, 1.0)
        if frontend.rank() == 0:
            for _ in range(SIZE - 1):
                assert made.acquire(timeout=10)
            frontend.join()
        else:
            assert total(frontend, 1.0) == [2.0] * 3
            frontend.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offers, "attend", attend)
        world().run(body, frontend_of)


def test_ranks_that_disagree_about_the_kind_get_the_error_and_go_on(world: MakeWorld) -> None:
    def body(frontend: Frontend[Any]) -> None:
        for _ in range(3):
            assert total(frontend, 1.0) == [3.0] * 3
            call = partial(frontend.broadcast, np.ones(3), 0) if frontend.rank() == 1 else partial(total, frontend, 1.0)
            with pytest.raises(MismatchError, match="ranks disagree about the kind of collective"):
                call(name="x")

    world().run(body, frontend_of)


def test_ranks_that_disagree_about_the_shape_get_the_error_and_go_on(world: MakeWorld) -> None:
    def body(frontend: Frontend[Any]) -> None:
        for _ in range(3):
            assert total(frontend, 1.0) == [3.0] * 3
            with pytest.raises(MismatchError, match="ranks disagree about its shape"):
                frontend.allreduce(np.ones(3 + (frontend.rank() == 2)), op=ReduceOp.SUM, name="x")

    world().run(body, frontend_of)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_results_are_those_that_an_order_gives(world: MakeWorld, op: ReduceOp) -> None:
    dtypes = [dtype for dtype in DType if not (dtype is DType.BOOL and op is ReduceOp.AVERAGE)]

    def body(context: Context) -> None:
        frontend = frontend_of(context)
        rng = np.random.default_rng(context.rank)
        for dtype in dtypes:
            if dtype.name in ("BFLOAT16",):
                continue
            for count in (1, 1000):
                array = (rng.random(count) * 100).astype(dtype.numpy_dtype)
                scaled = dtype in (DType.FLOAT32, DType.FLOAT64) and op is ReduceOp.SUM
                factors = {"prescale_factor": 1.7, "postscale_factor": 0.3} if scaled else {}
                name = f"{dtype.name}.{count}"
                first = frontend.allreduce(array, op=op, name=name, **factors)
                before = member_of(context).turn
                again = frontend.allreduce(array, op=op, name=name, **factors)
                assert first.tobytes() == again.tobytes(), name
                assert member_of(context).turn - before == (dtype is not DType.FLOAT16), name

    world().run(body)


@pytest.mark.parametrize("name", ["x", None])
def test_a_barrier_and_small_broadcasts_and_allgathers_need_no_order(world: MakeWorld, name: str | None) -> None:
    def body(context: Context) -> tuple[int, int]:
        frontend, rank = frontend_of(context), context.rank
        member = member_of(context)
        for dtype in (DType.FLOAT16, DType.INT64, DType.BOOL):
            for count in (1, 6):
                label = name and f"{dtype.name}.{count}"
                values = np.arange(count * 2).reshape(count, 2)
                arrays = [(values * (r + 1)).astype(dtype.numpy_dtype) for r in range(SIZE)]
                for again in range(3):
                    turn = member.turn
                    sent = frontend.broadcast(arrays[rank], 1, name=label)
                    gathered = frontend.allgather(arrays[rank], name=label)
                    own = arrays[rank].copy()
                    frontend.broadcast_(own, 2, name=label and f"{label}.in_place")
                    assert sent.tobytes() == arrays[1].tobytes()
                    assert own.tobytes() == arrays[2].tobytes()
                    assert gathered.tobytes() == b"".join(each.tobytes() for each in arrays)
                    assert gathered.shape == (count * SIZE, 2)
                    assert member.turn - turn == (3 if again else 0)
        for again in range(3):
            turn = member.turn
            frontend.barrier()
            assert member.turn - turn == (again > 0)
        return member.turn, member._ordered

    assert len(set(world().run(body))) == 1


@pytest.mark.parametrize("name", ["x", None])
def test_parts_whose_sizes_change_are_gathered_as_ever(world: MakeWorld, name: str | None) -> None:
    def body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        for rows in ((2, 2, 2), (2, 2, 2), (2, 3, 2), (2, 3, 2), (2, 2, 2), (3, 3, 3), (2, 3, 2), (2, 2, 2), (0, 1, 1)):
            for _ in range(2):
                gathered = frontend.allgather(np.full((rows[rank], 2), float(rank)), name=name)
                assert gathered[:, 0].tolist() == [float(r) for r in range(SIZE) for _ in range(rows[r])]

    world().run(body)


def test_roots_that_differ_are_an_error_and_the_ranks_go_on(world: MakeWorld) -> None:
    def body(frontend: Frontend[Any]) -> None:
        for name in ("x", None):
            for _ in range(2):
                for root in (0, 1):
                    for _ in range(2):
                        assert frontend.broadcast(np.full(3, frontend.rank()), root, name=name).tolist() == [root] * 3
                with pytest.raises(MismatchError, match="ranks disagree about its root rank"):
                    frontend.broadcast(np.ones(3, int), int(frontend.rank() == 2), name=name)

    world().run(body, frontend_of)


def test_a_broadcast_while_a_rank_has_joined_is_an_error(world: MakeWorld) -> None:
    def body(frontend: Frontend[Any]) -> None:
        for _ in range(3):
            assert frontend.broadcast(np.full(3, frontend.rank()), 1, name="x").tolist() == [1] * 3
        if frontend.rank() != 2:
            with pytest.raises(MismatchError, match=r"rank 2 called join\(\)"):
                frontend.broadcast(np.full(3, frontend.rank()), 1, name="x")
            frontend.barrier()
        frontend.join()
        for _ in range(3):
            frontend.barrier()

    world().run(body, frontend_of)


def test_a_barrier_ends_after_what_was_ordered_before_it(world: MakeWorld) -> None:
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def ready() -> None:
        begun.release()
        assert goes_on.wait(10)

    def body(context: Context) -> None:
        frontend = frontend_of(context)
        for _ in range(3):
            frontend.barrier()
        large = Buffer.of_array(np.ones(1 << 20))
        request = Request("allreduce.large", Collective.ALLREDUCE, (large.spec,))
        handle = context.engine.submit(request, [large], [large], ready=ready)
        if context.rank == 0:
            for _ in range(SIZE):
                assert begun.acquire(timeout=10)
            threading.Timer(0.05, goes_on.set).start()
        else:
            while member_of(context).has_pending:
                time.sleep(0.001)
        frontend.barrier()
        assert handle.done()

    world().run(body)


def test_tensors_that_are_too_large_are_ordered(world: MakeWorld) -> None:
    def body(context: Context) -> list[int]:
        frontend, turns = frontend_of(context), []
        for nbytes in (Lane.most_bytes, Lane.most_bytes + 8):
            for _ in range(2):
                result = frontend.allreduce(np.full(nbytes // 8, 1.0), op=ReduceOp.SUM, name=str(nbytes))
                assert (result == SIZE).all()
            turns.append(member_of(context).turn)
        return turns

    assert world().run(body) == [[1, 1]] * SIZE


def test_they_are_counted_like_others(world: MakeWorld) -> None:
    def body(context: Context) -> tuple[int, int]:
        counters = context.engine.counters
        assert counters is not None
        frontend = frontend_of(context)
        total(frontend, 1.0)
        traffic = counters.traffic["shared memory", 0]
        before = traffic.operations, traffic.bytes
        for _ in range(10):
            if context.rank == 1:
                time.sleep(0.002)
            total(frontend, 1.0)
        assert member_of(context).turn == 10
        if context.rank == 0:
            assert counters.lateness is not None
            late = {each.rank: each.count for each in counters.lateness.totals().ranks}
            assert late[1] >= 8, late
            assert counters.waiting >= 0.01
        return traffic.operations - before[0], traffic.bytes - before[1]

    assert world().run(body) == [(10, 240)] * SIZE


@pytest.mark.parametrize("name", ["x", None])
def test_a_rank_that_does_not_come_is_reported(world: MakeWorld, name: str | None) -> None:
    shown = "allreduce.x" if name else "allreduce.noname.3"
    reported = threading.Event()

    def body(frontend: Frontend[Any]) -> None:
        for _ in range(2):
            total(frontend, 1.0, name)
        if frontend.rank() == 1:
            assert reported.wait(10)
        if frontend.rank() == 2:
            while not (waiting := made.contexts[0].engine.overdue(0.0)[0]):
                time.sleep(0.001)
            reported.set()
            assert [(each.name, each.submitted, each.missing) for each in waiting] == [(shown, (0,), (1, 2))]
        total(frontend, 1.0, name)

    made = world()
    made.run(body, frontend_of)
    deadline = time.monotonic() + 10
    while made.contexts[0].engine._coordinator._has_pending:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "rank 0 goes on waiting for an operation that all ranks have completed"


def test_during_a_timeline_everything_is_ordered(world: MakeWorld, tmp_path: Any) -> None:
    def body(context: Context) -> list[int]:
        frontend, turns = frontend_of(context), []
        total(frontend, 1.0)
        for on in (True, False):
            if context.rank == 0:
                if on:
                    context.engine.timelines.start(str(tmp_path / "timeline.json"))
                else:
                    context.engine.timelines.stop()
            frontend.barrier()
            total(frontend, 1.0, "y")
            before = member_of(context).turn
            total(frontend, 1.0, "y" if on else "z")
            total(frontend, 1.0, "y" if on else "z")
            turns.append(member_of(context).turn - before)
        return turns

    assert world().run(body) == [[0, 1]] * SIZE
    assert "allreduce.y" in (tmp_path / "timeline.json").read_text()


def test_a_rank_that_leaves_after_the_last_operation_does_not_fail_it_for_others(world: MakeWorld) -> None:
    """The last rank completes it and shuts down before the others have looked again."""
    armed, asleep, ended = threading.Event(), threading.Semaphore(0), threading.Event()
    original = Lane.sleep

    def sleep(self: Lane, place: int, word: int, seconds: float, stop: Callable[[], bool] | None = None) -> None:
        original(self, place, word, seconds, stop)
        if stop is not None and armed.is_set():  # not the moment before rank 0 is told
            asleep.release()
            assert ended.wait(10)

    def body(context: Context) -> None:
        frontend = frontend_of(context)
        for _ in range(2):
            total(frontend, 1.0)
        frontend.barrier()
        if context.rank == 1:
            armed.set()
            for each in (made.contexts[0], made.contexts[2]):
                while (own := member_of(each).own_offer) is None or not own.is_told:
                    time.sleep(0.001)
        assert armed.wait(10)
        result = total(frontend, 1.0)
        if context.rank == 1:
            for _ in range(SIZE - 1):
                assert asleep.acquire(timeout=10)
            closing = Task(context.close)
            for each in made.contexts:
                while each.engine.error is None:
                    time.sleep(0.001)
            ended.set()
            closing.result()
        assert result == [3.0] * 3

    with pytest.MonkeyPatch.context() as patch:
        made = world()
        patch.setattr(Lane, "sleep", sleep)
        made.run(body)


def test_an_offer_whose_thread_was_interrupted_is_completed_by_the_next_operation(world: MakeWorld) -> None:
    original = Offers._attend

    def attend(self: Offers, handle: Handle, *, may_be_interrupted: bool) -> bool:
        if self._member._rank == 0 and handle.name == "allreduce.y" and armed.is_set() and not interrupted:
            interrupted.append(handle)
            raise ZeroDivisionError
        return original(self, handle, may_be_interrupted=may_be_interrupted)

    interrupted: list[Handle] = []
    armed = threading.Event()

    def body(frontend: Frontend[Any]) -> None:
        for _ in range(2):
            for name in "xy":
                total(frontend, 1.0, name)
        if frontend.rank() == 0:
            armed.set()
            with pytest.raises(ZeroDivisionError):
                total(frontend, 1.0, "y")
        else:
            while not interrupted:
                time.sleep(0.001)
            assert total(frontend, 1.0, "y") == [3.0] * 3
        for _ in range(3):
            assert total(frontend, 1.0) == [3.0] * 3
        if frontend.rank() == 0:
            assert interrupted[0].done()
            assert interrupted[0].outputs[0].array().tolist() == [3.0] * 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offers, "_attend", attend)
        world().run(body, frontend_of)


def test_a_rank_that_sleeps_is_woken_by_the_last_offer(world: MakeWorld) -> None:
    """And not by its next look at the others, half a second later."""
    made = world(2)

    def is_asleep(context: Context) -> bool:
        own, offers = member_of(context).own_offer, context.engine._offers
        return own is not None and own.is_told and offers is not None and offers._lane._own[LISTENING] == 1  # type: ignore[attr-defined]

    def body(context: Context) -> list[float]:
        frontend, times = frontend_of(context), []
        total(frontend, 1.0)
        for _ in range(4):
            while context.rank == 1 and not is_asleep(made.contexts[0]):
                time.sleep(0.001)
            times.append(time.monotonic())
            total(frontend, 1.0)
            times.append(time.monotonic())
        return times

    first, last = made.run(body)
    assert min(woken - begun for woken, begun in zip(first[1::2], last[::2], strict=True)) < 0.2


def test_closing_ends_a_thread_that_waits_for_offers(world: MakeWorld) -> None:
    made = world()

    def body(context: Context) -> None:
        frontend = frontend_of(context)
        for _ in range(2):
            total(frontend, 1.0)
        if context.rank == 2:
            while any(member_of(each).own_offer is None for each in made.contexts[:2]):
                time.sleep(0.001)
            context.close()
        else:
            with pytest.raises(HorovodInternalError):
                total(frontend, 1.0)
            context.close()
            with pytest.raises(HorovodInternalError):
                total(frontend, 1.0)

    made.run(body)
