"""Write the pages of the API that are about torch, numpy and hvdgloo.run, whose functions other front-ends share.

python docs/generate_api_torch.py
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Mapping
from types import ModuleType
from unittest import mock

from generate_api import Page, Section, pages, raised, write

NAMES = """\
These are names that `import hvdgloo.torch as hvd` provides. `hvdgloo.numpy` has the same functions for numpy arrays,
except the ones marked *torch*. [All names](api.md).
"""

RAISED = """
Any collective may raise the following errors, which are not repeated for each:

"""
ERRORS_TEXT = """\
All errors of hvdgloo are classes of `hvdgloo.errors`. Each is a RuntimeError, and also the class in brackets:

"""

STARTING: dict[str, tuple[str, ...]] = {
    "Start and end": ("init", "shutdown", "is_initialized"),
    "Who and where": (
        "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous",
    ),
    "Process sets": ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    "What can be used": (
        "gloo_built", "gloo_enabled", "nccl_built", "cuda_built", "rocm_built", "mpi_built", "mpi_enabled",
        "mpi_threads_supported", "ccl_built", "ddl_built",
    ),
}  # fmt: skip
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "allreduce": (
        "allreduce", "allreduce_async", "allreduce_", "allreduce_async_", "grouped_allreduce",
        "grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_", "sparse_allreduce_async",
        "Average", "Sum", "Adasum", "Min", "Max", "Product",
    ),
    "allgather": ("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async", "allgather_object"),
    "broadcast": (
        "broadcast", "broadcast_async", "broadcast_", "broadcast_async_", "broadcast_object", "broadcast_parameters",
        "broadcast_optimizer_state",
    ),
    "alltoall": ("alltoall", "alltoall_async"),
    "reducescatter": (
        "reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async",
    ),
    "barrier and join": ("barrier", "join"),
    "Handles": ("poll", "synchronize"),
}  # fmt: skip
ERRORS = ("HorovodInternalError",)
TRAINING = ("DistributedOptimizer", "LocalSGD", "DiLoCo", "Compression", "SyncBatchNorm", "scale_learning_rate")
OBSERVING: dict[str, tuple[str, ...]] = {
    "Metrics and logging": ("metrics", "log"),
    "Timeline": ("start_timeline", "stop_timeline"),
}

INTEGRATIONS = {
    "lightning": ("LogCallback", {"lightning.pytorch": {"Callback": object}}),
    "ignite": (
        "LogHandler",
        {
            "ignite.engine": {"Engine": None, "Events": None},
            "ignite.handlers.checkpoint": {"CheckpointEvents": None},
        },
    ),
}
"""By our modules for libraries that need not be installed where the pages are written: what a module has, and what it
imports.
"""


def texts() -> dict[str, str]:
    """Return the pages by the names of their files."""
    torch = importlib.import_module("hvdgloo.torch")
    tables = (STARTING, COLLECTIVES, OBSERVING)
    listed = {*ERRORS, *TRAINING, *(name for table in tables for names in table.values() for name in names)}
    if listed != set(torch.__all__):
        raise SystemExit(f"the lists and hvdgloo.torch.__all__ differ: {listed ^ set(torch.__all__)}")
    errors = importlib.import_module("hvdgloo.errors")
    frontend = importlib.import_module("hvdgloo._collectives.frontend").Frontend
    tree = textwrap.dedent((inspect.getdoc(errors) or "").partition("::\n\n")[2].partition("\n\n")[0])
    return pages(
        __file__,
        Page(
            "start",
            "start, ranks, process sets and errors",
            "torch",
            NAMES,
            (*_sections(STARTING), Section("Errors", "hvdgloo.torch", ERRORS, f"{ERRORS_TEXT}```\n{tree}\n```\n")),
        ),
        Page("collectives", "collectives", "torch", NAMES + RAISED + raised(frontend), _sections(COLLECTIVES)),
        Page(
            "training",
            "optimizers and data loading",
            "torch",
            NAMES,
            (
                Section("Optimizers", "hvdgloo.torch", TRAINING),
                Section(
                    "What `DistributedOptimizer` returns",
                    "hvdgloo.torch._distributed_optimizer",
                    ("DistributedTorchOptimizer",),
                ),
                Section("What `LocalSGD` and `DiLoCo` return", "hvdgloo.torch._local", ("LocalTorchOptimizer",)),
                Section("`hvdgloo.numpy`: for any training loop", "hvdgloo.numpy", ("OuterOptimizer",)),
                Section("`hvd.Compression.powersgd`", "hvdgloo.torch._powersgd", ("PowerSGD",)),
                Section("`hvdgloo.data`", "hvdgloo.data", ("AsyncDataLoaderMixin", "BaseDataLoader")),
            ),
        ),
        Page(
            "elastic",
            "elastic jobs",
            "torch",
            "[Elastic jobs](elastic.md) explains how these work together. [All names](api.md).\n",
            (
                Section(
                    "`hvd.elastic`, also `hvdgloo.torch.elastic`",
                    "hvdgloo.torch.elastic",
                    ("run", "TorchState", "ElasticSampler"),
                ),
                Section("`hvdgloo.elastic`: for any framework", "hvdgloo.elastic", ("State", "ObjectState")),
            ),
        ),
        Page(
            "observing",
            "metrics, logging and timeline",
            "torch",
            NAMES,
            (
                *_sections(OBSERVING),
                Section("What `hvd.metrics()` returns", "hvdgloo.types", ("Metrics", "PlaneMetrics")),
                *_integrations(),
            ),
        ),
        Page(
            "run",
            "launching from Python",
            "run",
            "[Launching](launching.md) describes jobs, and the command that starts them. [All names](api.md).\n",
            (Section("`hvdgloo.run`", "hvdgloo.run", ("run",)),),
        ),
    )


def _sections(table: Mapping[str, tuple[str, ...]]) -> tuple[Section, ...]:
    return tuple(Section(title, "hvdgloo.torch", names) for title, names in table.items())


def _integrations() -> list[Section]:
    """Return the sections about INTEGRATIONS, whose examples are recipes."""
    sections = []
    for module, (name, imported) in INTEGRATIONS.items():
        stand_ins = {each: ModuleType(each) for each in imported}
        for each, values in imported.items():
            vars(stand_ins[each]).update(values)
        with mock.patch.dict(sys.modules, stand_ins):
            loaded = importlib.import_module(f"hvdgloo.torch.{module}")
        text = "[The recipe](recipes.md#lightning-and-ignite) shows how it is used.\n"
        sections.append(Section(f"`hvdgloo.torch.{module}`", loaded, (name,), text, examples=False))
    return sections


if __name__ == "__main__":
    write(texts())
