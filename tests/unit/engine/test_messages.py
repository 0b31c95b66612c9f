"""Control messages and their bytes: whole round trips, small steps, and nothing but ValueError for anything else."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdgloo._engine.messages import (
    Abort,
    AskStacks,
    Bye,
    Drained,
    End,
    Execute,
    Failed,
    Leave,
    Message,
    Ping,
    Pong,
    Request,
    Resend,
    Response,
    Stacks,
    Submit,
    decode,
    encode,
)
from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec

texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
ranks = st.integers(-1, 1 << 31)
numbers = st.integers(0, 1 << 40)
specs = st.builds(
    TensorSpec,
    st.sampled_from(DType),
    st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    st.sampled_from(["cpu", "cuda", "xpu"]),
)
requests = st.builds(
    Request,
    texts,
    st.sampled_from(Collective),
    st.lists(specs, max_size=3).map(tuple),
    st.sampled_from(ReduceOp),
    floats,
    floats,
    ranks,
    st.integers(0, 1 << 31),
    st.lists(st.integers(0, 1 << 31), max_size=3).map(tuple),
)
responses = st.builds(
    Response, requests, st.lists(st.lists(numbers, max_size=3).map(tuple), max_size=3).map(tuple), texts, ranks
)


def runs_of_numbers() -> st.SearchStrategy[tuple[int, ...]]:
    """Numbers as they occur: mostly consecutive."""
    run = st.builds(lambda start, length: list(range(start, start + length)), numbers, st.integers(1, 40))
    return st.lists(run, max_size=5).map(lambda lists: tuple(n for part in lists for n in part))


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Submit, runs_of_numbers(), st.lists(requests, max_size=3).map(tuple), st.binary(max_size=9), st.booleans()
    ),
    st.builds(
        Execute,
        st.lists(numbers | responses, max_size=8).map(tuple) | runs_of_numbers(),
        st.lists(numbers, max_size=4).map(tuple),
    ),
    st.builds(Resend, runs_of_numbers()),
    st.builds(Failed, texts),
    st.builds(Stacks, texts),
    st.builds(End, ranks),
    st.builds(Abort, texts, texts, ranks),
    st.sampled_from([Leave(), Leave("ValueError: x"), Drained(), AskStacks(), Bye(), Ping(), Pong()]),
)


@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    arrived = decode(encode(message))
    assert type(arrived) is type(message)
    assert arrived == message
    assert hash(arrived) == hash(message)  # tuples, not lists, all the way down


def test_numbers_and_spelled_out_responses_keep_their_order() -> None:
    first, second = (Response(Request(name, Collective.ALLREDUCE), signature=9) for name in "ab")
    message = Execute((1, 2, first, 3, second, 5, 6), (1,))
    assert decode(encode(message)) == message


@pytest.mark.parametrize("count", [1, 200, 5000])
def test_a_training_step_is_a_few_bytes(count: int) -> None:
    signatures = tuple(range(1000, 1000 + count))
    assert len(encode(Submit(signatures))) <= 12
    assert len(encode(Execute(signatures))) <= 14


def test_a_shuffled_step_costs_a_few_bytes_for_each_tensor() -> None:
    signatures = tuple(range(0, 2000, 2))
    assert len(encode(Submit(signatures))) <= 4 * len(signatures) + 12


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_garbage_is_a_value_error(data: bytes) -> None:
    try:
        message = decode(data)
    except ValueError:
        return
    decode(encode(message))  # by chance it was one; then it is one that can travel again


@given(messages, st.data())
def test_truncated_and_trailing_bytes_are_value_errors(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(ValueError, match="not a control message"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError, match="not a control message"):
        decode(whole + b"\0")


@given(messages, st.data())
def test_flipped_bits_give_a_message_or_a_value_error(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode(bytes(damaged))
    except ValueError:
        pass


def plain(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


REQUEST = ["x", "allreduce", [["float32", [2], "cpu"]], 1, 1.0, 1.0, -1, 0, [], 0]
"""A request as it travels, whole."""

RESPONSE = [REQUEST, [[2]], "", 3, -1]


def submit(**changes: Any) -> bytes:
    """A Submit as it travels, with some parts changed."""
    parts = {"number": 0, "runs": [4, 2], "requests": [REQUEST], "payload": b"", "resent": False, **changes}
    return plain(list(parts.values()))


def execute(**changes: Any) -> bytes:
    parts = {"number": 1, "items": [4, 2, RESPONSE], "forgotten": [1], "results": [[0, b"x"]], **changes}
    return plain(list(parts.values()))


def request(index: int, value: Any) -> bytes:
    """A Submit of one request of which one part is another value."""
    return submit(requests=[[*REQUEST[:index], value, *REQUEST[index + 1 :]]])


def test_the_parts_that_foreign_bytes_are_made_from_are_messages() -> None:
    """So that each of them below is refused for its fault, and for no other reason."""
    known = Request("x", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (2,)),))
    assert decode(submit()) == Submit((4, 5), (known,))
    assert decode(execute()) == Execute((4, 5, Response(known, ((2,),), "", 3)), (1,), ((0, b"x"),))


FOREIGN = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "no array": plain({"a": 1}),
    "empty array": plain([]),
    "unknown number": submit(number=99),
    "negative number": submit(number=-1),
    "number is text": submit(number="0"),
    "too few parts": plain([0, []]),
    "too many parts": submit(more=1),
    "odd runs": submit(runs=[1, 2, 3]),
    "negative run": submit(runs=[1, -2]),
    "run of text": submit(runs=["a", "b"]),
    "run of truths": submit(runs=[1, True]),
    "run of a response": submit(runs=[1, RESPONSE]),
    "payload is text": submit(payload="x"),
    "resent is a number": submit(resent=1),
    "unknown dtype": request(2, [["float7", [2], "cpu"]]),
    "dtype is a number": request(2, [[0, [2], "cpu"]]),
    "unknown collective": request(1, "allsort"),
    "collective is a number": request(1, 0),
    "unknown reduce operation": request(3, 77),
    "name is a list": request(0, ["x"]),
    "shape of text": request(2, [["float32", ["2"], "cpu"]]),
    "negative shape": request(2, [["float32", [-2], "cpu"]]),
    "device is a number": request(2, [["float32", [2], 0]]),
    "factor is text": request(4, "1"),
    "root is text": request(6, "0"),
    "negative member": request(8, [-1]),
    "negative number of a set": request(9, -1),
    "request is short": submit(requests=[REQUEST[:1]]),
    "request is long": submit(requests=[[*REQUEST, 1]]),
    "item is text": execute(items=["1"]),
    "item without a length": execute(items=[1, RESPONSE]),
    "item at the end without a length": execute(items=[RESPONSE, 1]),
    "negative item": execute(items=[-1, 1]),
    "negative row": execute(items=[[REQUEST, [[-2]], "", 3, -1]]),
    "forgotten is a number": execute(forgotten=5),
    "forgotten is nested": execute(forgotten=[[1]]),
    "a result of nothing": execute(results=[[3, b"x"]]),
    "a result before everything": execute(results=[[-1, b"x"]]),
    "a result of text": execute(results=[[0, "x"]]),
    "resend of text": plain([2, ["a"]]),
    "text is a number": plain([5, 7]),
    "rank is text": plain([8, "1"]),
    "an extension type": plain(msgspec.msgpack.Ext(5, b"x")),
    "an extension type in a text's place": plain([5, msgspec.msgpack.Ext(5, b"x")]),
    "an escaped text that is none": plain([5, msgspec.msgpack.Ext(1, b"\xff")]),
    "a pickle": b"\x80\x04K\x01.",
    "deeply nested": b"\x91" * 100_000,
    "deeply nested, and an extension type": b"\x92\x05" + b"\x91" * 100_000 + b"\xd4\x01a",
    "an array that claims more than there is": b"\xdd\xff\xff\xff\xff",
    "a string that claims more than there is": b"\x92\x05\xdb\xff\xff\xff\xff",
    "a text that is no UTF-8": b"\x92\x05\xa2\xff\xff",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_bytes_are_value_errors(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a control message"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        submit(runs=[0, 1 << 60]),
        submit(runs=[0, 1 << 23]),
        submit(runs=[0, 1 << 19] * 500),
        execute(items=[0, 1 << 60]),
        execute(items=[0, 1 << 19] * 500),
    ],
    ids=["one endless run", "one long run", "many runs", "one endless item", "many items"],
)
def test_a_few_bytes_never_become_much_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not a control message"):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_a_response_knows_its_results_sizes() -> None:
    request = Request(
        "g", Collective.ALLGATHER, (TensorSpec(DType.FLOAT32, (2, 3)), TensorSpec(DType.UINT8, (0, 5, 2)))
    )
    assert Response(request, ((2, 0, 4), (0, 0, 0))).sizes == (6 * 3 * 4, 0)
    request = Request("r", Collective.ALLREDUCE, (TensorSpec(DType.BFLOAT16, (2, 3)), TensorSpec(DType.INT64, ())))
    assert Response(request).sizes == (12, 8)
    assert request.nbytes == 20
