"""Advice for the summary of a failed job, where the cause is a typical beginner's mistake. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hvdgloo._platform.spelling import suggestions

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'$")
_NO_FRONT_END = re.compile(
    r"ModuleNotFoundError: No module named '(?P<package>hvdgloo|horovod)\.(?P<name>\w+)'$"
    r"|ImportError: cannot import name '(?P<other>\w+)' from '(?P<whole>hvdgloo|horovod)'"
)
_FRONT_ENDS = ("torch", "tensorflow", "keras", "jax", "mxnet", "numpy", "spark", "ray")
_ALSO_CALLED = {"pytorch": "torch", "tf": "tensorflow", "pyspark": "spark"}
_NO_CUDA = "AssertionError: Torch not compiled with CUDA enabled"
_NO_SUCH_GPU = re.compile(r"\S*Error: CUDA error: invalid device ordinal")


def advise(cause: str, argv: Sequence[str], python: str, *, option: str = "") -> str:
    """Return one line that says what to do; empty if there is nothing to advise.

    Args:
        cause: the line in which the worker's error appears.
        argv: what was executed.
        python: the interpreter that the launcher uses by default on the worker's host.
        option: the launcher's option that names another interpreter there; empty if it is the launcher's own.
    """
    if front_end := _NO_FRONT_END.match(cause):
        package = front_end["package"] or front_end["whole"]
        name = front_end["name"] or front_end["other"]
        meant = [_ALSO_CALLED[name]] if name in _ALSO_CALLED else suggestions(name, _FRONT_ENDS)
        return f"did you mean {' or '.join(f'{package}.{each}' for each in meant)}?" if meant else ""
    if cause == _NO_CUDA:
        where = f" of {python}" if argv[0] == python else ""
        return (
            f"the PyTorch{where} is built for the CPU only: install a build for CUDA (see pytorch.org), or have the "
            'program ask torch.cuda.is_available() and use "cpu" otherwise'
        )
    if _NO_SUCH_GPU.match(cause):
        return (
            "choose each worker's GPU by its local rank, with torch.cuda.set_device(hvd.local_rank()), not by "
            "hvd.rank(); and run no more workers on a host than it has GPUs"
        )
    found = _NO_MODULE.match(cause)
    if found is None:
        return ""
    module = found[1]
    if module == "horovod":
        return "to run a program written for Horovod as it is, add --as-horovod before it; or have it import hvdgloo"
    if argv[0] != python:
        return ""
    other = (
        f"name the interpreter that has it with {option}" if option else "start hvdgloo-run from the one that has it"
    )
    return f"the workers run with {python}: install {module} in its environment, or {other}"


def advise_on_signal(reason: str) -> str:
    """Return one line that says what to do about a lack of memory; empty if the job failed for another reason.

    Args:
        reason: why the job failed, including what the kernel did.
    """
    if "by signal 9" not in reason or " for lack of memory" not in reason:
        return ""
    return (
        "run fewer workers on that host (-H HOST:SLOTS), use less memory in each (smaller batches, fewer loader "
        "processes), or raise the memory limit of its container or batch job"
    )
