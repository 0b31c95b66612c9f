"""A distributed optimizer looks like an optimizer to code that inspects it, or builds classes on it."""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
import types
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from typing_extensions import Protocol, runtime_checkable  # noqa: E402

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import OptimizerCallError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.world import MakeWorld  # noqa: E402


@runtime_checkable
class Optimizable(Protocol):
    """A trainer's requirements on an optimizer, as a protocol that looks at attributes without calling anything."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: dict[Any, Any]

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def step(self, closure: Any = None) -> Any: ...


def parameter(value: float = 0.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value]))


def distribute(context: Context, plain: torch.optim.Optimizer, **options: Any) -> DistributedTorchOptimizer:
    named = [(f"p{i}", p) for i, p in enumerate(p for group in plain.param_groups for p in group["params"])]
    return wrap(Frontend(TorchAdapter(), lambda: context), plain, named, None, ReductionOptions(**options))


def make(ranks: MakeWorld, **settings: Any) -> tuple[torch.optim.SGD, DistributedTorchOptimizer]:
    plain = torch.optim.SGD([parameter()], **({"lr": 1.0} | settings))
    return plain, distribute(ranks(1).contexts[0], plain)


def one_step(context: Context, optimizer: Any, value: torch.nn.Parameter) -> float:
    """Each rank's gradient is its number; what the parameter is after a step on their mean."""
    optimizer.zero_grad()
    (value * float(context.rank)).sum().backward()
    optimizer.step()
    return value.item()


# Attributes ----------------------------------------------------------------------------------------------------------


def test_all_ways_of_inspection_find_the_attributes_of_an_optimizer(ranks: MakeWorld) -> None:
    plain, optimizer = make(ranks)
    for name in ("param_groups", "state", "defaults"):
        assert vars(optimizer)[name] is getattr(plain, name)
        assert inspect.getattr_static(optimizer, name) is not None
    assert set(dir(plain)) <= set(dir(optimizer))
    for name in ("step", "synchronize", "skip_synchronize", "op", "_handles"):
        assert name in dir(optimizer)
        assert inspect.getattr_static(optimizer, name) is not None
    assert isinstance(optimizer, Optimizable)
    assert list(inspect.signature(optimizer.step).parameters) == ["closure"]


def test_what_programs_read(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        p, frozen = parameter(), parameter()
        frozen.requires_grad_(False)
        pair = Frontend(TorchAdapter(), lambda: context).add_process_set([0, 1])
        if context.rank == 2:
            return
        options = {"backward_passes_per_step": 2, "gradient_predivide_factor": 4.0, "process_set": pair}
        optimizer = distribute(context, torch.optim.SGD([p, frozen], lr=1.0), **options)
        assert {name: getattr(optimizer, name) for name in options} == options
        assert optimizer.op is ReduceOp.AVERAGE
        assert optimizer.sparse_as_dense is False
        assert optimizer._parameter_names == {p: "p0", frozen: "p1"}
        assert optimizer._requires_update == {p}
        assert optimizer._handles == {}
        p.sum().backward()
        assert optimizer._handles == {}  # the first of two passes
        assert optimizer._allreduce_grad_async(p) == (None, None)
        assert set(optimizer._handles) == {p}
        optimizer.step()
        assert optimizer._handles == {}
        assert p.item() == -1.0
        with pytest.raises(OptimizerCallError, match="_requires_update"):
            optimizer._allreduce_grad_async(frozen)
        optimizer.set_backward_passes_per_step(3)
        assert optimizer.backward_passes_per_step == 3

    ranks(3).run(rank_body)


def test_an_attribute_of_the_users_class_precedes_what_programs_read(ranks: MakeWorld) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=1.0)
            self.op = "mine"

        def step(self, closure: Any = None) -> Any:
            assert self.op == "mine"
            return super().step(closure)

    optimizer = distribute(ranks(1).contexts[0], Own([parameter()]))
    assert optimizer.op == "mine"
    optimizer.step()


# One state -----------------------------------------------------------------------------------------------------------


def test_state_does_not_drift_apart(ranks: MakeWorld) -> None:
    plain, optimizer = make(ranks, momentum=0.5)
    (p,) = plain.param_groups[0]["params"]
    for stepping in (optimizer, plain):  # either makes and uses the same momentum
        p.grad = torch.ones(1)
        stepping.step()
    assert p.item() == -2.5
    saved = plain.state_dict()
    saved["param_groups"][0]["lr"] = 3.0
    for loading, other in ((plain, optimizer), (optimizer, plain)):
        loading.load_state_dict(saved)  # which replaces both attributes
        assert loading.param_groups is other.param_groups
        assert loading.state is other.state
        assert other.param_groups[0]["lr"] == 3.0
    optimizer.param_groups = [{**plain.param_groups[0], "lr": 4.0}]
    assert plain.param_groups[0]["lr"] == 4.0


def test_step_hooks_run_once_also_after_loading(ranks: MakeWorld) -> None:
    _, optimizer = make(ranks)
    optimizer.load_state_dict(optimizer.state_dict())  # torch then looks whether step() is one that runs hooks
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda it, *_: calls.append(it))
    optimizer.step()
    assert calls == [optimizer]


def test_methods_are_replaced_on_each_of_the_two_alone(ranks: MakeWorld) -> None:
    plain, optimizer = make(ranks)
    calls: list[str] = []
    plain.zero_grad = lambda: calls.append("plain")  # type: ignore[method-assign]
    optimizer.zero_grad()
    assert calls == []
    optimizer.zero_grad = lambda: calls.append("ours")  # type: ignore[method-assign]
    plain.zero_grad()
    optimizer.zero_grad()
    assert calls == ["plain", "ours"]
    del optimizer.zero_grad
    with pytest.raises(AttributeError):
        del optimizer.zero_grad
    optimizer.zero_grad()
    assert calls == ["plain", "ours"]


def test_a_scheduler_of_the_plain_optimizer_counts_our_steps(ranks: MakeWorld) -> None:
    """It replaces the plain optimizer's step() by one that does not keep that optimizer alive."""
    plain = torch.optim.SGD([parameter()], lr=1.0)
    torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer = distribute(ranks(1).contexts[0], plain)
    del plain
    gc.collect()
    optimizer.step()
    assert optimizer._opt_called


def test_an_optimizer_goes_when_it_is_not_referred_to(ranks: MakeWorld) -> None:
    _, optimizer = make(ranks)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del _, optimizer
        assert gone() is None  # and with it, on a GPU, memory for its state
    finally:
        gc.enable()


class Whole(torch.optim.SGD):
    """Pickles all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def test_a_class_that_pickles_all_attributes_is_pickled_without_ours(ranks: MakeWorld) -> None:
    plain = Whole([parameter()], lr=1.0)
    optimizer = distribute(ranks(1).contexts[0], plain)
    for given in (plain, optimizer):
        loaded = pickle.loads(pickle.dumps(given))
        assert type(loaded) is Whole
        loaded.step()
    del plain
    assert type(pickle.loads(pickle.dumps(optimizer))) is Whole


def test_param_groups_that_the_class_computes(ranks: MakeWorld) -> None:
    class Around(torch.optim.Optimizer):
        """An optimizer around another one."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self.defaults, self.state = inner.defaults, inner.state
            self.__setstate__({})

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.inner.param_groups

        @param_groups.setter
        def param_groups(self, value: list[dict[str, Any]]) -> None:
            self.inner.param_groups = value

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    def rank_body(context: Context) -> float:
        p = parameter()
        inner = torch.optim.SGD([p], lr=1.0)
        optimizer = distribute(context, Around(inner))
        assert optimizer.param_groups is inner.param_groups
        optimizer.param_groups = [{**inner.param_groups[0], "lr": 2.0}]
        assert inner.param_groups[0]["lr"] == 2.0
        return one_step(context, optimizer, p)

    assert ranks(2).run(rank_body) == [-1.0, -1.0]


# Classes -------------------------------------------------------------------------------------------------------------


def test_the_class_is_made_from_the_users(ranks: MakeWorld) -> None:
    plain, optimizer = make(ranks)
    assert type(optimizer).__bases__[0] is type(optimizer).__base__ is torch.optim.SGD
    assert isinstance(optimizer, DistributedTorchOptimizer)
    assert type(plain) is torch.optim.SGD


def test_another_one_of_the_class_is_made_from_a_plain_one(ranks: MakeWorld) -> None:
    """A library that calls the class knows nothing of names, groups and process sets."""
    _, optimizer = make(ranks)
    with pytest.raises(TypeError, match=r"make a plain one, .* hvd\.DistributedOptimizer\(SGD\(parameters, \.\.\.\)\)"):
        type(optimizer)([parameter()], lr=1.0)


def test_the_class_says_where_it_is_from(ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries look for "horovod" in it, and do not wrap such an optimizer again."""
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert str(type(make(ranks)[1])) == "<class 'hvdgloo.torch.optimizer.SGD'>"
    alias = types.ModuleType("horovod")
    alias.stands_in_for = "Horovod"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", alias)
    assert str(type(make(ranks)[1])) == "<class 'horovod.torch.optimizer.SGD'>"


def test_past_our_step_is_the_users(ranks: MakeWorld) -> None:
    """Libraries that do the communication themselves call the next class's step()."""

    def rank_body(context: Context) -> float:
        p = parameter()
        optimizer = distribute(context, torch.optim.SGD([p], lr=1.0))
        (p * float(context.rank)).sum().backward()
        optimizer.synchronize()
        p.grad = torch.full((1,), 5.0)
        super(type(optimizer), optimizer).step()
        return p.item()

    assert ranks(2).run(rank_body) == [-5.0, -5.0]


def test_classes_that_are_built_on_ours(ranks: MakeWorld) -> None:
    class Preconditioner:
        def step(self, closure: Any = None) -> Any:
            self.preconditioned = True
            return super(self.__class__, self).step(closure)  # type: ignore[misc]

        def precondition(self) -> str:
            return "found"

    def rank_body(context: Context) -> list[float]:
        p = parameter()
        optimizer: Any = distribute(context, torch.optim.SGD([p], lr=1.0))
        made = type(optimizer)
        values = []
        # A subclass, the user's class with our members, and ours once more.
        methods = {key: value for key, value in vars(Preconditioner).items() if not key.startswith("__")}
        copied = {key: value for key, value in vars(made).items() if key != "__dict__"}
        for cls in (type("SGD", (made,), methods), type("SGD", (made.__bases__[0],), copied), made):
            optimizer.__class__ = cls
            assert hasattr(optimizer, "precondition") is (cls.__base__ is made)
            values.append(one_step(context, optimizer, p))
        assert optimizer.preconditioned
        return values

    for result in ranks(2).run(rank_body):
        assert result == [-0.5, -1.0, -1.5]


def test_an_object_that_takes_the_attributes_and_the_class(ranks: MakeWorld) -> None:
    """As a trainer makes its own object of an optimizer, which it calls through that."""

    class Trainers:
        def __init__(self, optimizer: Any) -> None:
            self.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
            self.__class__ = type("Trainers" + type(optimizer).__name__, (Trainers, type(optimizer)), {})
            self._optimizer = optimizer

        def step(self, closure: Any = None) -> Any:
            return self._optimizer.step(closure)

    def rank_body(context: Context) -> float:
        p = parameter()
        around: Any = Trainers(distribute(context, torch.optim.SGD([p], lr=1.0)))
        assert isinstance(around, torch.optim.SGD)
        assert around.param_groups[0]["params"] == [p]
        first = one_step(context, around, p)
        around.synchronize()
        with around.skip_synchronize():
            around.step()
        return first

    assert ranks(2).run(rank_body) == [-0.5, -0.5]
