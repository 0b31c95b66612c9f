"""Training in which ranks step on their own and share nothing but the changes of several steps, added up: local SGD
(Stich 2019, arXiv 1805.09767), post-local SGD (Lin et al. 2020, 1808.07217) and DiLoCo (Douillard et al. 2023,
2311.08105).

All ranks keep the same *anchor*: the parameters after the last outer step. An outer step averages what each rank has
changed since, and applies that average to the anchor as an optimizer applies a gradient, here SGD with Nesterov's
momentum; then every rank continues from the new anchor.

Every rank computes the anchor by itself, and all must get the same bits, also on processors of different kinds. So the
arithmetic consists of single additions and multiplications of elements, each of which IEEE 754 defines to the last bit;
operations that fuse two of them (``add`` with ``alpha``) are rounded as the processor can.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._collectives.spec import CollectiveSpec, broadcasting
from hvdgloo._platform import interrupts
from hvdgloo._training import weights
from hvdgloo._training.exchanges import ResumableExchanges
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError, MismatchError, NotInitializedError
from hvdgloo.types import Collective, ReduceOp, WireFormat

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OuterOptions:
    """Arguments that determine when ranks meet, and what they do then.

    Attributes:
        sync_every: the number of inner steps from one outer step to the next.
        lr, momentum: of the outer optimizer; 1 and 0 make it a plain average.
        clip: the greatest norm of an averaged change; None for no limit.
        start: the number of inner steps at the beginning after each of which ranks average their parameters.
        compression: how changes travel.
        process_set: the ranks that meet.

    Raises:
        InvalidArgumentError: (a ValueError) one of them cannot be used.
    """

    sync_every: int
    lr: float = 1.0
    momentum: float = 0.0
    clip: float | None = None
    start: int = 0
    compression: Compressor[Any] = NoneCompressor
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        _check_count("sync_every", self.sync_every, 1)
        _check_count("start", self.start, 0)
        if not self.lr > 0:
            raise InvalidArgumentError(f"outer_lr must be greater than 0, not {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise InvalidArgumentError(f"outer_momentum must be at least 0 and less than 1, not {self.momentum!r}")
        if self.clip is not None and not self.clip > 0:
            raise InvalidArgumentError(f"outer_clip must be greater than 0, or None for no limit; not {self.clip!r}")
        if hasattr(self.compression, "begin"):
            raise InvalidArgumentError(
                "PowerSGD keeps errors from one step to the next, which outer steps have no use for; choose "
                "Compression.int8 or Compression.bf16, or a larger sync_every"
            )


def _check_count(name: str, count: object, least: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise InvalidArgumentError(f"{name} must be a whole number from {least}, not {count!r}")


class OuterVariables(Protocol[T]):
    """The framework's part of an ``Outer``: a program's variables, by names that are the same on all ranks.

    Values have at least 32 bits, whatever the variables have, and are never written: the names of trained and averaged
    variables' values share one namespace.
    """

    def trained(self) -> Sequence[str]:
        """Return the names of the variables that the inner optimizer changes."""

    def averaged(self) -> Sequence[str]:
        """Return the names of other variables that are averaged, such as batch normalisation's statistics."""

    def copied(self) -> Sequence[tuple[str, T]]:
        """Return the variables that all ranks take from the first one, such as counters; they are written."""

    def describe(self, name: str) -> str:
        """Return a variable's shape and type in words."""

    def value(self, name: str) -> T:
        """Return a copy of a variable's value."""

    def change(self, name: str, before: T) -> T:
        """Return ``before`` minus a variable's value: exactly 0 where they are equal, also where both are infinite."""

    def assign(self, name: str, value: T) -> None:
        """Set a variable."""

    def adopt(self, name: str, value: Any) -> T:
        """Return a value of a checkpoint as ``value`` would return it.

        Raises:
            InvalidArgumentError: it is not of the variable's shape.
        """

    def is_finite(self, values: Sequence[T]) -> bool:
        """Tell whether none of these has an inf or a NaN."""

    def norm(self, values: Sequence[T]) -> float:
        """Return the square root of the sum of all elements' squares."""

    def checksum(self) -> int | None:
        """Return a checksum of samples of the trained variables; None if there are none."""


class _Exact(NoneCompressor):
    """Sends tensors as they are, whatever the job's settings are for gradients."""

    wire = WireFormat.FULL


@dataclass
class _Exchange(Generic[T]):
    """An outer step under way.

    Attributes:
        copies: broadcasts of the copied variables.
        means: the averaged changes, once they have arrived.
        norm: of the trained variables' changes, if it is limited.
    """

    copies: list[Pending[T]]
    means: dict[str, T] | None = None
    norm: float = 0.0


class Outer(Generic[T]):
    """The outer optimizer of one model.

    Call ``begin()`` before every inner step, ``count()`` for it, and ``sync()`` after it if ``due``. A call that Ctrl-C
    has interrupted may be repeated; ``begin()`` also completes an outer step that was broken off.

    Args:
        frontend: where collectives are submitted.
        variables: the program's.
        options: the same on all ranks.
        inner: how ranks step between two outer steps, in words that must be the same on all ranks.
        remedy: the call that gives all ranks the same weights, for a warning.

    Attributes:
        iterations: the number of inner steps so far.
        synchronized: the number of inner steps at the last outer one.
        steps: the number of outer steps so far.
        refused: the number of outer steps whose average was not finite.
    """

    def __init__(
        self, frontend: Frontend[T], variables: OuterVariables[T], options: OuterOptions, *, inner: str, remedy: str
    ) -> None:
        self.options = options
        self.iterations = self.synchronized = self.steps = self.refused = 0
        self._frontend = frontend
        self._variables = variables
        self._inner = inner
        self._remedy = remedy
        self._anchor: dict[str, T] = {}  # of averaged variables too: their last averages
        self._momentum: dict[str, T] = {}
        self._context: object = None  # in which ranks have agreed
        self._takes_part = False  # in the process set
        self._shared = False  # with other ranks
        self._labels: dict[str, str] = {}
        self._exchanges = ResumableExchanges()
        self._under_way: _Exchange[T] | None = None
        self._changes = self._reducer(options.compression)
        self._averages = self._reducer(_Exact)

    def _reducer(self, compression: Compressor[T]) -> GradientReducer[T]:
        return GradientReducer(self._frontend, compression=compression, process_set=self.options.process_set)

    # Inner steps

    def begin(self) -> None:
        """Prepare for an inner step: agree with the other ranks, if this is the first one in this job.

        Raises:
            MismatchError: ranks have different settings or variables; on all ranks alike, and nothing has changed.
        """
        try:
            context = self._frontend.context
        except NotInitializedError:
            self._takes_part = self._shared = False
            return
        if context is not self._context:
            self.drop()
            self._labels = {}
            members = context.engine.process_sets.get(process_set_id(self.options.process_set), ())
            self._takes_part = context.rank in members or context.plan is not None
            self._shared = self._frontend.is_shared(self.options.process_set)
            if self._shared:
                self._agree()
            self._context = context
        elif self._under_way is not None:
            self.sync()
        self._anchor_new()

    def _anchor_new(self) -> None:
        """Take the anchors of variables that have none: all ranks have the same value of a trained one now."""
        variables = self._variables
        if not self._anchor:
            # Unlike trained variables, these may have changed since they were broadcast: a forward pass has just run.
            self._exchanges.make("averaged", self._from_first, self._anchor.update)
        for name in variables.trained():
            if name not in self._anchor:
                self._anchor[name] = variables.value(name)

    def _from_first(self) -> Callable[[], dict[str, T]]:
        """Start to send the first rank's averaged variables to all."""
        frontend, options, names = self._frontend, self.options, self._variables.averaged()
        values = {name: self._variables.value(name) for name in names}
        if not self._shared:
            return lambda: values
        first = broadcasting(frontend.sharers(options.process_set)[0], options.process_set)
        pending = [frontend.start(first, [value], in_place=True) for value in values.values()]
        return lambda: dict(zip(names, [each.result()[0] for each in pending], strict=True))

    def count(self) -> None:
        """Count an inner step."""
        self.iterations += 1

    @property
    def due(self) -> bool:
        """True if an outer step follows the inner one that was counted last."""
        done, options = self.iterations, self.options
        if self.is_synchronized:
            return False
        return done <= options.start or (done - options.start) % options.sync_every == 0

    @property
    def between(self) -> int:
        """The number of inner steps since the last outer one, after which ranks have different parameters."""
        return self.iterations - self.synchronized if self._shared else 0

    @property
    def is_synchronized(self) -> bool:
        """True if there was no inner step since the last outer one."""
        return self.iterations == self.synchronized

    def _settings(self) -> dict[str, Any]:
        """Return what ranks have to agree about, by names for users."""
        options, variables = self.options, self._variables
        compression = options.compression
        kind = compression if isinstance(compression, type) else type(compression)
        return {
            "sync_every": options.sync_every,
            "outer_lr": float(options.lr),
            "outer_momentum": float(options.momentum),
            "outer_clip": options.clip,
            "start": options.start,
            "compression": kind.__name__,
            "inner": self._inner,
            "the number of inner steps so far": self.iterations,
            "the number of inner steps at the last outer step": self.synchronized,
            "the trained variables": {name: variables.describe(name) for name in variables.trained()},
            "the averaged variables": {name: variables.describe(name) for name in variables.averaged()},
            "the copied variables": {name: variables.describe(name) for name, _ in variables.copied()},
        }

    def _agree(self) -> None:
        """Compare settings and weights with the other ranks."""
        frontend, options = self._frontend, self.options
        settings = self._settings()
        most = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MAX, process_set=process_set_id(options.process_set))
        own = None
        if frontend.context.config.check_weights and self.is_synchronized:
            own = self._variables.checksum()  # in the midst of a round they differ
        received: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

        def start() -> Callable[[], npt.NDArray[np.uint8]]:
            mine = weights.checksum(np.frombuffer(repr(settings).encode(), np.uint8))
            return frontend.start_array(most, np.concatenate([weights.to_send(mine), weights.to_send(own)]))

        def use(result: npt.NDArray[np.uint8]) -> None:
            nonlocal received
            received = result

        self._exchanges.make("settings", start, use)
        if not weights.all_equal(received[: weights.LENGTH]):
            everyones = frontend.allgather_object(settings, process_set=options.process_set)
            raise MismatchError(_disagreement(frontend.sharers(options.process_set), everyones))
        if not weights.all_equal(received[weights.LENGTH :]):
            gather = functools.partial(weights.start_gathering, frontend, own, options.process_set)
            warn = functools.partial(weights.warn, frontend, options.process_set, remedy=self._remedy)
            self._exchanges.make("weights", gather, warn)

    # Outer steps

    def sync(self) -> None:
        """Make an outer step, with all ranks; on a rank outside of the process set, do no more than count it.

        An average with an inf or a NaN is refused, on all ranks alike: they return to the anchor.

        Raises:
            HorovodInternalError: the exchange failed; no variable was changed, other than copied ones.
        """
        if not self._takes_part:
            self._count_step()
            return
        held = interrupts.hold()
        try:
            exchange = self._under_way = self._under_way or self._send()
        finally:
            interrupts.release(held)
        try:
            means = self._receive(exchange)
        except HorovodInternalError:
            self.drop()
            raise
        held = interrupts.hold()
        try:
            self._under_way = None
            self._apply(means, exchange.norm)
        finally:
            interrupts.release(held)

    def finish(self) -> None:
        """Make an outer step if there was an inner one since the last; collective."""
        if self._under_way is not None or not self.is_synchronized:
            self.sync()

    def drop(self) -> None:
        """Forget what is under way, once it is at rest."""
        self._changes.reset()
        self._averages.reset()
        self._under_way = None
        self._exchanges.clear()

    def _send(self) -> _Exchange[T]:
        """Start to average the changes since the last outer step."""
        frontend, options, variables = self._frontend, self.options, self._variables
        if not self._shared:
            return _Exchange([], {name: variables.change(name, before) for name, before in self._anchor.items()})
        copied, known = variables.copied(), self._labels
        unnamed = [name for name in (*self._anchor, *(name for name, _ in copied)) if name not in known]
        if unnamed:
            known.update(zip(unnamed, frontend.reserve_names([f"outer.{name}" for name in unnamed]), strict=True))
            for reducer in (self._changes, self._averages):
                reducer.hold()
                reducer.release(known)
        averaged = set(variables.averaged())
        for name, before in self._anchor.items():
            reducer = self._averages if name in averaged else self._changes
            reducer.ready(name, variables.change(name, before), final=True)
        first = broadcasting(frontend.sharers(options.process_set)[0], options.process_set)
        return _Exchange([frontend.start(first, [tensor], known[name], in_place=True) for name, tensor in copied])

    def _receive(self, exchange: _Exchange[T]) -> dict[str, T]:
        """Wait for the averaged changes."""
        if exchange.means is None:
            failure = self._changes.rest() or self._averages.rest()
            for pending in exchange.copies:
                pending.result()
            held = interrupts.hold()
            try:
                exchange.means = {**self._changes.wait(), **self._averages.wait()}
            finally:
                interrupts.release(held)
            if failure is not None:
                raise failure
        if self.options.clip is not None and not exchange.norm:
            self._measure(exchange, exchange.means)
        return exchange.means

    def _measure(self, exchange: _Exchange[T], means: Mapping[str, T]) -> None:
        """Agree on the norm of the trained variables' changes: processors of different kinds add up in different
        orders, and their results differ in the last bits."""
        averaged = set(self._variables.averaged())
        own = self._variables.norm([change for name, change in means.items() if name not in averaged])
        if not self._shared:
            exchange.norm = own
            return
        number = process_set_id(self.options.process_set)
        most = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MAX, process_set=number)

        def use(greatest: npt.NDArray[np.float64]) -> None:
            exchange.norm = float(greatest[0])

        self._exchanges.make("norm", lambda: self._frontend.start_array(most, np.array([own], np.float64)), use)

    def _apply(self, means: Mapping[str, T], norm: float) -> None:
        """Step on the averaged changes."""
        options, variables = self.options, self._variables
        self._count_step()
        if not variables.is_finite(list(means.values())):
            self._refuse()
            return
        averaged = set(variables.averaged())
        plain = self.iterations <= options.start
        lr, factor = (1.0, 0.0) if plain else (options.lr, options.momentum)
        scale = 1.0 if options.clip is None or norm <= options.clip else options.clip / norm
        alone = not self._shared and (lr, factor, scale) == (1.0, 0.0, 1.0)
        for name, mean in means.items():
            if alone or (name in averaged and not self._shared):  # what one rank has is the average, to the last bit
                self._anchor[name] = variables.value(name)
                continue
            step: Any = mean
            if name not in averaged:
                step = step * scale if scale != 1.0 else step
                if factor:
                    before: Any = self._momentum.get(name)
                    moment = self._momentum[name] = step if before is None else before * factor + step
                    step = moment * factor + step
                step = step * lr if lr != 1.0 else step
            self._anchor[name] = self._anchor[name] - step
            variables.assign(name, self._anchor[name])

    def _count_step(self) -> None:
        self.synchronized = self.iterations
        self.steps += 1

    def _refuse(self) -> None:
        self.refused += 1
        for name, value in self._anchor.items():
            self._variables.assign(name, value)
        if not self._shared or self._frontend.sharers(self.options.process_set)[0] == self._frontend.context.rank:
            logger.warning(
                "after %d inner steps the average of the ranks' parameters has an inf or a NaN, so all ranks return to "
                "the parameters of the last outer step, and go on from there. If this happens again, lower the inner "
                "learning rate, or clip the gradients of each inner step",
                self.iterations,
            )

    # State

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs. Its values are never written, so they need not be copied."""
        return {
            "iterations": self.iterations,
            "synchronized": self.synchronized,
            "steps": self.steps,
            "refused": self.refused,
            "anchor": dict(self._anchor),
            "momentum": dict(self._momentum),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Return to a state.

        Raises:
            InvalidArgumentError: (a ValueError) it is not the state of such variables; nothing has changed.
        """
        variables = self._variables
        expected = {"iterations", "synchronized", "steps", "refused", "anchor", "momentum"}
        if not isinstance(state, Mapping) or expected - set(state):
            raise InvalidArgumentError("this is not an outer state; load what outer_state_dict() has returned")
        known = {*variables.trained(), *variables.averaged()}
        foreign = sorted((set(state["anchor"]) | set(state["momentum"])) - known)
        missing = sorted(known - set(state["anchor"])) if state["anchor"] else []
        if foreign or missing:
            found = [f"has {name}, which this model lacks" for name in foreign]
            found += [f"lacks {name}" for name in missing]
            raise InvalidArgumentError(
                f"the outer state {found[0]}; load the outer_state_dict() of the same model, with the same parameters "
                "frozen"
            )
        anchor = {name: variables.adopt(name, value) for name, value in state["anchor"].items()}
        momentum = {name: variables.adopt(name, value) for name, value in state["momentum"].items()}
        self.drop()
        self._anchor, self._momentum = anchor, momentum
        self._set_counters([int(state[name]) for name in _COUNTERS])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to what ``state()`` has returned in this process."""
        self.drop()
        self._anchor, self._momentum = dict(state["anchor"]), dict(state["momentum"])
        self._set_counters([state[name] for name in _COUNTERS])

    def is_unchanged(self, state: Mapping[str, Any]) -> bool:
        """Tell whether ``state()`` would return the same now."""
        return all(state[name] == getattr(self, name) for name in _COUNTERS) and all(
            state[name].keys() == values.keys() and all(state[name][each] is values[each] for each in values)
            for name, values in (("anchor", self._anchor), ("momentum", self._momentum))
        )

    def counters(self) -> list[int]:
        """Return the state's numbers."""
        return [getattr(self, name) for name in _COUNTERS]

    def _set_counters(self, numbers: Sequence[int]) -> None:
        for name, number in zip(_COUNTERS, numbers, strict=True):
            setattr(self, name, number)

    def receive(self, root: int) -> None:
        """Take the state of one rank, with all ranks of the job."""
        frontend, variables = self._frontend, self._variables
        own = self.counters(), list(self._anchor), list(self._momentum)
        counters, anchored, moved = frontend.broadcast_object(own, root)
        named = [(f"outer.anchor.{name}", self._anchor.get(name), name) for name in anchored]
        named += [(f"outer.momentum.{name}", self._momentum.get(name), name) for name in moved]
        given = [(label, variables.value(name) if value is None else value) for label, value, name in named]
        values = frontend.broadcast_all(given, root)
        self.drop()
        self._anchor = dict(zip(anchored, values, strict=False))
        self._momentum = dict(zip(moved, values[len(anchored) :], strict=True))
        self._set_counters(counters)


_COUNTERS = ("iterations", "synchronized", "steps", "refused")


def _disagreement(ranks: Sequence[int], everyones: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence about the first difference between the ranks' settings."""
    expected = everyones[0]
    rank, name, found = next(
        (rank, name, settings[name])
        for rank, settings in zip(ranks, everyones, strict=True)
        for name in expected
        if settings[name] != expected[name]
    )
    here, there, advice = expected[name], found, "Pass the same arguments on all ranks"
    if isinstance(here, dict):
        each = next(each for each in {**here, **there} if here.get(each) != there.get(each))
        name, here, there = f"{name}: {each}", here.get(each, "absent"), there.get(each, "absent")
        advice = "Make the same model on all ranks, with the same parameters frozen"
    elif name.startswith("the "):
        advice = "Load an outer_state_dict() on all ranks; in an elastic job, give hvd.elastic.TorchState the optimizer"
    return f"ranks differ in {name}: {here} on rank {ranks[0]}, {there} on rank {rank}. {advice}"
