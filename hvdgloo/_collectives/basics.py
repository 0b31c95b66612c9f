"""The names that every front-end exports and that concern no tensor: start, end, and what this installation can do.

Programs written for Horovod ask what was compiled into it. Nothing is compiled into hvdgloo, and MPI, DDL and CCL have
no meaning here: the functions remain, with honest answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from hvdgloo._collectives import process_sets as registry
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo._job.process import is_initialized
from hvdgloo._platform.machine import has_package
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Metrics

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job, as the environment describes it; a program that no launcher started is a job of its own.

    Does nothing while initialized.

    Args:
        comm: None for a world of all processes, or the ranks (of all the job's) that form this process's world, in
            which they get new numbers.
        process_sets: sets to register at once, the same list on all ranks: each a ProcessSet or its ranks. None and
            "dynamic" mean none; ``add_process_set`` works in any case.

    Raises:
        ConfigError: a setting is missing or cannot be used.
        RendezvousError: the rendezvous server cannot be reached, refused, or other workers did not come.
        ConnectError: ranks cannot be connected with each other.
        MissingDependencyError: several hosts need Gloo, which torch and pygloo provide.
        InvalidArgumentError: (a ValueError) comm or process_sets are invalid, or differ between ranks.
    """
    sets = _sets(process_sets)

    def register(ctx: Context) -> None:
        registry.add_first(ctx, sets)

    process.init(_ranks(comm), [process_set.ranks for process_set in sets], register)


def shutdown() -> None:
    """End this rank's part of the job, and thereby all ranks' collectives. Does nothing when not initialized."""
    process.shutdown()


def _ranks(comm: Any) -> list[int] | None:
    if comm is None:
        return None
    if not isinstance(comm, Iterable) or isinstance(comm, str):
        raise InvalidArgumentError("comm must be None or a list of ranks; hvdgloo does without MPI communicators")
    ranks = list(comm)
    if any(not isinstance(rank, (int, np.integer)) or isinstance(rank, bool) for rank in ranks):
        raise InvalidArgumentError(f"comm must be None or a list of ranks, whole numbers from 0; got {ranks}")
    return [int(rank) for rank in ranks] or None


def _sets(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
        raise InvalidArgumentError(f'process_sets must be a list of ProcessSets, or "dynamic", not {process_sets!r}')
    sets = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]
    for index, process_set in enumerate(sets):
        if process_set.ranks in [other.ranks for other in sets[:index]]:
            raise InvalidArgumentError(f"two of the process sets have the same ranks {process_set.ranks}")
    return sets


def metrics() -> Metrics:
    """Return the counts of this rank since its process began: operations, bytes, steps, and what they waited for.

    It costs some microseconds. In an elastic job, totals go on from one epoch to the next.

    Raises:
        NotInitializedError: (a ValueError) before ``init()``.
    """
    return process.current().metrics()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Trace where the time of collectives goes, from now on; see docs/timeline.md. Does nothing if a trace is already
    being written.

    Args:
        file_path: overwritten, on rank 0 alone; with ``{rank}`` in it, on every rank that calls this.
        mark_cycles: also trace when rank 0 orders operations.

    Raises:
        NotInitializedError: (a ValueError) before ``init()``.
        ConfigError: (a ValueError) the file cannot be written.
    """
    process.current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the trace; its file is then complete. Does nothing if there is none.

    Raises:
        NotInitializedError: (a ValueError) before ``init()``.
    """
    process.current().stop_timeline()


def mpi_threads_supported() -> bool:
    """Return whether MPI may be used from several threads.

    Raises:
        InvalidArgumentError: (a ValueError) always: there is no MPI here.
    """
    raise InvalidArgumentError("hvdgloo does not use MPI, so it cannot tell whether MPI supports threads")


def mpi_enabled() -> bool:
    """Return whether the job runs on MPI: never."""
    return False


def mpi_built() -> bool:
    """Return whether MPI could be used: no."""
    return False


def gloo_enabled() -> bool:
    """Return whether the job runs on Gloo's protocol: once initialised, always."""
    return is_initialized()


def gloo_built() -> bool:
    """Return whether jobs can run without MPI: always. ``hvdgloo-run --check-build`` shows which package provides
    Gloo."""
    return True


def nccl_built() -> int:
    """The version code of the NCCL that torch includes, 22105 for 2.21.5; 0 without it, or without torch."""
    return gpu.nccl_version() if (gpu := _gpu()) is not None else 0


def ddl_built() -> bool:
    """Return whether IBM's DDL could be used: no."""
    return False


def ccl_built() -> bool:
    """Return whether Intel's oneCCL could be used: no."""
    return False


def cuda_built() -> bool:
    """Return whether the installed torch was built for CUDA, so that its CUDA tensors can be exchanged."""
    return (gpu := _gpu()) is not None and gpu.platform() == "cuda"


def rocm_built() -> bool:
    """Return whether the installed torch was built for ROCm, whose devices torch calls "cuda" too."""
    return (gpu := _gpu()) is not None and gpu.platform() == "rocm"


def _gpu() -> ModuleType | None:
    """Our module of all that concerns GPUs, if torch is installed."""
    if not has_package("torch"):
        return None
    return importlib.import_module("hvdgloo._backends.gpu")
