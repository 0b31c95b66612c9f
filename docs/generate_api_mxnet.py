"""Write docs/api-mxnet.md from the docstrings of what hvdgloo.mxnet exports.

python docs/generate_api_mxnet.py
"""

from __future__ import annotations

from generate_api import Page, Section, pages, write

ABOUT = """\
These are names that `import hvdgloo.mxnet as hvd` provides. Those which are the same in all front-ends are described
elsewhere: [`init`, `rank`, process sets](api-start.md), [the asynchronous functions, and the errors that any collective
may raise](api-collectives.md). [All names](api.md).
"""

MXNET = (
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "grouped_allgather", "broadcast",
    "broadcast_", "alltoall", "reducescatter", "grouped_reducescatter", "broadcast_parameters", "broadcast_object",
    "allgather_object", "DistributedTrainer", "DistributedOptimizer", "Compression",
)  # fmt: skip


def texts() -> dict[str, str]:
    """Return the page by the name of its file."""
    sections = (Section("`hvdgloo.mxnet`", "hvdgloo.mxnet", MXNET),)
    return pages(__file__, Page("mxnet", "MXNet", "mxnet", ABOUT, sections))


if __name__ == "__main__":
    write(texts())
