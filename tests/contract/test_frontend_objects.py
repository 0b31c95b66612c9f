"""Python objects between ranks. Pain 30: nothing is unpickled before its signature is checked."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends.base import Backend, Work
from hvdgloo._collectives import objects
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.naming import names_of
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._job.context import Context
from hvdgloo.errors import AuthenticationError, HorovodInternalError, InvalidArgumentError
from hvdgloo.types import Buffer
from tests.support.frameworks import Framework
from tests.support.world import MakeWorld

USED_AGAIN = True  # worlds, by the tests that follow
SIZE = 3
OBJECTS: list[Any] = [
    {"epoch": 3, "history": [1.5, None]},
    None,
    np.arange(100_000),
    lambda x: x + 1,  # cloudpickle's, not pickle's
]


@pytest.mark.parametrize("obj", OBJECTS, ids=["dict", "none", "array", "function"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_object(world: MakeWorld, framework: Framework, obj: Any, root: int) -> None:
    def rank_body(context: Context) -> None:
        # What other ranks pass is of another type, which the automatic name must not depend on.
        given = obj if context.rank == root else f"of rank {context.rank}"
        result = objects.broadcast_object(framework.frontend(context), given, root)
        if context.rank == root:
            assert result is obj
        if callable(obj):
            assert result(41) == 42
        else:
            np.testing.assert_equal(result, obj)

    world(SIZE).run(rank_body)


def test_allgather_object_is_in_rank_order(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        result = objects.allgather_object(frontend, [frontend.rank()] * (1000 * frontend.rank()), name="lists")
        assert result == [[rank] * (1000 * rank) for rank in range(SIZE)]
        assert objects.allgather_object(frontend, None if frontend.rank() else "first") == ["first", None, None]

    world(SIZE).run(rank_body, framework.frontend)


def test_objects_within_a_process_set(world: MakeWorld, framework: Framework) -> None:
    def generator() -> Any:
        yield 1

    def rank_body(frontend: Frontend[Any]) -> None:
        last = frontend.add_process_set(ProcessSet([1, 2]))
        if frontend.rank() == 0:
            return
        mine = f"rank {frontend.rank()}"
        assert objects.allgather_object(frontend, mine, process_set=last) == ["rank 1", "rank 2"]
        assert objects.broadcast_object(frontend, mine, 2, process_set=last) == "rank 2"
        with pytest.raises(TypeError if frontend.rank() == 2 else HorovodInternalError, match="pickle") as caught:
            objects.allgather_object(frontend, generator() if frontend.rank() == 2 else 1, process_set=last)
        assert frontend.rank() == 2 or "rank 2 could not pickle" in str(caught.value)

    world(SIZE).run(rank_body, framework.frontend)


def test_an_object_that_cannot_be_pickled_is_an_error_everywhere(world: MakeWorld, framework: Framework) -> None:
    def generator() -> Any:
        yield 1

    def rank_body(frontend: Frontend[Any]) -> None:
        mine = generator() if frontend.rank() == 1 else 1
        for call in (
            lambda: objects.broadcast_object(frontend, mine, 1),
            lambda: objects.allgather_object(frontend, mine),
        ):
            expected = TypeError if frontend.rank() == 1 else HorovodInternalError
            with pytest.raises(expected, match="pickle"):
                call()
        assert objects.allgather_object(frontend, frontend.rank()) == list(range(SIZE))

    world(SIZE).run(rank_body, framework.frontend)


def test_a_wrong_root(world: MakeWorld, framework: Framework) -> None:
    def rank_body(context: Context) -> None:
        with pytest.raises(InvalidArgumentError, match="7"):
            objects.broadcast_object(framework.frontend(context), 1, 7)

    world(2).run(rank_body)


class _Tampering:
    """A backend that replaces long broadcasts' bytes by a pickle that must never be read."""

    def __init__(self, inner: Backend, forged: bytes) -> None:
        self._inner = inner
        self._forged = np.frombuffer(forged, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        work = self._inner.broadcast(buffer, root)
        assert work.completes_within(10)
        if buffer.nbytes > 8:
            memory = buffer.array()
            memory[: self._forged.size] = self._forged
        return work


opened: list[str] = []


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return opened.append, ("unpickled",)


def test_a_forged_object_is_not_unpickled(world: MakeWorld, framework: Framework) -> None:
    """Pain 30."""
    forged = pickle.dumps(_Trap())
    tampered = world(2, wrap=lambda rank, inner: _Tampering(inner, forged) if rank == 1 else inner)

    def rank_body(frontend: Frontend[Any]) -> None:
        if frontend.rank() == 0:
            objects.broadcast_object(frontend, b"x" * 1000, 0)
        else:
            with pytest.raises(AuthenticationError, match="not unpickled"):
                objects.broadcast_object(frontend, None, 0)

    tampered.run(rank_body, framework.frontend)
    assert opened == []


def test_one_ranks_object_does_not_pass_for_anothers(world: MakeWorld, framework: Framework) -> None:
    """Pain 30: the signature covers the rank, so swapped pieces of an allgather are refused."""

    class Swapping:
        def __init__(self, inner: Backend) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def allgather(self, source: Buffer, target: Buffer, nbytes: Any) -> Work:
            work = self._inner.allgather(source, target, nbytes)
            assert work.completes_within(10)
            if nbytes[0] > 8:
                halves = target.array().view(np.uint8).reshape(2, -1)
                halves[:] = halves[::-1].copy()
            return work

    def rank_body(context: Context) -> None:
        with pytest.raises(AuthenticationError):
            objects.allgather_object(framework.frontend(context), "ab"[context.rank])

    world(2, wrap=lambda rank, inner: Swapping(inner)).run(rank_body)


class _Replaying:
    """A backend that puts the first long broadcast's bytes in the place of the later ones."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._recorded: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        work = self._inner.broadcast(buffer, root)
        assert work.completes_within(10)
        memory = buffer.array().view(np.uint8).reshape(-1)
        if memory.nbytes > 8 and self._recorded is None:
            self._recorded = memory.tobytes()
        elif memory.nbytes > 8:
            memory[:] = np.frombuffer(self._recorded or b"", np.uint8)
        return work


@pytest.mark.parametrize("name", ["weights", None], ids=["named", "unnamed"])
def test_an_earlier_object_of_the_same_name_is_not_unpickled(
    world: MakeWorld, framework: Framework, name: str | None
) -> None:
    """Data of one call must not pass for data of a later one, even if automatic names start over."""

    def rank_body(context: Context) -> None:
        frontend = framework.frontend(context)
        assert objects.broadcast_object(frontend, "old", 0, name) == "old"
        names_of(context).restart(0)
        if context.rank == 0:
            objects.broadcast_object(frontend, "new", 0, name)
        else:
            with pytest.raises(AuthenticationError, match=r"rank 0, operation 2 .*not unpickled"):
                objects.broadcast_object(frontend, None, 0, name)

    world(2, wrap=lambda rank, inner: _Replaying(inner) if rank == 1 else inner).run(rank_body)
