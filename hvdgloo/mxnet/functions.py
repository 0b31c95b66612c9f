"""State that all ranks must start from, and objects, under the names that Horovod's programs import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import mxnet as mx

from hvdgloo._collectives.frontend import Frontend
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.mxnet._adapter import Tensor
from hvdgloo.mxnet._frontend import FRONTEND

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite all ranks' parameters with one rank's, usually before training.

    Args:
        params: ``net.collect_params()`` of Gluon, or a dict of names to arrays or Gluon parameters, such as
            ``module.get_params()[0]``; the same names and shapes on every rank. Gluon's parameters that are not
            initialised yet are overwritten as soon as they are, which for unknown shapes is in the first forward pass.
        root_rank: global rank of the source.
        prefix: begins the names in messages.

    Raises:
        InvalidArgumentError: (a ValueError) ``params`` is not a dict, or has values that are neither arrays nor
            parameters, or are sparse.
    """
    _broadcast_parameters(FRONTEND, params, root_rank, prefix or "")


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
    frontend.broadcast_all(named, root_rank, in_place=True)


def require_dense(parameters: Iterable[Any]) -> None:
    """Refuse Gluon's parameters that are sparse. Their gradients may be.

    Raises:
        InvalidArgumentError: (a ValueError) a parameter is sparse.
    """
    for parameter in parameters:
        if parameter._stype != "default":
            raise InvalidArgumentError(
                f"parameter {parameter.name!r} is {parameter._stype}: sparse parameters need a kvstore, which hvdgloo "
                "does without; use stype='default'"
            )


def _arrays_of(parameter: Any, label: str) -> list[tuple[str, Tensor]]:
    """Return a parameter's arrays, one for each device, with names."""
    arrays = parameter.list_data()
    return [(label if index == 0 else f"{label}.{index}", array) for index, array in enumerate(arrays)]


def _broadcast_once_initialized(frontend: Frontend[Tensor], parameter: Any, root_rank: int, label: str) -> None:
    def initialize(parameter: Any, *args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # once only; earlier requests are forgotten
        parameter._init_impl(*args, **kwargs)
        frontend.broadcast_all(_arrays_of(parameter, label), root_rank, in_place=True)

    parameter._init_impl = MethodType(initialize, parameter)  # a deep copy of it belongs to the copied parameter


broadcast_object = FRONTEND.broadcast_object
allgather_object = FRONTEND.allgather_object
