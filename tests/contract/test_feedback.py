"""Error feedback of gradients: what int4 leaves out of one arrives with a later one, also in another job."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends.select import gloo_provider
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import HorovodInternalError, MismatchError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.numpy._compression import Compression
from hvdgloo.types import ReduceOp
from tests.support.world import MakeWorld, World

pytestmark = pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")

Arrays = Mapping[str, Any]

RANKS = {"gloo": 2, "hierarchical": 4}
BACKENDS = tuple(RANKS)
COUNTS = {"a": 3000, "b": 700}
ROUNDS = 12


@pytest.fixture
def make(backend: str, world: MakeWorld) -> MakeWorld:
    """Makes a world of ranks on two hosts."""
    return lambda size=RANKS[backend], **settings: world(size, **{"wire_threshold": 0, **settings})


class Program:
    """One rank's training, in one job after the other.

    Attributes:
        given: the sum of this rank's gradients.
        received: the sum of what became of all ranks'.
    """

    def __init__(self, rank: int, dtype: Any = np.float32, counts: Mapping[str, int] = COUNTS, **options: Any) -> None:
        self._random = np.random.default_rng(rank)
        self._dtype = dtype
        self.counts = dict(counts)
        self.context: Any = None
        self.given = {name: np.zeros(count) for name, count in counts.items()}
        self.received = {name: np.zeros(count) for name, count in counts.items()}
        options = {"op": ReduceOp.SUM, "compression": Compression.int4_feedback, **options}
        self.reducer = GradientReducer(Frontend(NumpyAdapter(), lambda: self.context), **options)

    def step(self) -> None:
        for name, count in self.counts.items():
            gradient = (self._random.standard_normal(count) + 0.2).astype(self._dtype)
            self.given[name] = self.given[name] + gradient
            self.reducer.ready(name, gradient)
        for name, result in self.reducer.wait().items():
            self.received[name] = self.received[name] + result

    def train(self, context: Context, steps: int = ROUNDS) -> Program:
        self.context = context
        for _ in range(steps):
            self.step()
        return self


def missing(programs: list[Program]) -> dict[str, Any]:
    """Return what ranks have given and not received."""
    for program in programs:
        for name, received in program.received.items():
            assert (received == programs[0].received[name]).all()
    return {name: np.sum([p.given[name] for p in programs], 0) - programs[0].received[name] for name in COUNTS}


def close(actual: Arrays, expected: Arrays, most: float = 5.0, atol: float = 1e-3) -> None:
    """Check that this is what is missing, and about as much as one step's codes leave out."""
    assert set(actual) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=atol)
        assert 0.05 < np.abs(values).max() < most


def left_out(programs: list[Program]) -> Callable[[Context], dict[str, Any]]:
    return lambda context: programs[context.rank].reducer.left_out()


def trained(world: World, **options: Any) -> list[Program]:
    return world.run(lambda context: Program(context.rank, **options).train(context))


@pytest.mark.parametrize(
    ("groups", "settings"),
    [((), {}), ([("a", "b")], {}), ([("a", "b")], {"fusion_threshold": 4 * COUNTS["a"]})],
    ids=["alone", "in a group", "in a group of several buckets"],
)
def test_what_ranks_have_not_received_is_what_was_left_out_last(
    make: MakeWorld, groups: Any, settings: dict[str, int]
) -> None:
    world = make(**settings)
    programs = trained(world, groups=groups)
    for result in world.run(left_out(programs)):
        close(result, missing(programs))


def test_without_feedback_more_is_missing_after_each_step(make: MakeWorld) -> None:
    with_it = missing(trained(make()))["a"]
    without = missing(trained(make(), compression=Compression.int4))["a"]
    assert np.linalg.norm(without) > 2 * np.linalg.norm(with_it)


def test_the_setting_asks_for_it_too(make: MakeWorld) -> None:
    world = make(wire="int4-feedback")
    programs = trained(world, compression=Compression.none)
    close(world.run(left_out(programs))[0], missing(programs))


def test_it_compensates_half_types(make: MakeWorld) -> None:
    world = make()
    programs = trained(world, dtype=np.float16)
    # What float16 rounds is lost, as without any encoding.
    close(world.run(left_out(programs))[0], missing(programs), atol=0.2)


def test_in_the_next_job_ranks_add_what_they_have_left_out_to_their_gradients(make: MakeWorld) -> None:
    programs = trained(make())
    world = make()
    world.run(lambda context: programs[context.rank].train(context))
    close(world.run(left_out(programs))[0], missing(programs))


def test_a_checkpoint_serves_another_number_of_ranks(make: MakeWorld, backend: str) -> None:
    world = make()
    programs = trained(world)
    (saved, *others) = world.run(left_out(programs))
    assert all((other[name] == saved[name]).all() for other in others for name in saved)
    size = RANKS[backend] + 1
    resumed = [Program(100 + rank) for rank in range(size)]

    def resume(context: Context) -> dict[str, Any]:
        program = resumed[context.rank]
        program.context = context
        program.reducer.set_left_out(saved)
        return program.train(context).reducer.left_out()

    result = make(size).run(resume)[0]
    both = {name: values + saved[name] for name, values in missing(resumed).items()}
    close(result, both)


def test_gradients_that_begin_to_travel_together_keep_what_was_left_out_of_each(make: MakeWorld) -> None:
    world = make()
    programs = trained(world)

    def go_on(context: Context) -> dict[str, Any]:
        program = programs[context.rank]
        whole = np.zeros(4096, np.float32)
        spans = {"b": (64, COUNTS["b"]), "a": (1024, COUNTS["a"])}
        program.reducer.merge(list(spans), whole, list(spans.values()))
        for _ in range(3):
            whole[:] = 0
            for name, (begin, count) in spans.items():
                gradient = program._random.standard_normal(count).astype(np.float32)
                program.given[name] = program.given[name] + gradient
                whole[begin : begin + count] = gradient
                program.reducer.ready(name, whole[begin : begin + count])
            program.reducer.wait()
            for name, (begin, count) in spans.items():
                program.received[name] = program.received[name] + whole[begin : begin + count]
        return program.reducer.left_out()

    result = world.run(go_on)[0]
    close(result, missing(programs))


def test_a_gradient_of_another_shape_begins_without(make: MakeWorld) -> None:
    world = make()
    programs = trained(world)

    def change(context: Context) -> dict[str, Any]:
        program = programs[context.rank]
        program.counts["a"] = 10
        program.given["a"] = program.received["a"] = np.zeros(10)
        return program.train(context, 3).reducer.left_out()

    result = world.run(change)[0]
    assert result["a"].shape == (10,)
    close(result, missing(programs))


def test_after_a_failure_nothing_is_kept(make: MakeWorld) -> None:
    world = make()
    programs = trained(world)
    others = programs[:-1]
    for program in others:
        program.reducer.ready("a", np.ones(COUNTS["a"], np.float32))
    world.contexts[-1].engine._control.close()
    for program in others:
        with pytest.raises(HorovodInternalError):
            program.reducer.wait()
        assert program.reducer._residuals.all() == {}


def test_ranks_that_disagree_get_an_error(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        compression = Compression.int4 if context.rank == 0 else Compression.int4_feedback
        with pytest.raises(MismatchError, match=r"wire format: int4 on rank 0; int4-feedback on rank"):
            Program(context.rank, compression=compression).train(context, 1)

    make().run(rank_body)


def test_torch_optimizers_keep_it_in_their_buckets_and_in_checkpoints(make: MakeWorld) -> None:
    torch = pytest.importorskip("torch")
    from hvdgloo.torch._adapter import TorchAdapter
    from hvdgloo.torch._distributed_optimizer import wrap
    from hvdgloo.torch._parameters import ReductionOptions
    from hvdgloo.torch.compression import Compression as TorchCompression

    steps = 6

    def make_optimizer(context: Context) -> tuple[list[Any], Any]:
        parameters = [torch.nn.Parameter(torch.zeros(count)) for count in (3000, 700)]
        named = list(zip("ab", parameters, strict=True))
        options = ReductionOptions(op=ReduceOp.SUM, compression=TorchCompression.int4_feedback)
        sgd = torch.optim.SGD(parameters, lr=1.0)
        return parameters, wrap(Frontend(TorchAdapter(), lambda: context), sgd, named, None, options)

    def step(context: Context, parameters: list[Any], optimizer: Any, number: int) -> list[Any]:
        random = np.random.default_rng(100 * number + context.rank)
        factors = [torch.from_numpy(random.standard_normal(len(p)).astype(np.float32) + 0.2) for p in parameters]
        optimizer.zero_grad()
        sum((p * factor).sum() for p, factor in zip(parameters, factors, strict=True)).backward()
        optimizer.step()
        return [factor.numpy() for factor in factors]

    def rank_body(context: Context) -> tuple[list[Any], list[Any], dict[str, Any]]:
        parameters, optimizer = make_optimizer(context)
        given = [step(context, parameters, optimizer, number) for number in range(steps)]
        file = io.BytesIO()
        torch.save(optimizer.residual_state_dict(), file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        _, again = make_optimizer(context)
        again.load_residual_state_dict(state)
        for name, values in again.residual_state_dict().items():
            np.testing.assert_allclose(values, state[name], atol=1e-5)
        received = [-parameter.detach().numpy() for parameter in parameters]
        return [sum(each) for each in zip(*given, strict=True)], received, state

    results = make().run(rank_body)
    for index, name in enumerate("ab"):
        total = sum(given[index] for given, _, _ in results)
        np.testing.assert_allclose(total - results[0][1][index], results[0][2][name], atol=1e-3)
        assert results[0][2][name].abs().max() < 5
