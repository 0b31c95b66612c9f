"""State that all ranks must start from, and objects, under the names that Horovod's programs import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, TypeVar

import mxnet as mx

from hvdgloo._collectives import objects
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.mxnet._adapter import Tensor
from hvdgloo.mxnet.mpi_ops import _frontend

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]

T = TypeVar("T")


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite all ranks' parameters with one rank's, usually before training.

    Args:
        params: ``net.collect_params()`` of Gluon, or a dict of names to arrays or Gluon parameters, such as
            ``module.get_params()[0]``; the same names and shapes on every rank. Gluon's parameters that are not
            initialised yet are overwritten as soon as they are, which for unknown shapes is in the first forward pass.
        root_rank: global rank of the source.
        prefix: begins the names in messages.

    Raises:
        InvalidArgumentError: (a ValueError) ``params`` is no dict, or has values that are neither or are sparse.
    """
    _broadcast_parameters(_frontend, params, root_rank, prefix or "")


def _broadcast_parameters(frontend: Frontend[Tensor], params: Any, root_rank: int, prefix: str) -> None:
    if not isinstance(params, (Mapping, mx.gluon.ParameterDict)):
        raise InvalidArgumentError(
            "params must be net.collect_params() or a dict of names to arrays, such as module.get_params()[0]; got "
            f"{type(params).__name__}"
        )
    require_dense(value for value in params.values() if isinstance(value, mx.gluon.Parameter))
    named: list[tuple[str, Tensor]] = []
    for name, value in sorted(params.items()):
        label = f"{prefix}{name}"
        if isinstance(value, mx.nd.NDArray):
            named.append((label, value))
        elif not isinstance(value, mx.gluon.Parameter):
            raise InvalidArgumentError(
                f"params: {name!r} is a {type(value).__name__}, neither an array nor a parameter; broadcast_object "
                "sends other values"
            )
        elif value._data is None:
            _broadcast_once_initialized(frontend, value, root_rank, label)
        else:
            named += _arrays_of(value, label)
    frontend.broadcast_all_(named, root_rank)


def require_dense(parameters: Iterable[Any]) -> None:
    """Refuse Gluon's parameters that are sparse: (a ValueError) InvalidArgumentError. Their gradients may be."""
    for parameter in parameters:
        if parameter._stype != "default":
            raise InvalidArgumentError(
                f"parameter {parameter.name!r} is {parameter._stype}: sparse parameters need a kvstore, which hvdgloo "
                "does without; use stype='default'"
            )


def _arrays_of(parameter: Any, label: str) -> list[tuple[str, Tensor]]:
    """A parameter's arrays, one for each device, with names."""
    arrays = parameter.list_data()
    return [(label if index == 0 else f"{label}.{index}", array) for index, array in enumerate(arrays)]


def _broadcast_once_initialized(frontend: Frontend[Tensor], parameter: Any, root_rank: int, label: str) -> None:
    def initialize(parameter: Any, *args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # once; and what was asked for before is forgotten
        parameter._init_impl(*args, **kwargs)
        frontend.broadcast_all_(_arrays_of(parameter, label), root_rank)

    parameter._init_impl = MethodType(initialize, parameter)  # of which a deep copy is the copied parameter's


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The Python object of one rank, on all: see ``hvdgloo._collectives.objects.broadcast_object``."""
    return objects.broadcast_object(_frontend, obj, root_rank, name, process_set)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Every rank's Python object, in rank order: see ``hvdgloo._collectives.objects.allgather_object``."""
    return objects.allgather_object(_frontend, obj, name, process_set)
