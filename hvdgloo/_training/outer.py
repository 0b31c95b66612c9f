"""Training in which ranks step on their own and share nothing but the changes of several steps, added up: local SGD
(Stich 2019, arXiv 1805.09767), post-local SGD (Lin et al. 2020, 1808.07217), DiLoCo (Douillard et al. 2023,
2311.08105) and Streaming DiLoCo (Douillard et al. 2025, 2501.18512).

All ranks keep the same *anchor*: the parameters after the last outer step. An outer step averages what each rank has
changed since, and applies that average to the anchor as an optimizer applies a gradient, here SGD with Nesterov's
momentum; then every rank continues from the new anchor.

With *fragments*, the variables are divided into parts that have their outer steps one after another, so that bytes are
spread over the round. With *overlap*, ranks make so many inner steps while an average is on its way, and continue from
the new anchor plus what they have changed in these steps. Then ranks have the same anchors, but never the same
parameters, before ``finish()``.

Every rank computes the anchor by itself, and all must get the same bits, also on processors of different kinds. So the
arithmetic consists of single additions and multiplications of elements, each of which IEEE 754 defines to the last bit;
operations that fuse two of them (``add`` with ``alpha``) are rounded as the processor can.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        fragments: the number of parts of the variables that have outer steps of their own.
        overlap: the number of inner steps from an outer step's beginning to its end.
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
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        _check_count("sync_every", self.sync_every, 1)
        _check_count("start", self.start, 0)
        _check_count("fragments", self.fragments, 1)
        _check_count("overlap", self.overlap, 0)
        if self.fragments > self.sync_every:
            raise InvalidArgumentError(
                f"fragments={self.fragments} have outer steps one after another, so sync_every must be at least as "
                f"large, not {self.sync_every}"
            )
        if self.overlap >= (apart := self.sync_every // self.fragments):
            raise InvalidArgumentError(
                f"overlap={self.overlap} must be less than sync_every / fragments, here {apart}: an outer step ends "
                "before the next one begins; choose a smaller overlap or a larger sync_every"
            )
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

    def settings(self) -> dict[str, Any]:
        """Return what ranks have to agree about, by the arguments' names."""
        kind = self.compression if isinstance(self.compression, type) else type(self.compression)
        return {
            "sync_every": self.sync_every,
            "outer_lr": float(self.lr),
            "outer_momentum": float(self.momentum),
            "outer_clip": self.clip,
            "start": self.start,
            "fragments": self.fragments,
            "overlap": self.overlap,
            "compression": kind.__name__,
        }

    def fragments_after(self, done: int) -> range | None:
        """Return the fragments whose outer step begins after so many inner steps."""
        if done <= self.start:
            return range(self.fragments)
        number = self._schedule.get((done - self.start) % self.sync_every)
        return None if number is None else range(number, number + 1)

    @functools.cached_property
    def _schedule(self) -> Mapping[int, int]:
        """The fragments by the number of inner steps in a round after which their outer steps begin."""
        every, count = self.sync_every, self.fragments
        return {(number + 1) * every // count % every: number for number in range(count)}


def _check_count(name: str, count: object, least: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise InvalidArgumentError(f"{name} must be a whole number from {least}, not {count!r}")


class OuterVariables(Protocol[T]):
    """The framework's part of an ``Outer``: a program's variables, by names that are the same on all ranks.

    Values have at least 32 bits, whatever the variables have, and are never written: the names of trained and averaged
    variables' values share one namespace.
    """

    def trained(self) -> Sequence[str]:
        """Return the names of the variables that the inner optimizer changes: the same object while these are the
        same."""

    def averaged(self) -> Sequence[str]:
        """Return the names of other variables that are averaged, such as batch normalisation's statistics."""

    def copied(self) -> Sequence[tuple[str, T]]:
        """Return the variables that all ranks take from the first one, such as counters; they are written."""

    def describe(self, name: str) -> str:
        """Return a variable's shape and type in words."""

    def value(self, name: str) -> T:
        """Return a copy of a variable's value."""

    def nbytes(self, name: str) -> int:
        """Return the size of a variable's value."""

    def change(self, name: str, before: T, after: T | None = None) -> T:
        """Return ``before`` minus ``after``, by default a variable's value: exactly 0 where they are equal, also where
        both are infinite."""

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
        began, ends: the numbers of inner steps at its beginning and at its end.
        fragments: the numbers of the fragments that take part.
        then: the variables' values at its beginning, if inner steps are made meanwhile.
        copies: broadcasts of the copied variables.
        means: the averaged changes, once they have arrived.
        norm: of the trained variables' changes, if it is limited.
        nbytes: the size of the changes that this rank has sent.
    """

    began: int
    ends: int
    fragments: range
    then: dict[str, T]
    copies: Sequence[Pending[T]] = ()
    means: dict[str, T] | None = None
    norm: float = 0.0
    nbytes: int = 0

    @property
    def overlaps(self) -> bool:
        """True if inner steps are made meanwhile; also of a fragment that has no variables."""
        return self.ends > self.began


class Outer(Generic[T]):
    """The outer optimizer of one model.

    Call ``begin()`` before every inner step, ``count()`` for it, and ``sync()`` after it if ``due``. A call that Ctrl-C
    has interrupted may be repeated; ``begin()`` also completes what was broken off.

    Args:
        frontend: where collectives are submitted.
        variables: the program's.
        options: the same on all ranks.
        inner: how ranks step between two outer steps, in words that must be the same on all ranks.
        remedy: the call that gives all ranks the same weights, for a warning.

    Attributes:
        iterations: the number of inner steps so far.
        synchronized: the number of inner steps after which all ranks had the same parameters last.
        round_ended: the number of inner steps at the end of the last outer step of the last fragment.
        steps: the number of outer steps so far; each fragment's is one.
        refused: the number of outer steps whose average was not finite.
    """

    def __init__(
        self, frontend: Frontend[T], variables: OuterVariables[T], options: OuterOptions, *, inner: str, remedy: str
    ) -> None:
        self.options = options
        self.iterations = self.synchronized = self.round_ended = self.steps = self.refused = 0
        self._frontend = frontend
        self._variables = variables
        self._inner = inner
        self._remedy = remedy
        self._anchor: dict[str, T] = {}  # of averaged variables too: their last averages
        self._momentum: dict[str, T] = {}
        self._anchored: tuple[object, object] = None, None  # the names and the anchor when none was missing
        self._context: object = None  # in which ranks have agreed
        self._takes_part = False  # in the process set
        self._shared = False  # with other ranks
        self._labels: dict[str, str] = {}
        self._exchanges = ResumableExchanges()
        self._under_way: _Exchange[T] | None = None
        self._resumed: Mapping[str, Any] | None = None  # what was under way when the state was saved
        self._sent = 0  # bytes, in outer steps that have ended
        self._began = 0  # the number of inner steps at the last outer step's beginning
        self._fragments: list[list[str]] = []  # names of variables
        self._divided: list[str] = []  # the names when that was done
        self._sizes: dict[str, int] = {}  # in bytes
        self._changes = self._reducer(options.compression)
        self._averages = self._reducer(_Exact)

    def _reducer(self, compression: Compressor[T]) -> GradientReducer[T]:
        return GradientReducer(self._frontend, compression=compression, process_set=self.options.process_set)

    @property
    def changes(self) -> GradientReducer[T]:
        """The reducer of the trained variables' changes."""
        return self._changes

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
            self._labels, self._divided = {}, []
            members = context.engine.process_sets.get(process_set_id(self.options.process_set), ())
            self._takes_part = context.rank in members or context.plan is not None
            self._shared = self._frontend.is_shared(self.options.process_set)
            if self._shared:
                self._agree()
            self._context = context
        elif self.due:
            self.sync()
        self._anchor_new()
        if self._resumed is not None:
            self._resume(self._resumed)

    def _anchor_new(self) -> None:
        """Take the anchors of variables that have none: all ranks have the same value of a trained one now."""
        variables, names = self._variables, self._variables.trained()
        if self._anchored[0] is names and self._anchored[1] is self._anchor:
            return
        if not self._anchor:
            # Unlike trained variables, these may have changed since they were broadcast: a forward pass has just run.
            self._exchanges.make("averaged", self._from_first, self._anchor.update)
        for name in names:
            if name not in self._anchor:
                self._anchor[name] = variables.value(name)
        self._anchored = names, self._anchor

    def _from_first(self) -> Callable[[], dict[str, T]]:
        """Start to send the first rank's averaged variables to all."""
        frontend, options, names = self._frontend, self.options, self._variables.averaged()
        values = {name: self._variables.value(name) for name in names}
        if not self._shared:
            return lambda: values
        pending = _start_from_first(frontend, options.process_set, ((None, value) for value in values.values()))
        return lambda: dict(zip(names, [each.result()[0] for each in pending], strict=True))

    def count(self) -> None:
        """Count an inner step."""
        self.iterations += 1

    @property
    def due(self) -> bool:
        """True if an outer step begins or ends after the inner one that was counted last."""
        exchange = self._under_way
        return (exchange is not None and exchange.ends <= self.iterations) or self._due_fragments is not None

    @property
    def _due_fragments(self) -> range | None:
        """The fragments whose outer step begins after the inner one that was counted last."""
        done = self.iterations
        return None if done == self._began or self.is_synchronized else self.options.fragments_after(done)

    @property
    def between(self) -> int:
        """The number of inner steps since ranks had the same parameters."""
        return self.iterations - self.synchronized if self._shared else 0

    @property
    def is_synchronized(self) -> bool:
        """True if there was no inner step since all ranks had the same parameters."""
        return self.iterations == self.synchronized

    @property
    def is_at_end_of_round(self) -> bool:
        """True if every fragment has had its outer step, the last one after the inner step that was counted last."""
        return self._under_way is None and self.iterations in (self.synchronized, self.round_ended)

    @property
    def precedes_outer_step(self) -> bool:
        """True if an outer step begins after the next inner one, and none is under way."""
        return self._under_way is None and self.options.fragments_after(self.iterations + 1) is not None

    def _agree(self) -> None:
        """Compare settings and weights with the other ranks."""
        frontend, variables = self._frontend, self._variables
        settings = {
            **self.options.settings(),
            "inner": self._inner,
            "the number of inner steps so far": self.iterations,
            "the number of inner steps at the last outer step": self.synchronized,
            "the number of inner steps at the beginning of what is under way": (self._resumed or {}).get("began"),
            "the trained variables": {name: variables.describe(name) for name in variables.trained()},
            "the averaged variables": {name: variables.describe(name) for name in variables.averaged()},
            "the copied variables": {name: variables.describe(name) for name, _ in variables.copied()},
        }
        own = None
        if frontend.context.config.check_weights and self.is_synchronized:
            own = variables.checksum()  # in the midst of a round they differ
        _agree(frontend, self.options.process_set, self._exchanges, settings, own, self._remedy)

    # Outer steps

    def sync(self) -> None:
        """Begin or end the outer step that is due, or both, with all ranks; on a rank outside of the process set, do no
        more than count it.

        An average with an inf or a NaN is refused, on all ranks alike: they return to the anchor.

        Raises:
            HorovodInternalError: the exchange failed; no variable was changed, other than copied ones.
        """
        self._exchange(self._due_fragments, self.options.overlap if self.iterations > self.options.start else 0)

    def finish(self) -> None:
        """End what is under way, and make an outer step if there was an inner one since all ranks had the same
        parameters; collective."""
        if self._under_way is not None:
            self._exchange(range(0), 0)
        if not self.is_synchronized:
            self._exchange(range(self.options.fragments), 0)

    def _exchange(self, fragments: range | None, overlap: int) -> None:
        """Make outer steps: end one that is under way, and begin another one, which ends at once without overlap.

        Args:
            fragments: those that take part; None only to end what ends now.
            overlap: the number of inner steps until the end.
        """
        if not self._takes_part:
            self.steps += 1
            self.synchronized = self.round_ended = self.iterations
            return
        called, steps, sent = time.monotonic(), self.steps, self._sent
        try:
            self._end_and_begin(fragments, overlap)
        finally:
            every = self.options.sync_every // self.options.fragments
            self._frontend.count_outer_steps(
                self.steps - steps, self._sent - sent, time.monotonic() - called, every=every
            )

    def _end_and_begin(self, fragments: range | None, overlap: int) -> None:
        exchange = self._under_way
        if exchange is not None and (fragments is not None or exchange.ends <= self.iterations):
            self._end(exchange)
        if fragments:
            began, ends = self.iterations, self.iterations + overlap
            self._divide()
            held = interrupts.hold()
            try:
                names = [name for number in fragments for name in self._fragments[number]]
                then = {name: self._variables.value(name) for name in names} if overlap else {}
                exchange = self._under_way = self._send(_Exchange(began, ends, fragments, then))
                self._began = began
            finally:
                interrupts.release(held)
            if not overlap:
                self._end(exchange)

    def _end(self, exchange: _Exchange[T]) -> None:
        """Wait for an outer step's averages and apply them."""
        try:
            means = self._receive(exchange)
        except HorovodInternalError:
            self.drop()
            raise
        held = interrupts.hold()
        try:
            self._under_way = None
            self._sent += exchange.nbytes
            self._apply(exchange, means)
        finally:
            interrupts.release(held)

    def _resume(self, under_way: Mapping[str, Any]) -> None:
        """Begin once more what was under way when the state was saved. If variables are divided in another way now, do
        not: the changes are part of the next outer step."""
        self._divide()
        held = interrupts.hold()
        try:
            self._resumed = None
            began, then = int(under_way["began"]), dict(under_way["then"])
            for number, names in enumerate(self._fragments):
                if self._takes_part and set(names) == set(then):
                    ends = began + self.options.overlap
                    self._under_way = self._send(_Exchange(began, ends, range(number, number + 1), then))
        finally:
            interrupts.release(held)

    def drop(self) -> None:
        """Forget what is under way, once it is at rest."""
        self._changes.reset()
        self._averages.reset()
        self._under_way = None
        self._exchanges.clear()

    def _divide(self) -> None:
        """Divide the variables into fragments. Averaged ones that are not trained are in the last. What is sent
        together is part of one fragment."""
        variables, labels = self._variables, self._labels
        names = [*self._anchor, *(name for name, _ in variables.copied())]
        if names == self._divided:
            return
        averaged = set(variables.averaged())
        sizes = {name: variables.nbytes(name) for name in self._anchor}
        trained = [name for name in self._anchor if name not in averaged]
        fragments = _fragments(trained, sizes, self.options.fragments)
        others = [name for name in self._anchor if name in averaged]
        if self._shared:
            unnamed = [name for name in names if name not in labels]
            labels.update(
                zip(unnamed, self._frontend.reserve_names([f"outer.{name}" for name in unnamed]), strict=True)
            )
            for reducer, parts in ((self._changes, fragments), (self._averages, [others])):
                reducer.set_groups([group for part in parts for group in _grouped(part, sizes)])
                reducer.hold()
                reducer.release(labels)
        fragments[-1] += others
        self._fragments, self._divided, self._sizes = fragments, names, sizes

    def _send(self, exchange: _Exchange[T]) -> _Exchange[T]:
        """Start to average the changes since the last outer step."""
        frontend, options, variables = self._frontend, self.options, self._variables
        names = [name for number in exchange.fragments for name in self._fragments[number]]
        changes = ((name, variables.change(name, self._anchor[name], exchange.then.get(name))) for name in names)
        if not self._shared:
            exchange.means = dict(changes)
            return exchange
        averaged = set(variables.averaged())
        for name, change in changes:
            (self._averages if name in averaged else self._changes).ready(name, change, final=True)
        exchange.nbytes = sum(self._sizes[name] for name in names)
        # They are written at once, so they wait for an outer step that nothing overlaps with.
        if not exchange.overlaps and options.fragments - 1 in exchange.fragments:
            copied = ((self._labels[name], tensor) for name, tensor in variables.copied())
            exchange.copies = _start_from_first(frontend, options.process_set, copied)
        return exchange

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

    def _apply(self, exchange: _Exchange[T], means: Mapping[str, T]) -> None:
        """Step on the averaged changes."""
        options, variables = self.options, self._variables
        self.steps += 1
        if self.options.fragments - 1 in exchange.fragments:
            self.round_ended = self.iterations
        if not variables.is_finite(list(means.values())):
            self._refuse()
            return
        if not exchange.overlaps and len(exchange.fragments) == options.fragments:
            self.synchronized = self.iterations
        averaged = set(variables.averaged())
        plain = exchange.began <= options.start
        lr, factor = (1.0, 0.0) if plain else (options.lr, options.momentum)
        scale = 1.0 if options.clip is None or exchange.norm <= options.clip else options.clip / exchange.norm
        alone = not self._shared and (lr, factor, scale) == (1.0, 0.0, 1.0)
        for name, mean in means.items():
            then: Any = exchange.then.get(name)
            if alone or (name in averaged and not self._shared):  # what one rank has is the average, to the last bit
                self._anchor[name] = variables.value(name) if then is None else then
                continue
            step: Any = mean
            if name not in averaged:
                step, moment = _sgd_step(mean, self._momentum.get(name), scale, factor, lr)
                if factor:
                    self._momentum[name] = moment
            anchor: Any = self._anchor[name] - step
            self._anchor[name] = anchor
            if then is not None:
                anchor = anchor + variables.change(name, variables.value(name), then)
            variables.assign(name, anchor)

    def _refuse(self) -> None:
        self.refused += 1
        self.synchronized = self.iterations
        # Of all fragments: through the others, a rank's inf or NaN would come back in the next inner step.
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
            **dict(zip(_COUNTERS, self.counters(), strict=True)),
            "anchor": dict(self._anchor),
            "momentum": dict(self._momentum),
            "under_way": self._overlapped(),
        }

    def _overlapped(self) -> dict[str, Any] | None:
        """Return what is needed to begin once more what is under way while inner steps are made."""
        if self._resumed is not None:
            return dict(self._resumed)
        exchange = self._under_way
        return {"began": exchange.began, "then": dict(exchange.then)} if exchange and exchange.then else None

    def load(self, state: Mapping[str, Any]) -> None:
        """Return to a state.

        Raises:
            InvalidArgumentError: (a ValueError) it is not the state of such variables; nothing has changed.
        """
        anchor, momentum, under_way = _adopted(state, self._variables)
        self.drop()
        self._anchor, self._momentum = anchor, momentum
        self._set_counters([int(state[name]) for name in _COUNTERS])
        self._resumed = under_way

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to what ``state()`` has returned in this process."""
        self.drop()
        self._anchor, self._momentum = dict(state["anchor"]), dict(state["momentum"])
        self._set_counters([state[name] for name in _COUNTERS])
        self._resumed = state["under_way"]

    def is_unchanged(self, state: Mapping[str, Any]) -> bool:
        """Tell whether ``state()`` would return the same now."""
        if state["under_way"] is not None or self._overlapped() is not None:
            return False
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
        self._began = self.iterations

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
        self._resumed = None


def _start_from_first(
    frontend: Frontend[T], process_set: ProcessSet, tensors: Iterable[tuple[str | None, T]]
) -> list[Pending[T]]:
    """Start to write the first rank's tensors into all ranks'; by name, or by the order of the calls."""
    first = broadcasting(frontend.sharers(process_set)[0], process_set)
    return [frontend.start(first, [tensor], name, in_place=True) for name, tensor in tensors]


def _fragments(names: Sequence[str], sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide variables into fragments of consecutive ones, as equal in size as can be."""
    total, before = max(1, sum(sizes[name] for name in names)), 0
    fragments: list[list[str]] = [[] for _ in range(count)]
    for name in names:
        fragments[min(count - 1, (2 * before + sizes[name]) * count // (2 * total))].append(name)
        before += sizes[name]
    return fragments


_GROUP_BYTES = 4 << 20
"""Size from which variables are not sent together with further ones: each operation has its costs, but the first ones
are to be on their way while later changes are computed."""


def _grouped(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide variables into groups of consecutive ones, of at least ``_GROUP_BYTES`` where there are so many."""
    groups: list[list[str]] = []
    room = 0
    for name in names:
        if room <= 0:
            groups.append([])
            room = _GROUP_BYTES
        groups[-1].append(name)
        room -= sizes[name]
    if room > 0 and len(groups) > 1:
        last = groups.pop()
        groups[-1] += last
    return groups


def _sgd_step(change: Any, moment: Any, scale: float, momentum: float, lr: float) -> tuple[Any, Any]:
    """Return a variable's step by SGD with Nesterov's momentum, and its new moment."""
    change = change * scale if scale != 1.0 else change
    if momentum:
        moment = change if moment is None else moment * momentum + change
        change = moment * momentum + change
    return (change * lr if lr != 1.0 else change), moment


_COUNTERS = ("iterations", "synchronized", "round_ended", "steps", "refused")


def _adopted(state: Any, variables: OuterVariables[T]) -> tuple[dict[str, T], dict[str, T], Mapping[str, Any] | None]:
    """Return a state's anchor, momentum, and what was under way; raise InvalidArgumentError if it is not the state of
    such variables."""
    if not isinstance(state, Mapping) or {*_COUNTERS, "anchor", "momentum", "under_way"} - set(state):
        raise InvalidArgumentError("this is not an outer state; load what outer_state_dict() has returned")
    known = {*variables.trained(), *variables.averaged()}
    under_way = state["under_way"]
    saved = state["anchor"], state["momentum"], under_way["then"] if under_way else {}
    foreign = sorted({name for values in saved for name in values} - known)
    missing = sorted(known - set(state["anchor"])) if state["anchor"] else []
    found = [f"has {name}, which this model lacks" for name in foreign] + [f"lacks {name}" for name in missing]
    if found:
        raise InvalidArgumentError(
            f"the outer state {found[0]}; load the outer_state_dict() of the same model, with the same parameters "
            "frozen"
        )
    anchor, momentum, then = (
        {name: variables.adopt(name, value) for name, value in values.items()} for values in saved
    )
    return anchor, momentum, {"began": int(under_way["began"]), "then": then} if under_way else None


def _agree(
    frontend: Frontend[Any],
    process_set: ProcessSet,
    exchanges: ResumableExchanges,
    settings: Mapping[str, Any],
    own: int | None,
    remedy: str,
) -> None:
    """Compare settings, by names for users, and the checksum of weights, if there is one, with the other ranks.

    Raises:
        MismatchError: settings differ. Different weights only cause a warning.
    """
    most = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MAX, process_set=process_set_id(process_set))
    received: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def start() -> Callable[[], npt.NDArray[np.uint8]]:
        mine = weights.checksum(np.frombuffer(repr(settings).encode(), np.uint8))
        return frontend.start_array(most, np.concatenate([weights.to_send(mine), weights.to_send(own)]))

    def use(result: npt.NDArray[np.uint8]) -> None:
        nonlocal received
        received = result

    exchanges.make("settings", start, use)
    if not weights.all_equal(received[: weights.LENGTH]):
        everyones = frontend.allgather_object(settings, process_set=process_set)
        raise MismatchError(_disagreement(frontend.sharers(process_set), everyones))
    if not weights.all_equal(received[weights.LENGTH :]):
        gather = functools.partial(weights.start_gathering, frontend, own, process_set)
        warn = functools.partial(weights.warn, frontend, process_set, remedy=remedy)
        exchanges.make("weights", gather, warn)


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
