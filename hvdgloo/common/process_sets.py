"""Process sets, where Horovod's programs look for them."""

from __future__ import annotations

from collections.abc import Iterable

from hvdgloo._collectives import process_sets
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job import process

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Do what ``hvd.add_process_set`` does."""
    return process_sets.add(process.current(), process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Do what ``hvd.remove_process_set`` does."""
    return process_sets.remove(process.current(), process_set)
