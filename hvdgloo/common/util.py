"""Helpers that Horovod's programs and tests import from ``horovod.common.util``.

There, functions that say what was built load a native extension in a forked child, and have no answer where no
framework can be imported. Nothing is compiled into hvdgloo, so here they answer at once, the same as
``hvd.gloo_built()`` and similar functions. ``verbose`` is accepted for programs that pass it.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdgloo._collectives import basics
from hvdgloo._platform.machine import has_package
from hvdgloo.errors import InvalidArgumentError, MissingDependencyError

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")

_cache = functools.cache
"""Decorates a function that is called once for each combination of arguments."""

_FRONT_ENDS = {name: name for name in ("jax", "keras", "mxnet", "numpy", "tensorflow", "torch")}
"""Front-end to the package that it needs."""

_ASK_SECONDS = 120.0

_GPU_QUESTIONS = {
    "mxnet": "import mxnet; print(mxnet.context.num_gpus() > 0)",
    "tensorflow": "import tensorflow; print(bool(tensorflow.config.list_physical_devices('GPU')))",
    "torch": "import torch; print(torch.cuda.is_available())",
}


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether a framework can be used: there is a front-end for it, and the framework is installed."""
    package = _FRONT_ENDS.get(ext_base_name)
    return package is not None and has_package(package)


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Do nothing if a front-end (``"horovod.torch"`` or ``"hvdgloo.torch"``) can be used.

    Args:
        ext_name: the front-end.
        ext_env_var, pkg_path, args: of a native extension's build; accepted for programs that pass them.

    Raises:
        MissingDependencyError: (an ImportError) the front-end cannot be used.
    """
    name = ext_name.rpartition(".")[2]
    if name not in _FRONT_ENDS:
        raise MissingDependencyError(f"hvdgloo has no front-end {name}; it has {', '.join(sorted(_FRONT_ENDS))}")
    if not extension_available(name):
        raise MissingDependencyError(f"hvdgloo.{name} needs {_FRONT_ENDS[name]}: pip install 'hvdgloo[{name}]'")


@_cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether a framework sees a GPU. A new process checks this: after checking, a process could not fork users
    of the GPU."""
    question = _GPU_QUESTIONS.get(ext_base_name)
    if question is None or not extension_available(ext_base_name):
        return False
    try:
        asked = subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, check=False, timeout=_ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.stdout.strip() == "True"


def mpi_built(verbose: bool = False) -> bool:
    """Tell whether MPI could be used: no."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Tell whether a package that provides Gloo is installed: torch or pygloo."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return ``hvd.nccl_built()``."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Tell whether IBM's DDL could be used: no."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Tell whether Intel's oneCCL could be used: no."""
    return basics.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside the block, and restore them afterwards. A value of None leaves a variable
    unchanged."""
    chosen = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Make a function that turns ``op`` and the deprecated ``average`` into an op.

    Args:
        reduce_ops: has ``Average`` and ``Sum``: a front-end, for example.

    Returns:
        a function of (op, average), which raises InvalidArgumentError (a ValueError) if both are given.
    """

    def handle(op: int | None, average: bool | None) -> int:
        average_op: int = reduce_ops.Average
        sum_op: int = reduce_ops.Sum
        if average is None:
            return average_op if op is None else op
        if op is not None:
            raise InvalidArgumentError("average= and op= exclude each other; leave average= out, it is deprecated")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=2)
        return average_op if average else sum_op

    return handle


def num_rank_is_power_2(num_rank: int) -> bool:
    """Tell whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Split a list into ``n`` parts, in order; their lengths differ by at most one, the longer ones first."""
    short, longer = divmod(len(l), n)
    bounds = [i * short + min(i, longer) for i in range(n + 1)]
    return [l[bounds[i] : bounds[i + 1]] for i in range(n)]


def is_iterable(x: object) -> bool:
    """Tell whether ``for`` accepts an object."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Tell whether a version is ``target`` or a later one; ``2.1.0rc1`` and ``2.1.0a0`` come before ``2.1.0``.

    Args:
        ver: begins with a number; anything after a ``+`` is ignored.
        target: ``x.y.z``, three numbers.

    Raises:
        InvalidArgumentError: (a ValueError) one of them does not have that form.
    """
    if not isinstance(target, str) or re.fullmatch(r"\d+\.\d+\.\d+", target) is None:
        raise InvalidArgumentError(f"the version to compare with must be x.y.z, three numbers; got {target!r}")
    parts = re.match(r"(\d+(?:\.\d+)*)(.*)", ver.partition("+")[0].strip()) if isinstance(ver, str) else None
    if parts is None:
        raise InvalidArgumentError(f"a version begins with a number; got {ver!r}")
    numbers = [int(number) for number in parts[1].split(".")]
    wanted = [int(number) for number in target.split(".")]
    numbers += [0] * (len(wanted) - len(numbers))
    if numbers == wanted:
        return re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", parts[2].lower()) is None
    return numbers > wanted
