"""An operation that is registered once and started again and again, whatever changes between two starts."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import global_process_set
from hvdgloo._collectives.spec import CollectiveSpec, gathering, reduction
from hvdgloo._job.context import Context
from hvdgloo.errors import DuplicateNameError, InvalidArgumentError, MismatchError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.types import Collective, ReduceOp
from tests.support.frameworks import load
from tests.support.threads import at_once
from tests.support.world import MakeWorld

BACKENDS = ("inline", "shm")
SUM = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.SUM)

frontend_of = load("numpy").frontend


def test_shape_and_type_may_change_from_start_to_start(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        operation = frontend_of(context).persistent(SUM, "x")
        for shape, dtype in [((2,), "float32")] * 3 + [((3, 1), "float32"), ((2,), "int64"), ((2,), "float32")]:
            given = np.full(shape, context.rank + 1, dtype)
            (result,) = operation.start([given]).result(10)
            assert (result.shape, result.dtype) == (shape, np.dtype(dtype))
            assert (result == 3).all()
            assert (given == context.rank + 1).all()

    world(2).run(rank_body)


def test_ranks_that_disagree_about_one_start_agree_about_the_next(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        operation = frontend_of(context).persistent(SUM, "x", in_place=True)
        ended: list[object] = []
        for rows in (2, 2, 2 + context.rank, 2):
            pending = operation.start([np.ones(rows, np.float32)])
            try:
                ended.append(pending.result(10)[0].tolist())
            except MismatchError as error:
                ended.append(str(error))
        assert ended[:2] == [[2, 2], [2, 2]]
        assert "disagree about its shape" in str(ended[2])
        assert ended[3] == [2, 2]

    world(2).run(rank_body)


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_agreements_that_are_forgotten_are_made_again(world: MakeWorld, capacity: int) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        operations = [frontend.persistent(SUM, f"x{index}", in_place=True) for index in range(3)]
        for _ in range(6):
            given = [np.full(4, float(index)) for index in range(3)]
            pending = [operation.start([one]) for operation, one in zip(operations, given, strict=True)]
            assert [each.result(10)[0].tolist() for each in pending] == [[0] * 4, [2] * 4, [4] * 4]

    world(2, cache_capacity=capacity).run(rank_body, frontend_of)


def test_it_holds_no_tensor_between_two_starts(world: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        operation = frontend.persistent(SUM, "x", in_place=True)
        for _ in range(3):
            given = np.ones(5)
            alive = weakref.ref(given)
            operation.start([given]).result(10)
            frontend.synchronize(frontend.allreduce_async_(given, name="by its name"))
            frontend.barrier()  # the engine's threads have gone on to something else
            del given
            if alive() is not None:  # a cycle may hold it; looking for cycles takes a tenth of a second
                gc.collect()
            assert alive() is None

    world(2).run(rank_body, frontend_of)


def test_it_goes_on_in_a_job_that_comes_after(world: MakeWorld) -> None:
    """The numbers of an old job stand for other operations in the new one."""
    operations = {}
    jobs: dict[int, Context] = {}

    def first(context: Context) -> None:
        jobs[context.rank] = context
        frontend: Frontend[np.ndarray] = Frontend(NumpyAdapter(), lambda: jobs[context.rank])
        operations[context.rank] = frontend.persistent(SUM, "x")
        for _ in range(3):
            assert operations[context.rank].start([np.ones(2)]).result(10)[0].tolist() == [2, 2]

    def second(context: Context) -> None:
        jobs[context.rank] = context
        other = frontend_of(context).persistent(reduction(None, ReduceOp.MAX, 1.0, 1.0, global_process_set), "other")
        for value in range(3):
            own = operations[context.rank].start([np.full(2, value)])
            assert other.start([np.full(3, value)]).result(10)[0].tolist() == [value] * 3
            assert own.result(10)[0].tolist() == [2 * value] * 2

    world(2).run(first)
    world(2).run(second)


def test_a_set_that_takes_the_number_of_a_removed_one(world: MakeWorld) -> None:
    """An agreement for the old set's members does not apply to the new set."""

    def rank_body(frontend: Frontend[Any]) -> None:
        pair = frontend.add_process_set([0, 1])
        operation = frontend.persistent(SUM._replace(process_set=pair.process_set_id), "x")
        if frontend.rank() < 2:
            for _ in range(3):
                assert operation.start([np.ones(2)]).result(10)[0].tolist() == [2, 2]
        frontend.remove_process_set(pair)
        again = frontend.add_process_set([1, 2])
        assert again.process_set_id == operation.spec.process_set
        if frontend.rank() == 0:
            with pytest.raises(InvalidArgumentError, match="rank 0 is not in process set 1"):
                operation.start([np.ones(2)])
        else:
            assert operation.start([np.full(2, frontend.rank())]).result(10)[0].tolist() == [3, 3]

    world(3).run(rank_body, frontend_of)


def test_it_is_not_started_again_before_it_has_ended(world: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        operation = frontend.persistent(SUM, "x")
        if frontend.rank() == 0:
            pending = operation.start([np.ones(2)])
            with pytest.raises(DuplicateNameError, match=r"allreduce\.x is already in flight"):
                operation.start([np.ones(2)])
            frontend.barrier()
        else:
            frontend.barrier()
            pending = operation.start([np.ones(2)])
        assert pending.result(10)[0].tolist() == [2, 2]

    world(2).run(rank_body, frontend_of)


def test_threads_start_their_own_at_the_same_time(world: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        def start_all(which: int) -> list[float]:
            operation = frontend.persistent(SUM, f"x{which}", in_place=True)
            return [float(operation.start([np.full(3, 1.0 * n)]).result(10)[0][0]) for n in range(20)]

        sums = at_once(*(partial(start_all, which) for which in range(4)))
        assert sums == [[2.0 * n for n in range(20)]] * 4

    world(2).run(rank_body, frontend_of)


def test_rows_of_a_gather_may_change(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        operation = frontend_of(context).persistent(gathering(global_process_set), "x")
        for rows in (1, 1, 2, 1):
            own = np.full((rows + context.rank, 1), context.rank)
            (gathered,) = operation.start([own]).result(10)
            assert gathered.ravel().tolist() == [0] * rows + [1] * (rows + 1)

    world(2).run(rank_body)
