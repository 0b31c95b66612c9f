"""Process sets, alltoall, reducescatter and join, as users of any front-end call them.

Expectations are computed in numpy from rank and size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.types import DType, ReduceOp
from tests.support.arrays import assert_close, assert_same
from tests.support.frameworks import Framework
from tests.support.world import MakeWorld

SIZE = 3


class TestProcessSets:
    def test_a_registered_set_knows_its_place(self, world: MakeWorld, framework: Framework) -> None:
        def rank_body(frontend: Frontend[Any]) -> None:
            some = ProcessSet([2, 0])
            assert frontend.add_process_set(some) is some
            assert (some.process_set_id, some.size(), some.ranks) == (1, 2, [0, 2])
            assert some.included() is (frontend.rank() != 1)
            if frontend.rank() == 1:
                with pytest.raises(InvalidArgumentError, match="rank 1 is not a member"):
                    some.rank()
                with pytest.raises(InvalidArgumentError, match="rank 1 is not in process set 1"):
                    frontend.allreduce(framework.float64([1.0]), process_set=some)
            else:
                assert some.rank() == frontend.rank() // 2
                result = frontend.allreduce(framework.float64([float(frontend.rank())]), process_set=some)
                assert framework.array(result).tolist() == [1.0]

        world(SIZE).run(rank_body, framework.frontend)

    def test_wrong_sets_are_refused_here_alone(self, world: MakeWorld, framework: Framework) -> None:
        def rank_body(frontend: Frontend[Any]) -> None:
            pair = frontend.add_process_set([0, 1])
            for wrong, message in (
                ([0, 1, 2], "process set 0 has the same ranks"),
                ([1, 0], "process set 1 has the same ranks"),
                ([0, 3], r"ranks that do not exist; the job's are 0 to 2"),
                (pair, "is already registered"),
            ):
                with pytest.raises(InvalidArgumentError, match=message):
                    frontend.add_process_set(wrong)
            assert frontend.remove_process_set(ProcessSet([0])) is False
            assert frontend.remove_process_set(global_process_set) is False
            assert frontend.remove_process_set(pair) is True
            assert pair.process_set_id is None
            assert frontend.remove_process_set(pair) is False
            with pytest.raises(InvalidArgumentError, match="not registered"):
                frontend.allreduce(framework.float64([1.0]), process_set=pair)
            assert frontend.add_process_set(pair).process_set_id == 1

        world(SIZE).run(rank_body, framework.frontend)

    def test_ranks_that_disagree_learn_it(self, world: MakeWorld, framework: Framework) -> None:
        def rank_body(context: Context) -> None:
            with pytest.raises(MismatchError, match="ranks of the process set"):
                framework.frontend(context).add_process_set([0, 2] if context.rank else [0, 1])

        world(SIZE).run(rank_body)

    def test_automatic_names_count_for_each_set(self, world: MakeWorld, framework: Framework) -> None:
        """Ranks that are in different sets make different numbers of calls; their names must not drift apart."""

        def rank_body(frontend: Frontend[Any]) -> None:
            some = frontend.add_process_set([0, 1])
            tensor = framework.float64([1.0])
            if some.included():
                for _ in range(3):
                    frontend.allreduce(tensor, process_set=some)
            assert framework.array(frontend.allreduce(tensor, op=ReduceOp.SUM)).tolist() == [3.0]

        world(SIZE).run(rank_body, framework.frontend)

    def test_automatic_names_begin_again_in_a_set_that_has_a_former_ones_number(
        self, world: MakeWorld, framework: Framework
    ) -> None:
        def rank_body(frontend: Frontend[Any]) -> None:
            for members in ([0, 2], [1, 2]):
                some = frontend.add_process_set(members)
                if some.included():
                    result = frontend.allreduce(framework.float64([1.0]), op=ReduceOp.SUM, process_set=some)
                    assert framework.array(result).tolist() == [2.0]
                frontend.remove_process_set(some)

        world(SIZE).run(rank_body, framework.frontend)

    def test_a_shut_down_job_leaves_sets_unregistered(self, world: MakeWorld, framework: Framework) -> None:
        sets: list[ProcessSet] = []
        made = world(2)
        made.run(lambda context: sets.append(framework.frontend(context).add_process_set([0])))
        made.close()
        assert [each.process_set_id for each in sets] == [None, None]


class TestAlltoall:
    def test_even_division_is_the_default(self, world: MakeWorld, framework: Framework) -> None:
        def rank_body(context: Context) -> None:
            tensor = framework.float64(np.arange(6.0).reshape(6, 1) + 10 * context.rank)
            received = framework.frontend(context).alltoall(tensor)
            own = np.arange(6.0)[2 * context.rank : 2 * context.rank + 2]
            expected = np.concatenate([own + 10 * source for source in range(SIZE)]).reshape(-1, 1)
            assert_same(framework.array(received), expected)

        world(SIZE).run(rank_body)

    @pytest.mark.parametrize("dtype", list(DType), ids=str)
    def test_every_type(self, world: MakeWorld, framework: Framework, dtype: DType) -> None:
        framework.tensor(0, dtype)  # skips types that the framework has not got

        def rank_body(context: Context) -> None:
            received = framework.frontend(context).alltoall(framework.tensor(np.arange(SIZE) + context.rank, dtype))
            assert framework.adapter.describe(received).dtype is dtype
            expected = (np.arange(SIZE) + context.rank).astype(bool if dtype is DType.BOOL else float)
            assert_same(framework.array(received), expected)

        world(SIZE).run(rank_body)

    @pytest.mark.parametrize("kind", ["list", "array", "tensor"])
    def test_splits(self, world: MakeWorld, framework: Framework, kind: str) -> None:
        def rank_body(frontend: Frontend[Any]) -> None:
            splits: Any = [frontend.rank(), 0, 2]
            if kind == "array":
                splits = np.array(splits, np.int32)
            elif kind == "tensor":
                splits = framework.tensor(splits, DType.INT32)
            tensor = framework.float64(np.arange(7.0) + 10 * frontend.rank())  # the rest of the rows is not sent
            received, counts = frontend.alltoall(tensor, splits=splits, name="x")
            pieces = []
            for source in range(SIZE):
                rows = np.arange(7.0) + 10 * source
                shares = {0: rows[:source], 1: rows[:0], 2: rows[source : source + 2]}
                pieces.append(shares[frontend.rank()])
            assert_same(framework.array(received), np.concatenate(pieces))
            assert framework.adapter.describe(counts).dtype is DType.INT32
            assert framework.array(counts).tolist() == [len(piece) for piece in pieces]
            pair = frontend.synchronize(frontend.alltoall_async(tensor, splits=splits))
            assert isinstance(pair, tuple)
            again, numbers = pair
            assert_same(framework.array(again), np.concatenate(pieces))
            assert framework.array(numbers).tolist() == [len(piece) for piece in pieces]

        world(SIZE).run(rank_body, framework.frontend)

    @pytest.mark.parametrize(
        ("splits", "message"),
        [
            (None, "7 rows cannot be divided evenly among 3 ranks"),
            ([1, 2], "2 splits were given for 3 ranks"),
            ([4, 4, 0], r"splits \[4, 4, 0\] ask for 8 rows, and there are only 7"),
            ([1, -1, 1], "cannot be negative"),
            ([1.0, 1.0, 1.0], "splits are integers in one dimension"),
            ([[1, 1, 1]], "splits are integers in one dimension"),
        ],
    )
    def test_wrong_splits_are_refused_here_alone(
        self, world: MakeWorld, framework: Framework, splits: Any, message: str
    ) -> None:
        def rank_body(context: Context) -> None:
            with pytest.raises(InvalidArgumentError, match=message):
                framework.frontend(context).alltoall(framework.float64(np.ones(7)), splits=splits)

        world(SIZE).run(rank_body)

    def test_a_scalar_has_no_rows(self, world: MakeWorld, framework: Framework) -> None:
        def rank_body(context: Context) -> None:
            with pytest.raises(InvalidArgumentError, match="zero-dimensional"):
                framework.frontend(context).alltoall(framework.float64(1.0))

        world(2).run(rank_body)


class TestReducescatter:
    @pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BOOL], ids=str)
    def test_every_type(self, world: MakeWorld, framework: Framework, dtype: DType) -> None:
        framework.tensor(0, dtype)

        def rank_body(context: Context) -> None:
            tensor = framework.tensor(np.arange(SIZE + 1) + context.rank, dtype)
            for op, factor in ((ReduceOp.SUM, SIZE), (ReduceOp.AVERAGE, 1)):
                result = framework.frontend(context).reducescatter(tensor, op=op)
                assert framework.adapter.describe(result).dtype is dtype
                expected = np.array_split((np.arange(SIZE + 1) + (SIZE - 1) / 2) * factor, SIZE)[context.rank]
                assert_same(framework.array(result).astype(float), expected)

        world(SIZE).run(rank_body)

    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE], ids=lambda op: op.name.lower())
    @pytest.mark.parametrize("rows", [7, 2])
    def test_rows_are_divided(self, world: MakeWorld, framework: Framework, rows: int, op: ReduceOp) -> None:
        whole = np.arange(2.0 * rows).reshape(rows, 2) * SIZE + 3.0
        expected = np.array_split(whole / (SIZE if op is ReduceOp.AVERAGE else 1), SIZE)

        def rank_body(frontend: Frontend[Any]) -> None:
            tensor = framework.float64(np.arange(2.0 * rows).reshape(rows, 2) + frontend.rank())
            result = frontend.reducescatter(tensor, op=op)
            assert_close(framework.array(result), expected[frontend.rank()])
            later = frontend.synchronize(frontend.reducescatter_async(tensor, op=op, prescale_factor=2.0))
            assert_close(framework.array(later), 2 * expected[frontend.rank()])
            group = frontend.grouped_reducescatter([tensor, tensor], op=op, postscale_factor=0.5)
            for member in group:
                assert_close(framework.array(member), expected[frontend.rank()] / 2)
            group = frontend.synchronize(frontend.grouped_reducescatter_async([tensor], op=op))
            assert_close(framework.array(group[0]), expected[frontend.rank()])

        world(SIZE).run(rank_body, framework.frontend)

    def test_compression_and_wrong_operations(self, world: MakeWorld, framework: Framework) -> None:
        def rank_body(frontend: Frontend[Any]) -> None:
            result = frontend.reducescatter(framework.float64(np.ones(3)), compression=framework.compression.fp16)
            assert framework.adapter.describe(result).dtype is DType.FLOAT64
            assert framework.array(result).tolist() == [1.0]
            for op in (ReduceOp.MAX, ReduceOp.ADASUM, 9):
                with pytest.raises(InvalidArgumentError, match="must be Average or Sum"):
                    frontend.reducescatter(framework.float64(np.ones(3)), op=op)
            with pytest.raises(InvalidArgumentError, match="zero-dimensional"):
                frontend.reducescatter(framework.float64(1.0))
            with pytest.raises(MismatchError, match="shape"):
                frontend.reducescatter(framework.float64(np.ones(3 + frontend.rank())))

        world(SIZE).run(rank_body, framework.frontend)


def test_grouped_allgather(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        tensors = [framework.float64(np.full(frontend.rank() + 1, 1.0)), framework.float64(np.full((1, 2), 2.0))]
        for result in (
            frontend.grouped_allgather(tensors),
            frontend.synchronize(frontend.grouped_allgather_async(tensors)),
        ):
            assert framework.array(result[0]).tolist() == [1.0] * 6
            assert framework.array(result[1]).tolist() == [[2.0, 2.0]] * 3
        assert frontend.grouped_allgather([]) == []

    world(SIZE).run(rank_body, framework.frontend)


def test_adasum_is_an_op_of_allreduce(world: MakeWorld, framework: Framework) -> None:
    """Pain 29."""

    def rank_body(frontend: Frontend[Any]) -> None:
        axis = np.zeros(4)
        axis[frontend.rank()] = 1.0
        result = frontend.allreduce(framework.float64(axis), op=ReduceOp.ADASUM)
        assert_close(framework.array(result), [1.0, 1.0, 1.0, 0.0])
        with pytest.raises(InvalidArgumentError, match="Adasum is defined for floating-point tensors"):
            frontend.allreduce(framework.tensor([1, 2], DType.INT64), op=ReduceOp.ADASUM)

    world(SIZE).run(rank_body, framework.frontend)


def test_join_lets_the_others_finish(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> int:
        for step in range(frontend.rank() + 1):
            result = frontend.allreduce(framework.float64([1.0]), op=ReduceOp.SUM, name="x")
            assert framework.array(result).tolist() == [float(SIZE - step)]
        return frontend.join()

    assert world(SIZE).run(rank_body, framework.frontend) == [2, 2, 2]


def test_unnamed_operations_pair_up_after_an_uneven_join(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        pair = frontend.add_process_set([0, 1])
        for _ in range(2):
            for _ in range(frontend.rank() + 1):
                frontend.allreduce(framework.float64([1.0]))
            if frontend.rank() == 1:  # rank 0 has joined, or will
                frontend.allreduce(framework.float64([1.0]), process_set=pair)
            frontend.join()
            gathered = frontend.allgather(framework.float64([float(frontend.rank())]))
            assert framework.array(gathered).tolist() == [0.0, 1.0, 2.0]
            for count in (3.0, 6.0):
                total = frontend.allreduce(framework.float64([count / SIZE]), op=ReduceOp.SUM)
                assert framework.array(total).tolist() == [count]
            if frontend.rank() < 2:
                total = frontend.allreduce(framework.float64([1.0]), op=ReduceOp.SUM, process_set=pair)
                assert framework.array(total).tolist() == [2.0]

    world(SIZE).run(rank_body, framework.frontend)
