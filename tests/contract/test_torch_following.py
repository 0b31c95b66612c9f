"""Optimizers of an elastic job, which go on with more ranks or fewer, some of which have made theirs later."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._backends.base import Backend, Work  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._collectives.process_sets import ProcessSet  # noqa: E402
from hvdgloo._training.options import Groups  # noqa: E402
from hvdgloo.errors import BackendError, HorovodInternalError, InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch._state import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.torch.sync_batch_norm import SyncBatchNorm  # noqa: E402
from hvdgloo.types import Buffer, ReduceOp  # noqa: E402
from tests.support.lives import Life, Lives  # noqa: E402
from tests.support.small_model import BATCH, INPUTS, WEIGHTS, alike, loss_of, make_model, part_of, values  # noqa: E402

GROWING = ("a", "ab", "abcd", "c")
"""Members of one epoch after another: from one to four, and down to one that was not there at first."""


pytestmark = pytest.mark.usefixtures("one_thread")


def frontend_of(life: Life) -> Frontend[Tensor]:
    if "frontend" not in life.kept:
        life.kept["frontend"] = Frontend(TorchAdapter(), lambda: life.context)
    frontend: Frontend[Tensor] = life.kept["frontend"]
    return frontend


def distribute(
    life: Life, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, groups: Groups = None, **options: Any
) -> DistributedTorchOptimizer:
    plain = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wrap(frontend_of(life), plain, model.named_parameters(), groups, ReductionOptions(**options))


def make(life: Life, **options: Any) -> None:
    """A program's start."""
    model = life.kept["model"] = make_model()
    life.kept["optimizer"] = distribute(life, model, **options)


def making(**options: Any) -> Callable[[Life], None]:
    return lambda life: make(life, **options)


def sync(life: Life) -> None:
    """All have what rank 0, a survivor, has."""
    broadcast_parameters(frontend_of(life), life.kept["model"].state_dict(), 0)
    broadcast_optimizer_state(frontend_of(life), life.kept["optimizer"], 0)


def step(life: Life) -> None:
    """In the idiom that clears gradients last, which leaves a failed step's gradients where they are."""
    loss_of(life.kept["model"], part_of(life.context)).backward()
    life.kept["optimizer"].step()
    life.kept["optimizer"].zero_grad()


def steps(count: int) -> Callable[[Life], list[np.ndarray]]:
    def body(life: Life) -> list[np.ndarray]:
        sync(life)
        for _ in range(count):
            step(life)
        return values(life.kept["model"])

    return body


def single_process(count: int, wrapped: Callable[[Any], Any] | None = None) -> list[np.ndarray]:
    model = make_model()
    optimizer = (wrapped or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(model.parameters())
    for _ in range(count):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return values(model)


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"compression": Compression.fp16}],
    ids=["", "groups", "predivided", "fp16"],
)
def test_from_one_to_four_and_down_to_one(options: dict[str, Any]) -> None:
    """Every epoch trains as one process does on the whole batch; in each, three steps: without buckets and with."""
    with Lives(making(**options)) as lives:
        for number, members in enumerate(GROWING, 1):
            results = lives.epoch(members, steps(3))
            for result in results:
                alike(result, single_process(3 * number), rtol=0.05 if "compression" in options else 1e-6)
                alike(result, results[0], rtol=0)


@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_on_planes_of_the_system(plane: str) -> None:
    with Lives(make, plane) as lives:
        for number, members in enumerate(GROWING, 1):
            for result in lives.epoch(members, steps(3)):
                alike(result, single_process(3 * number))


def test_a_newcomer_that_makes_its_optimizer_in_the_epoch_itself() -> None:
    """As with --join now: in its Context no optimizer has stepped so far, no matter what was made in it."""

    def late(life: Life) -> list[np.ndarray]:
        if life.name == "b":
            life.kept["other"] = distribute(life, make_model())
            make(life)
        return steps(2)(life)

    with Lives(make) as lives:
        lives.epoch("a", steps(2))
        for result in lives.epoch("ab", late):
            alike(result, single_process(4))


def test_an_optimizer_of_many_epochs_ago_beside_new_ones() -> None:
    """The survivors have made others meanwhile, which are gone or unused."""

    def more(life: Life) -> list[np.ndarray]:
        for _ in range(3):
            distribute(life, make_model())
        life.kept["unused"] = distribute(life, make_model())
        return steps(1)(life)

    with Lives(make) as lives:
        lives.epoch("ab", more)
        lives.epoch("ab", more)
        for result in lives.epoch("abc", steps(2)):
            alike(result, single_process(4))


def test_two_optimizers_made_in_one_order_and_in_the_other() -> None:
    """A GAN's: their parameters have the same names and shapes, and the generator's backward pass reaches both."""

    def both(life: Life) -> None:
        order = ("generator", "critic") if life.name == "a" else ("critic", "generator")
        for which in order:
            model = nn.Linear(6, 6, bias=False).double()
            with torch.no_grad():
                model.weight.copy_(torch.eye(6) * (2.0 if which == "critic" else 1.0))
            life.kept[which] = model
            life.kept[f"{which}'s"] = distribute(life, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def adversarial(generator: nn.Module, critic: nn.Module, stepping: Callable[[str], Any], part: slice) -> None:
        for which in ("critic", "generator"):
            generator.zero_grad()
            critic.zero_grad()
            made = generator(INPUTS[part])
            loss = critic(made if which == "generator" else made.detach()).square().mean()
            (-loss if which == "generator" else loss).backward()
            stepping(which)

    def rank_body(life: Life) -> list[np.ndarray]:
        for which in ("generator", "critic"):
            broadcast_parameters(frontend_of(life), life.kept[which].state_dict(), 0)

        def stepping(which: str) -> None:
            life.kept[f"{which}'s"].step()
            if which == "generator":  # what its backward pass has left with the critic
                life.kept["critic's"].synchronize()

        for _ in range(3):
            adversarial(life.kept["generator"], life.kept["critic"], stepping, part_of(life.context))
        return [life.kept[which].weight.detach().numpy().copy() for which in ("generator", "critic")]

    plain = {which: nn.Linear(6, 6, bias=False).double() for which in ("generator", "critic")}
    with torch.no_grad():
        plain["generator"].weight.copy_(torch.eye(6))
        plain["critic"].weight.copy_(torch.eye(6) * 2)
    optimizers = {which: torch.optim.SGD(model.parameters(), lr=0.1) for which, model in plain.items()}
    with Lives(both) as lives:
        for members in ("a", "ab", "abc", "b"):
            results = lives.epoch(members, rank_body)
            for _ in range(3):
                adversarial(plain["generator"], plain["critic"], lambda which: optimizers[which].step(), slice(None))
            for result in results:
                alike(result, [plain[which].weight.detach().numpy() for which in ("generator", "critic")])


def test_adasum_follows() -> None:
    with Lives(making(op=ReduceOp.ADASUM)) as lives:
        for members in GROWING:
            results = lives.epoch(members, steps(2))
            if members == "a":
                alike(results[0], single_process(2))
            for result in results:
                alike(result, results[0], rtol=0)


def test_sparse_gradients_are_known_to_newcomers_too() -> None:
    """Survivors know which gradients are sparse, and newcomers ask: all ask again."""

    def with_embedding(life: Life) -> None:
        model = life.kept["model"] = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        life.kept["optimizer"] = distribute(life, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def words(life: Life) -> list[np.ndarray]:
        broadcast_parameters(frontend_of(life), life.kept["model"].state_dict(), 0)
        for _ in range(3):
            part = torch.arange(BATCH)[part_of(life.context)] % 5
            life.kept["model"](part).square().mean().backward()
            life.kept["optimizer"].step()
            life.kept["optimizer"].zero_grad()
        return values(life.kept["model"])

    with Lives(with_embedding) as lives:
        (alone,) = lives.epoch("z", lambda life: [words(life) for _ in GROWING])
        for number, members in enumerate(GROWING):
            for result in lives.epoch(members, words):
                alike(result, alone[number])


def test_parameters_that_a_survivor_froze_and_unfroze_at_another_time() -> None:
    def freezing(life: Life) -> list[np.ndarray]:
        first = life.kept["model"][0]
        if life.context.size == 1:
            first.weight.requires_grad_(False)
            life.kept["optimizer"].step()
        first.weight.requires_grad_(True)
        return steps(2)(life)

    with Lives(make) as lives:
        lives.epoch("a", freezing)
        results = lives.epoch("ab", freezing)
        alike(results[0], results[1], rtol=0)
        alike(results[0], single_process(4))


def test_parameters_that_are_frozen_on_all_from_now_on() -> None:
    def frozen(life: Life) -> list[np.ndarray]:
        life.kept["model"][0].weight.requires_grad_(False)
        return steps(2)(life)

    with Lives(make) as lives:
        lives.epoch("ab", steps(2))
        before = values(lives["a"].kept["model"])
        results = lives.epoch("abc", frozen)
        for result in results:
            alike(result, results[0], rtol=0)
            alike(result[:1], before[:1], rtol=0)
            assert abs(result[1] - before[1]).max() > 1e-3


def test_powersgd_begins_again_on_all() -> None:
    """Survivors go on as newcomers do: as a job that begins with the same parameters."""
    begin = list(WEIGHTS)
    compressors: dict[str, Any] = {}

    def compressed(life: Life) -> None:
        model = life.kept["model"] = make_model()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), begin, strict=True):
                parameter.copy_(value)
        compressors[life.name] = Compression.powersgd(rank=1, min_saving=0.5)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        life.kept["optimizer"] = distribute(life, model, plain, compression=compressors[life.name])

    with Lives(compressed) as lives:
        lives.epoch("ab", steps(3))
        assert compressors["a"].errors
        begin = [parameter.detach().clone() for parameter in lives["a"].kept["model"].parameters()]
        followed = lives.epoch("abc", steps(2))
    with Lives(compressed) as lives:
        fresh = lives.epoch("xyz", steps(2))
    for result in followed:
        alike(result, fresh[0])


def test_batches_are_normalised_over_those_who_are_there() -> None:
    def body(life: Life) -> list[np.ndarray]:
        layer = life.kept["layer"]
        layer.load_state_dict(nn.BatchNorm1d(6).double().state_dict())
        output = layer(INPUTS[part_of(life.context)])
        return [output.detach().numpy(), layer.running_var.numpy().copy()]

    def with_layer(life: Life) -> None:
        layer = life.kept["layer"] = SyncBatchNorm(6).double()
        layer.frontend = frontend_of(life)

    plain = nn.BatchNorm1d(6).double()
    expected = plain(INPUTS).detach().numpy()
    with Lives(with_layer) as lives:
        for members in GROWING:
            outputs, variances = zip(*lives.epoch(members, body), strict=True)
            alike([np.concatenate(outputs)], [expected])
            for variance in variances:
                alike([variance], [plain.running_var.numpy()])


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["backward", "step", "between", "accumulating"])
@pytest.mark.parametrize("buckets", [0, 1 << 20], ids=["", "buckets"])
def test_nothing_of_a_failed_step_goes_into_the_next_epoch(where: str, buckets: int) -> None:
    """Handles, half-reduced gradients and counts: what follows is as if the failed step had never begun."""
    passes = 2
    trained = threading.Barrier(3)  # a worker that dies earlier may fail the step that was to succeed

    def half(life: Life, which: int) -> None:
        part = part_of(life.context)
        middle = (part.start + part.stop) // 2
        piece = (slice(part.start, middle), slice(middle, part.stop))[which]
        (loss_of(life.kept["model"], piece) / 2).backward()

    def whole_step(life: Life) -> None:
        half(life, 0)
        half(life, 1)
        life.kept["optimizer"].step()
        life.kept["optimizer"].zero_grad()

    def training(life: Life) -> list[np.ndarray]:
        sync(life)
        for _ in range(3):
            whole_step(life)
        return values(life.kept["model"])

    def fail(life: Life) -> None:
        while where == "backward":  # the loss may be noticed a moment later
            half(life, 1)
            life.kept["optimizer"].synchronize()
        half(life, 1)
        while where == "between":
            frontend_of(life).allreduce(torch.ones(1))
        life.kept["optimizer"].step()

    def failing(life: Life) -> None:
        sync(life)
        whole_step(life)
        whole_step(life)
        committed = [p.detach().clone() for p in life.kept["model"].parameters()]
        state = life.kept["optimizer"].state_dict()
        kept = {
            **state,
            "state": {k: {n: v.clone() for n, v in each.items()} for k, each in state["state"].items()},
        }
        half(life, 0)
        if where == "accumulating":
            return  # an update of hosts, in the middle
        trained.wait(30)
        if life.name == "c":
            life.die()
            return
        with pytest.raises(HorovodInternalError):
            fail(life)
        with torch.no_grad():
            for parameter, value in zip(life.kept["model"].parameters(), committed, strict=True):
                parameter.copy_(value)
        life.kept["optimizer"].load_state_dict(kept)
        assert not life.kept["optimizer"]._handles

    plain = single_process(2)
    with Lives(making(backward_passes_per_step=passes), gradient_bucket=buckets) as lives:
        lives.epoch("abc", failing)
        alike(values(lives["a"].kept["model"]), plain)
        for number, members in enumerate(("ab", "abd", "d"), 1):
            for result in lives.epoch(members, training):
                alike(result, single_process(2 + 3 * number))


class FaultyBackend:
    """A data plane of which one allreduce fails, half done, if one is left to fail."""

    def __init__(self, inner: Backend, good: int) -> None:
        self._inner = inner
        self._good = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        self._good -= 1
        if self._good < 0:
            buffer.array()[:] = 1e9
            raise BackendError("the cable is out")
        return self._inner.allreduce(buffer, op)


@pytest.mark.parametrize("good", [0, 3, 9])
def test_a_data_plane_that_fails_in_a_step_spoils_nothing(good: int) -> None:
    """On one rank; the others hear of it, whatever they have received."""

    def failing(life: Life) -> int:
        for done in range(100):
            try:
                step(life)
            except HorovodInternalError:
                return done
        raise AssertionError("it has not failed")

    faulty = {"wrap": lambda rank, inner: FaultyBackend(inner, good) if rank == 1 else inner}
    with Lives(make) as lives:
        done = lives.epoch("abc", failing, **faulty, inline_threshold=0)
        assert len(set(done)) == 1
        for result in lives.epoch("ab", steps(2)):
            alike(result, single_process(done[0] + 2))


def test_an_unfinished_accumulation_is_dropped_with_its_gradients() -> None:
    def one_pass(life: Life) -> None:
        sync(life)
        loss_of(life.kept["model"], part_of(life.context)).backward()
        assert all(p.grad is not None for p in life.kept["model"].parameters())

    with Lives(making(backward_passes_per_step=2)) as lives:
        lives.epoch("ab", one_pass)
        lives.close()
        for name in "ab":
            assert all(p.grad is None for p in lives[name].kept["model"].parameters())


def test_a_job_of_fixed_size_keeps_its_gradients_at_shutdown() -> None:
    with Lives(make, elastic=False) as lives:
        lives.epoch("ab", lambda life: loss_of(life.kept["model"]).backward())
        lives.close()
        assert all(p.grad is not None for p in lives["a"].kept["model"].parameters())


def test_two_passes_too_many_are_an_error_in_the_first_step_of_an_epoch_too() -> None:
    """Although nothing is sent before the step itself."""

    def body(life: Life) -> None:
        sync(life)
        loss_of(life.kept["model"]).backward()
        assert len(life.kept["optimizer"]._handles) == 4
        with pytest.raises(AssertionError, match="more backward passes"):
            loss_of(life.kept["model"]).backward()
        with pytest.raises(AssertionError, match="being reduced"):
            life.kept["optimizer"].zero_grad()
        life.kept["optimizer"].step()
        assert not life.kept["optimizer"]._handles

    with Lives(make) as lives:
        lives.epoch("ab", body)


# Process sets --------------------------------------------------------------------------------------------------------


def test_a_process_set_with_another_number_and_one_that_is_gone() -> None:
    def paired(life: Life) -> None:
        life.kept["model"] = make_model()

    def body(life: Life) -> list[np.ndarray]:
        frontend, pair = frontend_of(life), life.kept.setdefault("pair", ProcessSet([0, 1]))
        if life.context.size == 4:
            frontend.add_process_set([2, 3])  # the other has another number than before
        frontend.add_process_set(pair)
        if "optimizer" not in life.kept:
            life.kept["optimizer"] = distribute(life, life.kept["model"], process_set=pair)
        broadcast_parameters(frontend, life.kept["model"].state_dict(), 0)
        broadcast_optimizer_state(frontend, life.kept["optimizer"], 0)
        halves = [slice(None, BATCH // 2), slice(BATCH // 2, None), slice(None), slice(None)]
        for _ in range(2):
            loss_of(life.kept["model"], halves[life.context.rank]).backward()
            life.kept["optimizer"].step()
            life.kept["optimizer"].zero_grad()
        return values(life.kept["model"])

    def gone(life: Life) -> None:
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match="not registered"):
                loss_of(life.kept["model"]).backward()
            with pytest.raises(InvalidArgumentError, match="not registered"):
                life.kept["optimizer"].step()

    with Lives(paired) as lives:
        for number, members in enumerate(("abc", "abcd", "bcd"), 1):
            for result in lives.epoch(members, body):
                alike(result, single_process(2 * number))
        lives.epoch("b", gone)


# What is left --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the collector, so that objects are freed only when the last reference to them goes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("plane", ["inline", "shm"])
def test_buckets_of_an_epoch_are_freed_when_it_ends(plane: str, no_collector: None) -> None:
    buckets: list[weakref.ref[Any]] = []

    def body(life: Life) -> None:
        steps(3)(life)
        loss_of(life.kept["model"], part_of(life.context)).backward()
        buckets.extend(weakref.ref(bucket.whole) for bucket in life.kept["optimizer"]._hvd._bucketing.buckets.all)

    with Lives(make, plane) as lives:
        lives.epoch("ab", body)
        assert len(buckets) == 2
        lives.close()
        assert not any(bucket() is not None for bucket in buckets)


@pytest.mark.extended
def test_nothing_grows_over_epochs(no_collector: None) -> None:
    """Memory, threads and descriptors of 60 epochs, of which each has another size than the last."""

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def big(life: Life) -> None:
        model = life.kept["model"] = nn.Linear(1024, 1024)
        life.kept["optimizer"] = distribute(life, model)

    def body(life: Life) -> None:
        for _ in range(2):
            life.kept["model"](torch.ones(1, 1024)).sum().backward()
            life.kept["optimizer"].step()
            life.kept["optimizer"].zero_grad()

    seen: list[tuple[int, int, int]] = []
    with Lives(big, "shm") as lives:
        for number in range(60):
            lives.epoch(("ab", "abc")[number % 2], body)
            lives.close()
            if number % 10 == 9:
                seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), resident()))
    threads, descriptors, memory = zip(*seen[1:], strict=True)
    # One that stayed of each epoch would be 40. Tests before this one may still be closing theirs.
    assert max(threads) - min(threads) < 10
    assert max(descriptors) - min(descriptors) < 10
    # Buckets of two or three ranks, 4 MB each, in 40 epochs would be 400 MB. What malloc keeps of threads is less.
    assert max(memory) - min(memory) < 130 << 20
