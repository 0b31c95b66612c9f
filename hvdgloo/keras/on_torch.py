"""Keras on torch: hooks hand every gradient to the reducer while the backward pass still runs.

``fit`` gives the optimizer the very gradients that the parameters hold, which are reduced in place. With accumulation
only the sums are to be reduced: then there are no hooks, and the sums are sent when there is a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hvdgloo.keras.distributed import Options
from hvdgloo.keras.names import gradient_names, grouped
from hvdgloo.process_sets import process_set_id
from hvdgloo.reducer import GradientReducer
from hvdgloo.torch.mpi_ops import _frontend
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor


class TorchSync:
    """See ``hvdgloo.keras.distributed.Sync``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._reducer = self._make_reducer([])
        self._names: dict[int, str] = {}
        self._local = {id(variable) for variable in options.local_variables}
        self._hooked: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._reduced: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether there is anybody to reduce with."""
        context = _frontend.context
        ranks = context.engine.process_sets.get(process_set_id(self._options.process_set), ())
        return len(ranks) > 1 and context.rank in ranks

    def track(self, variables: Sequence[Any], *, accumulates: bool) -> None:
        shared = [v for v in variables if id(v) not in self._local]
        names = gradient_names(shared)
        self._names = {id(v): name for v, name in zip(shared, names, strict=True)}
        self._reducer = self._make_reducer(grouped(self._options.groups, names, shared))
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], {}
        if accumulates or not self.active:
            return
        for variable, name in zip(shared, names, strict=True):
            parameter = variable.value
            if parameter.requires_grad and parameter.is_leaf:
                # The hook must not keep this object alive: the parameter, which holds the hook, may live on without it.
                ready = functools.partial(_ready, weakref.ref(self), name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))
                self._hooked[name] = parameter

    def ready(self, name: str, gradient: Tensor) -> None:
        """A backward pass has computed a gradient; from a parameter's hook."""
        self._reduced.clear()
        self._reducer.ready(name, gradient)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.active:
            return list(gradients)
        results = list(gradients)
        sent = {}
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            name = self._names.get(id(variable))
            if name is None:
                if self._options.scale_local_gradients:
                    results[index] = gradient / len(self._ranks())
            elif name not in self._reduced:
                sent[name] = index
                if name not in self._reducer.open:
                    self._reducer.ready(name, gradient.detach().clone())
        reduced = self._settle()
        for name, index in sent.items():
            results[index] = reduced[name]
        self._reduced.clear()
        return results

    def agree(self, gradients: Sequence[Any], check: Any) -> Any:
        if not self.active:
            return check(gradients)
        if self._hooked:
            # They are under way, and are reduced where they are: then all ranks look at the same.
            self._reduced = set(self._settle())
            return check(gradients)
        holds = check(gradients)
        flag = torch.as_tensor(holds).to(torch.uint8).reshape(1)
        return _frontend.allreduce(flag, op=ReduceOp.MIN, process_set=self._options.process_set).bool()[0]

    def _settle(self) -> dict[str, Tensor]:
        # Other ranks' backward passes may have reached parameters that this one's has not.
        for name, parameter in self._hooked.items():
            if name not in self._reducer.open and name not in self._reduced:
                self._reducer.ready(name, torch.zeros_like(parameter, requires_grad=False))
        return self._reducer.wait()

    def _ranks(self) -> tuple[int, ...]:
        ranks: tuple[int, ...] = _frontend.context.engine.process_sets[process_set_id(self._options.process_set)]
        return ranks

    def _make_reducer(self, groups: Sequence[Sequence[str]]) -> GradientReducer[Tensor]:
        return GradientReducer(
            _frontend,
            op=self._options.op,
            compression=self._options.compression,
            predivide_factor=self._options.gradient_predivide_factor,
            groups=groups,
            process_set=self._options.process_set,
        )


def _ready(sync: weakref.ref[TorchSync], name: str, parameter: Tensor) -> None:
    alive = sync()
    if alive is not None and parameter.grad is not None:
        alive.ready(name, parameter.grad)


def open_sync(options: Options) -> TorchSync:
    """How gradients are reduced on this backend."""
    return TorchSync(options)
