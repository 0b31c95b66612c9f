"""Gradients of optax's optimizers, averaged over the ranks; and parameters that all ranks begin with.

Gradients are reduced in one group, or several, under a name made from the paths, shapes and types of the tree's leaves,
so that it is the same on all ranks, however often and in which order these trace their functions. Ranks that train
different trees wait for each other's names, which the stall report shows, instead of mixing their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._collectives.spec import CollectiveSpec, crossing, reduction, resolve_op
from hvdgloo._training import options
from hvdgloo.errors import InvalidArgumentError, MissingDependencyError
from hvdgloo.jax._frontend import FRONTEND, JaxFrontend, Tree
from hvdgloo.jax._primitive import is_traced
from hvdgloo.types import ReduceOp

if TYPE_CHECKING:
    import optax


def distributed_gradients(
    *,
    op: int = ReduceOp.AVERAGE,
    compression: Compressor[Any] = NoneCompressor,
    groups: int = 1,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> optax.GradientTransformation:
    """Return the transformation of optax that reduces gradients over the ranks.

    For an optimizer of several transformations, of which those before this one see this rank's gradients and those
    after it see the average: ``optax.chain(optax.clip(1.0), hvd.distributed_gradients(), optax.adam(1e-3))``.

    Args:
        op: Average, Sum or Adasum.
        compression: how gradients travel, for example ``Compression.fp16``.
        groups: number of groups, in the order of the tree's leaves, in which gradients travel.
        gradient_predivide_factor: splits the division of an average: gradients are divided by it before they are
            summed, and the sum by size / factor.
        process_set: the ranks that take part; others use their own gradients.

    Raises:
        InvalidArgumentError: (a ValueError) an argument cannot be used.
        MissingDependencyError: (an ImportError) optax is not installed.
    """
    library = _optax()
    operation = _operation(op, compression, gradient_predivide_factor, process_set)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise InvalidArgumentError(f"groups must be a number of groups, 1 or more, not {groups!r}")

    def update(updates: Any, params: Any = None) -> Any:
        return reduced(FRONTEND, updates, operation, compression, groups, process_set)

    transformation: optax.GradientTransformation = library.stateless(update)
    return transformation


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: optax.GradientTransformation,
    *,
    op: int = ReduceOp.AVERAGE,
    compression: Compressor[Any] = NoneCompressor,
    groups: int = 1,
    gradient_predivide_factor: float = 1.0,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of optax that averages gradients over the ranks before it steps.

    It may be used inside ``jax.jit``, and by ``flax.nnx.Optimizer`` and the like. Its state is a tuple of which
    ``optimizer``'s state is the last part; all ranks have the same.

    Args:
        optimizer: any optimizer of optax.
        op, compression, groups, gradient_predivide_factor, process_set: as for ``distributed_gradients``.
        backward_passes_per_step: number of calls of ``update`` whose gradients this rank adds up before it sends them;
            all but the last return updates of zero.

    Raises:
        InvalidArgumentError: (a ValueError) an argument cannot be used.
        MissingDependencyError: (an ImportError) optax is not installed.
    """
    library = _optax()
    if not hasattr(optimizer, "update") or not hasattr(optimizer, "init"):
        raise InvalidArgumentError(
            f"DistributedOptimizer takes an optimizer of optax, such as optax.sgd(0.1), not {type(optimizer).__name__}"
        )
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InvalidArgumentError(f"backward_passes_per_step must be a whole number, 1 or more, not {passes!r}")
    gradients = distributed_gradients(
        op=op,
        compression=compression,
        groups=groups,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    whole: optax.GradientTransformationExtraArgs = library.chain(gradients, optimizer)
    if passes > 1:
        whole = library.MultiSteps(whole, passes, use_grad_mean=False).gradient_transformation()
    return whole


def broadcast_parameters(tree: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Return one rank's tree of arrays on all ranks: parameters, an optimizer's state, or ``flax.nnx.state(model)``.

    Args:
        tree: the same leaves on all ranks; only the root's values matter. Numbers become arrays, and typed PRNG keys
            are sent, too.
        root_rank: global rank of the source.
        process_set: the ranks that take part.

    Returns:
        a new tree.

    Raises:
        InvalidArgumentError: (a ValueError) a leaf cannot be sent, or this is called in a function that JAX traces.
        MismatchError: a leaf has another shape or type on another rank.
    """
    return broadcast_tree(FRONTEND, tree, root_rank, process_set)


def broadcast_tree(frontend: JaxFrontend, tree: Tree, root_rank: int, process_set: ProcessSet) -> Tree:
    """Do as ``broadcast_parameters``, on a Frontend."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    if is_traced([leaf for _, leaf in paths]):
        raise InvalidArgumentError(
            "broadcast_parameters() is for the beginning, outside of functions that JAX traces; broadcast() works there"
        )
    named, keys = [], []
    for path, leaf in paths:
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        keys.append(jax.random.key_impl(leaf) if is_key else None)
        sent = jax.random.key_data(leaf) if is_key else leaf
        named.append((f"parameters{jax.tree_util.keystr(path)}", frontend.own(sent)))
    received = frontend.broadcast_all(named, root_rank, process_set)
    leaves = [
        array if key is None else jax.random.wrap_key_data(array, impl=key)
        for array, key in zip(received, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def reduced(
    frontend: JaxFrontend,
    gradients: Tree,
    operation: CollectiveSpec,
    compression: Compressor[Any],
    groups: int,
    process_set: ProcessSet,
) -> Tree:
    """Return a tree's gradients, reduced over the ranks.

    A process that trains alone, and will not have others beside it, trains exactly as without hvdgloo.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
    if not paths or not frontend.may_share(process_set):
        return gradients
    leaves = [jnp.asarray(leaf) for _, leaf in paths]
    described = [
        (jax.tree_util.keystr(path), tuple(leaf.shape), leaf.dtype.name)
        for (path, _), leaf in zip(paths, leaves, strict=True)
    ]
    label = options.label(described)
    parts = options.divided(groups, leaves)
    results: list[Any] = []
    for index, part in enumerate(parts):
        pairs = [compression.compress(leaf) for leaf in part]
        name = label if len(parts) == 1 else f"{label}.{index}"
        sent = frontend.apply(
            operation, [array for array, _ in pairs], name, grouped=True, ends_step=index == len(parts) - 1
        )
        results += [compression.decompress(array, ctx) for array, (_, ctx) in zip(sent, pairs, strict=True)]
    return jax.tree.unflatten(structure, results)


def _operation(op: int, compression: Compressor[Any], factor: float, process_set: ProcessSet) -> CollectiveSpec:
    if factor != 1.0 and resolve_op(None, op) is not ReduceOp.AVERAGE:
        raise InvalidArgumentError("gradient_predivide_factor divides an average, so it needs op=Average")
    if not factor > 0:
        raise InvalidArgumentError(f"gradient_predivide_factor must be greater than 0, not {factor!r}")
    return crossing(reduction(None, op, 1.0 / factor, float(factor), process_set), compression)


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise MissingDependencyError(f"optax is not installed ({error}): pip install optax") from None
    return optax
