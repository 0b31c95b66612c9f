"""The global process set, and the refusal of all others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._job import process
from hvdgloo.errors import InvalidArgumentError, NotInitializedError


def test_the_global_set() -> None:
    assert global_process_set.process_set_id == 0
    assert process_set_id(global_process_set) == 0
    assert global_process_set.ranks == []
    for question in (global_process_set.size, global_process_set.rank, global_process_set.included):
        with pytest.raises(NotInitializedError):
            question()
    process.init()
    try:
        assert global_process_set.ranks == [0]
        assert (global_process_set.size(), global_process_set.rank()) == (1, 0)
        assert global_process_set.included()
        assert repr(global_process_set) == "ProcessSet(process_set_id=0, ranks=[0], mpi_comm=None)"
    finally:
        process.shutdown()


def test_a_set_that_is_not_registered() -> None:
    some = ProcessSet([2, 0])
    assert some.ranks == [0, 2]
    assert some.process_set_id is None
    assert some.size() is None
    for question in (some.rank, some.included, lambda: process_set_id(some)):
        with pytest.raises(ValueError, match="not registered"):
            question()


@pytest.mark.parametrize("made", [lambda: ProcessSet([0]), lambda: global_process_set], ids=["a set", "the global set"])
def test_a_number_is_not_the_programs_to_give(made: Callable[[], ProcessSet]) -> None:
    some = made()
    before = some.process_set_id
    with pytest.raises(ValueError, match=r"add_process_set\(\)"):
        some.process_set_id = 10
    assert some.process_set_id == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_registered_where_a_set_of_their_ranks_is(copied: Callable[[ProcessSet], ProcessSet]) -> None:
    assert copied(global_process_set) is global_process_set
    assert copied(ProcessSet([1, 0])).process_set_id is None
    process.init()
    try:
        assert copied(ProcessSet([0])).process_set_id == 0
        lone = copied(ProcessSet([1]))
        assert (lone.ranks, lone.process_set_id) == ([1], None)
    finally:
        process.shutdown()


def test_ranks_may_come_from_numpy() -> None:
    assert repr(ProcessSet(np.arange(3, 0, -2))) == "ProcessSet(process_set_id=None, ranks=[1, 3], mpi_comm=None)"


@pytest.mark.parametrize("ranks", [[0, 0], [-1], ["0"], [1.0], [True]], ids=str)
def test_members_are_distinct_ranks(ranks: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        ProcessSet(ranks)
