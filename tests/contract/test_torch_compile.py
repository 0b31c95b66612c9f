"""torch.compile around and below hvdgloo: calls are graph breaks, and numbers are the uncompiled program's."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch._dynamo as dynamo  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import hvdgloo.torch as hvd  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._collectives.names import ASYNCHRONOUS, COLLECTIVES, IN_PLACE, OBJECTS, PROCESS_SETS  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, wrap  # noqa: E402
from hvdgloo.torch._frontend import TorchFrontend  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch.elastic import ElasticSampler, TorchState  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.launching import run_command  # noqa: E402
from tests.support.selection import extended  # noqa: E402
from tests.support.small_model import INPUTS, TARGETS, alike, make_model, part_of, values  # noqa: E402
from tests.support.world import World  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, from within its compiler

needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
TRACERS = ["aot_eager", *extended("eager"), pytest.param("inductor", marks=[pytest.mark.extended, needs_a_compiler])]

Compile = Callable[..., Any]


@pytest.fixture(params=TRACERS)
def compiled(request: pytest.FixtureRequest) -> Iterator[Compile]:
    """torch.compile with one of the backends, for functions that have not been compiled before."""
    dynamo.reset()
    counters.clear()
    yield lambda function, **how: torch.compile(function, backend=request.param, **how)
    dynamo.reset()


def frontend_of(context: Context) -> TorchFrontend:
    return TorchFrontend(TorchAdapter(), lambda: context)


def started(f: TorchFrontend, x: Tensor) -> Tensor:
    handle = f.allreduce_async(x * 2, op=ReduceOp.SUM)
    done = f.poll(handle)
    result: Tensor = f.synchronize(handle) + (1 if done in (True, False) else 0)
    return result


def in_place(f: TorchFrontend, x: Tensor) -> Tensor:
    y = x * 3
    f.allreduce_(y)
    return y + 1


def sparse(f: TorchFrontend, x: Tensor) -> Tensor:
    return f.sparse_allreduce_async((x * 2).to_sparse(), "sparse", ReduceOp.SUM)().to_dense() + 1


CALLS: dict[str, Callable[[TorchFrontend, Tensor], Any]] = {
    "allreduce": lambda f, x: f.allreduce(x * 2) + 1,
    "in place": in_place,
    "started": started,
    "grouped": lambda f, x: f.grouped_allreduce([x * 2, x + 1])[1] + 1,
    "allgather": lambda f, x: f.allgather(x * 2) + 1,
    "broadcast": lambda f, x: f.broadcast(x * 2, 1) + 1,
    "alltoall": lambda f, x: f.alltoall(x * 2) + 1,
    "reducescatter": lambda f, x: f.reducescatter(x * 2) + 1,
    "sparse": sparse,
    "objects": lambda f, x: x * f.broadcast_object(3, 1) + len(f.allgather_object("one")),
    "barrier": lambda f, x: (x * 2, f.barrier())[0] + 1,
    "adasum": lambda f, x: f.allreduce(x * 2, op=ReduceOp.ADASUM) + 1,
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_compiled_function_with_a_collective_gives_what_it_gives_uncompiled(compiled: Compile, name: str) -> None:
    call = CALLS[name]

    def rank_body(context: Context) -> tuple[Any, list[Any]]:
        f, x = frontend_of(context), torch.arange(4.0) + context.rank
        fast = compiled(lambda x: call(f, x))
        return call(f, x), [fast(x) for _ in range(2)]

    with World(2, "inline") as world:
        for plain, fast in world.run(rank_body, deadline=50):
            for each in fast:
                torch.testing.assert_close(each, plain)
    assert counters["stats"]["unique_graphs"] >= 1  # what is around the call was compiled


@pytest.mark.parametrize("name", ["allreduce", "allgather", "reducescatter"])
def test_a_differentiable_collective_in_a_compiled_function_has_its_gradient(compiled: Compile, name: str) -> None:
    call = CALLS[name]

    def rank_body(context: Context) -> list[Tensor]:
        f, gradients = frontend_of(context), []
        for wrapped in (lambda x: call(f, x), compiled(lambda x: call(f, x))):
            x = (torch.arange(4.0) + context.rank).requires_grad_()
            (wrapped(x) ** 2).sum().backward()
            gradients.append(x.grad)
        return gradients

    with World(2, "inline") as world:
        for plain, fast in world.run(rank_body, deadline=50):
            torch.testing.assert_close(fast, plain)


def test_a_whole_graph_is_refused_in_a_sentence_before_anything_is_sent(compiled: Compile) -> None:
    def rank_body(context: Context) -> tuple[str, int]:
        f = frontend_of(context)
        try:
            compiled(lambda x: f.allreduce(x * 2) + 1, fullgraph=True)(torch.ones(2))
        except dynamo.exc.Unsupported as error:
            return str(error), sum(plane.operations for plane in context.metrics().planes.values())
        return "", -1

    with World(2, "inline") as world:
        for text, operations in world.run(rank_body, deadline=50):
            assert "hvdgloo exchanges data with other processes here" in text
            assert "compile without fullgraph=True" in text
            assert operations == 0


def test_rank_and_size_are_read_in_a_whole_graph(compiled: Compile) -> None:
    def rank_body(context: Context) -> Tensor:
        f = frontend_of(context)
        result: Tensor = compiled(lambda x: x + 10 * f.rank() + f.size(), fullgraph=True)(torch.zeros(1))
        return result

    with World(2, "inline") as world:
        assert [float(each) for each in world.run(rank_body, deadline=50)] == [2, 12]


# Training ------------------------------------------------------------------------------------------------------------


def distribute(context: Context, model: nn.Module, **options: Any) -> DistributedTorchOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wrap(frontend_of(context), optimizer, model.named_parameters(), None, ReductionOptions(**options))


Step = Callable[[Tensor, Tensor], Any]


def whole_step(model: nn.Module, optimizer: Any, compile_: Compile) -> Step:
    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return compile_(step)  # type: ignore[no-any-return]


def synchronized_step(model: nn.Module, optimizer: Any, compile_: Compile) -> Step:
    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    return compile_(step)  # type: ignore[no-any-return]


def optimizer_step(model: nn.Module, optimizer: Any, compile_: Compile) -> Step:
    fast = compile_(optimizer.step)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        fast()

    return step


def users_own_step(model: nn.Module, optimizer: Any, compile_: Compile) -> Step:
    """The update alone is compiled, as docs/compatibility.md says."""
    plain = optimizer.__reduce_ex__(2)[1][0]
    plain.step = compile_(plain.step)
    return optimizer_step(model, optimizer, lambda step: step)


def model_alone(model: nn.Module, optimizer: Any, compile_: Compile) -> Step:
    return whole_step(compile_(model), optimizer, lambda step: step)


def closure_step(model: nn.Module, optimizer: Any, compile_: Compile) -> Step:
    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return compile_(step)  # type: ignore[no-any-return]


STEPS = [whole_step, synchronized_step, optimizer_step, users_own_step, model_alone, closure_step]


def trained(context: Context, make: Callable[..., Step], compile_: Compile, **options: Any) -> list[Any]:
    model = make_model()
    step = make(model, distribute(context, model, **options), compile_)
    part = part_of(context)
    for _ in range(4):
        step(INPUTS[part], TARGETS[part])
    return values(model)


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_a_compiled_step_trains_as_the_uncompiled_one(compiled: Compile, make: Callable[..., Step]) -> None:
    with World(2, "inline") as world:
        for plain, fast in world.run(
            lambda c: (trained(c, make, lambda f: f), trained(c, make, compiled)), deadline=50
        ):
            alike(fast, plain)


@pytest.mark.parametrize(
    "options", [{"op": ReduceOp.ADASUM}, {"backward_passes_per_step": 1, "op": ReduceOp.SUM}], ids=str
)
def test_a_compiled_step_with_options_trains_as_the_uncompiled_one(compiled: Compile, options: Any) -> None:
    with World(2, "inline") as world:
        for plain, fast in world.run(
            lambda c: (trained(c, whole_step, lambda f: f, **options), trained(c, whole_step, compiled, **options)),
            deadline=50,
        ):
            alike(fast, plain)


def test_hooks_in_compiled_backward_passes_send_gradients(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo.config, "compiled_autograd", True)
    with World(2, "inline") as world:
        for plain, fast in world.run(
            lambda c: (trained(c, whole_step, lambda f: f), trained(c, whole_step, compiled)), deadline=50
        ):
            alike(fast, plain)


def test_a_compiled_model_with_synchronised_batch_normalisation_trains_and_is_evaluated(compiled: Compile) -> None:
    def rank_body(context: Context) -> list[Any]:
        found = []
        # Only one rank compiles, which takes half of the time: Dynamo compiles for one thread after the other.
        for compile_ in (lambda f, **_: f, compiled if context.rank == 0 else lambda f, **_: f):
            model = make_model()
            norm = hvd.SyncBatchNorm(8).double()
            norm.frontend = frontend_of(context)
            model.insert(1, norm)
            fast = compile_(model)
            optimizer, part = distribute(context, model), part_of(context)
            for _ in range(2):
                optimizer.zero_grad()
                ((fast(INPUTS[part]) - TARGETS[part]) ** 2).mean().backward()
                optimizer.step()
            model.eval()
            found.append([*values(model), compile_(model, fullgraph=True)(INPUTS).detach().numpy()])
        return found

    with World(2, "inline") as world:
        for plain, fast in world.run(rank_body, deadline=50):
            alike(fast, plain)


def test_a_state_is_committed_and_restored_in_a_compiled_function(compiled: Compile) -> None:
    model = make_model()
    sampler = ElasticSampler(range(20), shuffle=False)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler, batch=0)
    before = values(model)

    @compiled
    def step(x: Tensor) -> Tensor:
        state.batch = state.batch + 1
        sampler.record_batch(0, 2)
        state.commit()
        return x + 1

    for _ in range(3):
        step(torch.ones(1))
    with torch.no_grad():
        next(model.parameters()).zero_()
    state.restore()
    alike(values(model), before, rtol=0)
    assert (state.batch, sampler.processed_num) == (3, 6)


# Everything ----------------------------------------------------------------------------------------------------------


def test_every_function_that_exchanges_data_is_a_graph_break() -> None:
    own = ("broadcast_parameters", "broadcast_optimizer_state", "sparse_allreduce_async")
    names = (*COLLECTIVES, *IN_PLACE, *ASYNCHRONOUS, *OBJECTS, *PROCESS_SETS, *own)
    functions = {name: getattr(hvd, name) for name in names}
    functions |= {
        f"TorchState.{name}": getattr(TorchState, name) for name in ("commit", "check_host_updates", "save", "sync")
    }
    functions |= {
        f"DistributedOptimizer.{name}": getattr(DistributedTorchOptimizer, name)
        for name in ("step", "synchronize", "skip_synchronize", "zero_grad", "load_state_dict", "add_param_group")
    }
    assert [name for name, function in functions.items() if not hasattr(function, "_torchdynamo_disable")] == []


def test_importing_hvdgloo_imports_no_compiler_and_puts_no_graph_break_into_plain_optimizers() -> None:
    program = (
        "import sys, hvdgloo.torch, torch.optim.optimizer as optimizers\n"
        "print('torch._dynamo' in sys.modules, len(optimizers._global_optimizer_pre_hooks))"
    )
    found = run_command([sys.executable, "-c", program], check=True, timeout=50)
    assert found.stdout == "False 0\n"


def test_a_frontend_of_a_program_s_own_is_a_graph_break_too(compiled: Compile) -> None:
    def rank_body(context: Context) -> Tensor:
        f = Frontend(TorchAdapter(), lambda: context)
        result: Tensor = compiled(lambda x: f.allreduce(x * 2) + 1)(torch.ones(2))
        return result

    with World(2, "inline") as world:
        for each in world.run(rank_body, deadline=50):
            assert each.tolist() == [3, 3]
