"""The names that every front-end exports and that concern no tensor: start, end, and what this installation can do.

Programs written for Horovod ask what was compiled into it. Nothing is compiled into hvdgloo, and MPI, DDL and CCL have
no meaning here: the questions stay, with honest answers.
"""

from __future__ import annotations

import importlib.util

from hvdgloo.context import init, is_initialized, shutdown
from hvdgloo.errors import InvalidArgumentError

__all__ = [
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
]


def mpi_threads_supported() -> bool:
    """Whether MPI may be used from several threads.

    Raises:
        InvalidArgumentError: (a ValueError) always: there is no MPI here.
    """
    raise InvalidArgumentError("hvdgloo does not use MPI, so it cannot tell whether MPI supports threads")


def mpi_enabled() -> bool:
    """Whether the job runs on MPI: never."""
    return False


def mpi_built() -> bool:
    """Whether MPI could be used: no."""
    return False


def gloo_enabled() -> bool:
    """Whether the job runs on Gloo's protocol: once initialised, always."""
    return is_initialized()


def gloo_built() -> bool:
    """Whether a package that carries Gloo is installed: torch or pygloo."""
    return any(importlib.util.find_spec(carrier) is not None for carrier in ("torch", "pygloo"))


def nccl_built() -> int:
    """The version code of the NCCL that collectives of GPU tensors run on; 0, since they run on Gloo."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL could be used: no."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL could be used: no."""
    return False


def cuda_built() -> bool:
    """Whether collectives run on CUDA devices themselves: no; CUDA tensors travel through page-locked host memory."""
    return False


def rocm_built() -> bool:
    """Whether collectives run on ROCm devices themselves: no."""
    return False
