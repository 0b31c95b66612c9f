"""Write docs/api-jax.md from the docstrings of what hvdgloo.jax exports.

python docs/generate_api_jax.py
"""

from __future__ import annotations

from generate_api import Page, Section, pages, write

ABOUT = """\
These are names that `import hvdgloo.jax as hvd` provides. Those which are the same in all front-ends (`init`, `rank`,
process sets, ...) are [here](api-start.md), and the errors that any collective may raise [here](api-collectives.md).
The [tutorial](tutorial-jax.md#what-holds-inside-jaxjit) explains what holds inside `jax.jit`. [All names](api.md).

In what follows, a tensor is a `jax.Array`, a numpy array or a number. `allreduce`, `allgather`, `broadcast` and
`reducescatter` also take pytrees of these, which travel as one group, and return pytrees. Results are new arrays.
"""

JAX = (
    "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "alltoall", "reducescatter",
    "grouped_reducescatter", "barrier", "join", "broadcast_object", "allgather_object", "DistributedOptimizer",
    "distributed_gradients", "broadcast_parameters", "errors_of", "translated", "Compression",
)  # fmt: skip
ELASTIC = ("run", "JaxState")


def texts() -> dict[str, str]:
    """Return the page by the name of its file."""
    sections = (
        Section("`hvdgloo.jax`", "hvdgloo.jax", JAX),
        Section("`hvd.elastic`, also `hvdgloo.jax.elastic`", "hvdgloo.jax.elastic", ELASTIC),
    )
    return pages(__file__, Page("jax", "JAX", "jax", ABOUT, sections))


if __name__ == "__main__":
    write(texts())
