"""Tiny allreduces that travel with the agreement: who sends bytes along, and when they are reduced there."""

from __future__ import annotations

import numpy as np
import pytest

from hvdgloo._backends.kernels import narrow_bfloat16
from hvdgloo._engine import inline
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Execute, Request, Response, Submit, decode, encode
from hvdgloo._engine.negotiation import Negotiator
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec

VALUES = np.array([1.5, -2.0], np.float32)


def request(name: str = "x", *, dtype: DType = DType.FLOAT32, count: int = 2, **options: object) -> Request:
    return Request(name, Collective.ALLREDUCE, (TensorSpec(dtype, (count,)),), **options)  # type: ignore[arg-type]


def operation(asked: Request, values: np.ndarray = VALUES, fence: object = None) -> Submission:
    buffers = [Buffer.of_array(values, spec.dtype) for spec in asked.tensors]
    outputs = [Buffer.of_array(np.zeros_like(values), spec.dtype) for spec in asked.tensors]
    return Submission(PersistentRequest(asked), buffers, outputs, None, fence)  # type: ignore[arg-type]


class TestWhatASubmissionCarries:
    def test_a_single_small_tensor_travels_along(self) -> None:
        member = Member(0, {0: (0, 1)}, 8)
        member.add(operation(request()))
        assert member.drain() == Submit((), (request(),), VALUES.tobytes())

    def test_of_several_operations_none_does(self) -> None:
        member = Member(0, {0: (0, 1)}, 8)
        member.add(operation(request("a")))
        member.add(operation(request("b")))
        submission = member.drain()
        assert submission is not None
        assert submission.payload == b""

    def test_nor_does_one_that_is_not_all_there_is(self) -> None:
        """In a training step they come one by one, and fuse better than they travel along."""
        member = Member(0, {0: (0, 1)}, 8)
        member.add(operation(request("a")))
        assert member.drain() == Submit((), (request("a"),), VALUES.tobytes())
        member.add(operation(request("b")))
        assert member.drain() == Submit((), (request("b"),))
        busy = Member(0, {0: (0, 1)}, 8)
        busy.add(operation(request("a")))
        assert busy.drain(idle=False) == Submit((), (request("a"),))

    @pytest.mark.parametrize(
        "asked",
        [
            request(count=3),
            request(count=0),
            Request("x", Collective.BROADCAST, request().tensors),
            Request("x", Collective.ALLREDUCE, request().tensors * 2),
            Request("x", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (2,), "cuda"),)),
        ],
        ids=["too large", "empty", "another collective", "a group", "on a GPU"],
    )
    def test_nothing_else_does(self, asked: Request) -> None:
        assert not inline.suits(asked, 8)

    def test_memory_that_is_not_ready_yet_is_not_read(self) -> None:
        member = Member(0, {0: (0, 1)}, 8)
        member.add(operation(request(), fence=lambda: None))
        submission = member.drain()
        assert submission is not None
        assert submission.payload == b""


class TestAgreement:
    def test_the_result_comes_with_the_order_to_execute_it(self) -> None:
        negotiation = Negotiator({0: (0, 1)}, 10)
        members = [Member(rank, {0: (0, 1)}, 8) for rank in (0, 1)]
        for numbered in (False, True):
            operations = []
            for rank, member in enumerate(members):
                operations.append(operation(request(op=ReduceOp.SUM), VALUES + rank))
                member.add(operations[rank])
                submission = member.drain()
                assert submission is not None
                assert bool(submission.signatures) is numbered
                received = decode(encode(submission))
                assert isinstance(received, Submit)
                negotiation.absorb(rank, received, 0.0)
            order = decode(encode(negotiation.take()))
            assert isinstance(order, Execute)
            for member, submitted in zip(members, operations, strict=True):
                assert member.accept(order) == []  # nothing is left for the data plane
                (output,) = submitted.handle.wait(0)
                assert output.array().tolist() == (2 * VALUES + 1).tolist()

    def test_only_the_results_that_are_known_are_left_out_of_the_data_plane(self) -> None:
        negotiation = Negotiator({0: (0, 1)}, 10)
        for rank in (0, 1):
            negotiation.absorb(rank, Submit((), (request("large", count=9),)), 0.0)
            negotiation.absorb(rank, Submit((), (request("tiny"),), VALUES.tobytes()), 0.0)
        order = negotiation.take()
        assert order.results == ((1, (2 * VALUES).tobytes()),)
        member = Member(0, {0: (0, 1)}, 0)
        large, tiny = operation(request("large", count=9), np.ones(9, np.float32)), operation(request("tiny"))
        member.add(large)
        member.add(tiny)
        assert [left for _, left in member.accept(order)] == [large]
        assert tiny.handle.done()
        assert not large.handle.done()

    @pytest.mark.parametrize("payloads", [(VALUES.tobytes(), b""), (VALUES.tobytes(), b"1234")])
    def test_unless_everyone_sent_all_bytes_the_data_plane_does_it(self, payloads: tuple[bytes, bytes]) -> None:
        negotiation = Negotiator({0: (0, 1)}, 10)
        for rank, payload in enumerate(payloads):
            negotiation.absorb(rank, Submit((), (request(),), payload), 0.0)
        assert negotiation.take() == Execute((Response(request(), signature=0),))

    @pytest.mark.parametrize("payloads", [(VALUES.tobytes(), b""), (b"", VALUES.tobytes())])
    def test_also_of_a_number(self, payloads: tuple[bytes, bytes]) -> None:
        negotiation = Negotiator({0: (0, 1)}, 10)
        for rank in (0, 1):
            negotiation.absorb(rank, Submit((), (request(),)), 0.0)
        negotiation.take()
        for rank, payload in enumerate(payloads):
            negotiation.absorb(rank, Submit((0,), (), payload), 0.0)
        assert negotiation.take() == Execute((0,))
        for rank in (0, 1):  # nothing is left of it
            negotiation.absorb(rank, Submit((0,), (), VALUES.tobytes()), 0.0)
        assert negotiation.take() == Execute((0,), results=((0, (2 * VALUES).tobytes()),))

    def test_bytes_that_arrived_are_kept_when_a_number_is_looked_at_by_itself(self) -> None:
        """Here since another rank spells it out, as one does whose number has been forgotten."""
        negotiation = Negotiator({0: (0, 1)}, 10)
        for rank in (0, 1):
            negotiation.absorb(rank, Submit((), (request(),)), 0.0)
        negotiation.take()
        negotiation.absorb(0, Submit((0,), (), VALUES.tobytes()), 0.0)
        negotiation.absorb(1, Submit((), (request(),), VALUES.tobytes()), 0.0)
        assert negotiation.take().results == ((0, (2 * VALUES).tobytes()),)

    def test_sums_are_in_order_of_ranks_no_matter_which_comes_first(self) -> None:
        values = [np.array([v], np.float32) for v in (1e8, 1.0, -1e8)]  # in another order the 1 is not lost
        for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
            negotiation = Negotiator({0: (0, 1, 2)}, 10)
            for rank in order:
                asked = request(count=1, op=ReduceOp.SUM)
                negotiation.absorb(rank, Submit((), (asked,), values[rank].tobytes()), 0.0)
            assert negotiation.take().results == ((0, np.zeros(1, np.float32).tobytes()),)

    def test_a_mismatch_is_still_an_error(self) -> None:
        negotiation = Negotiator({0: (0, 1)}, 10)
        negotiation.absorb(0, Submit((), (request(),), VALUES.tobytes()), 0.0)
        negotiation.absorb(1, Submit((), (request(dtype=DType.INT32),), VALUES.tobytes()), 0.0)
        order = negotiation.take()
        (response,) = order.items
        assert isinstance(response, Response)
        assert "dtype" in response.error
        assert order.results == ()


@pytest.mark.parametrize(
    ("asked", "first", "second", "expected"),
    [
        (request(op=ReduceOp.SUM, prescale=2.0), VALUES, VALUES, VALUES * 4),
        (request(op=ReduceOp.AVERAGE, postscale=3.0), VALUES, VALUES + 1, (VALUES + 0.5) * 3),
        (request(op=ReduceOp.MIN), VALUES, -VALUES, -np.abs(VALUES)),
        (request(op=ReduceOp.PRODUCT), VALUES, VALUES, VALUES**2),
        (request(dtype=DType.INT64, op=ReduceOp.AVERAGE), np.array([-3, 3]), np.array([0, 0]), np.array([-1, 1])),
        (request(dtype=DType.BOOL, op=ReduceOp.SUM), np.array([True, False]), np.array([False, False]), [True, False]),
    ],
)
def test_arithmetic_is_the_data_planes(asked: Request, first: np.ndarray, second: np.ndarray, expected: object) -> None:
    data = inline.combine(asked, [first.tobytes(), second.tobytes()], 2)
    assert np.frombuffer(data, first.dtype).tolist() == np.asarray(expected).tolist()


def test_an_average_divides_by_all_members_also_if_some_have_joined_and_sent_nothing() -> None:
    data = inline.combine(request(op=ReduceOp.AVERAGE), [VALUES.tobytes()] * 2, 4)
    assert np.frombuffer(data, np.float32).tolist() == (VALUES / 2).tolist()


def test_half_types_are_summed_in_float32() -> None:
    # Summed in bfloat16, each 1/256 would be lost beside the 1.
    payloads = [narrow_bfloat16(np.array([v, v], np.float32)).tobytes() for v in (1.0, 1 / 256, 1 / 256)]
    asked = request(dtype=DType.BFLOAT16, op=ReduceOp.SUM)
    assert inline.combine(asked, payloads, 3) == narrow_bfloat16(np.array([1 + 2 / 256] * 2, np.float32)).tobytes()
