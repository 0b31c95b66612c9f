"""The names unrelated to tensors, where Horovod's programs look for them, and its numbers for process-set errors.

Here those errors are exceptions, and no function returns such a number.
"""

from __future__ import annotations

from hvdgloo._collectives.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
    start_timeline,
    stop_timeline,
)
from hvdgloo._job import process

__all__ = [
    "HOROVOD_PROCESS_SET_ERROR_DYNAMIC",
    "HOROVOD_PROCESS_SET_ERROR_EXISTING_SET",
    "HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET",
    "HOROVOD_PROCESS_SET_ERROR_INIT",
    "HOROVOD_PROCESS_SET_ERROR_SHUTDOWN",
    "HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]

HOROVOD_PROCESS_SET_ERROR_INIT = -1
HOROVOD_PROCESS_SET_ERROR_DYNAMIC = -2
HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET = -3
HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET = -4
HOROVOD_PROCESS_SET_ERROR_SHUTDOWN = -5
HOROVOD_PROCESS_SET_ERROR_EXISTING_SET = -6


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return every registered process set, for programs that ask ``mpi_ops._basics``."""
    return {number: list(ranks) for number, ranks in process.current().engine.process_sets.items()}
