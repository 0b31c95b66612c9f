"""The workers of a ``RayExecutor`` from their start to their end.

Each has a Ray actor, which brings its agent. The launcher's supervisor runs on a thread of the driver's for as long as
there are workers; it shows their output, and says who has failed first. Calls go to the actors, and results come back,
through Ray.

**What follows from a failure.** If a call raises an exception on one rank, the others may be in a collective operation
that never ends. They are given a moment to end their calls, too: where the mistake was the same everywhere, everything
stays as it is, and the next call may be made. Where they are still at it then, all workers are ended. They are ended at
once if a worker, an actor or a node is lost, a call is cancelled, or Ctrl-C is pressed.
"""

from __future__ import annotations

import atexit
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic
from typing import Any

from hvdgloo._platform import pickling
from hvdgloo.config import Config
from hvdgloo.errors import HvdglooError, InvalidArgumentError, JobFailedError, LaunchError
from hvdgloo.ray import _worker
from hvdgloo.ray._actor import Place, WorkerActor
from hvdgloo.ray._placement import Reservation, reserve
from hvdgloo.ray._settings import Demand, Settings
from hvdgloo.ray._worker import Kind
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.reception import Reception

_GRACE = 3.0
"""Seconds that other ranks have to end a call that one rank has failed in, as in any job."""

_TURN = 0.5
"""Seconds after which a wait looks whether there still is something to wait for."""

_IDLE_END = 10.0
"""Seconds that workers without a call have to end by themselves."""

_SURE_END = 60.0
"""Seconds beyond the grace period within which the supervisor has ended everything: it kills what does not end."""


class Call:
    """A call that was sent to workers.

    Attributes:
        refs: Ray's references to the results, in order of ranks.
        done: set when all have ended the call, or can never end it.
        error: why there are no results; once ``done`` is set.
    """

    def __init__(self, refs: Sequence[Any]) -> None:
        self.refs = list(refs)
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.failures: dict[int, BaseException] = {}
        self.left = len(self.refs)
        self.overdue: threading.Timer | None = None  # runs from the first rank's failure until the call is over


class Workers:
    """Workers that have been started, and are to be closed.

    Attributes:
        actors: in order of ranks.
    """

    def __init__(self, demand: Demand, settings: Settings, extra_env_vars: Mapping[str, str]) -> None:
        self._demand = demand
        self._settings = settings
        self._env = extra_env_vars
        self._start_timeout = Config.from_env().start_timeout if settings.timeout_s is None else settings.timeout_s
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._exit = ExitStack()
        self._reception: Reception | None = None
        self._job = threading.Thread(target=self._run, name="hvdgloo-ray-job", daemon=True)
        self.actors: list[Any] = []
        self._numbers = [0] * demand.workers  # of each actor's next call

    @property
    def ended(self) -> bool:
        """Whether there are none any longer."""
        return self._ended.is_set()

    # Start and end.

    def start(self, *, use_current_placement_group: bool) -> None:
        """Start them; returns when all are ready to be called.

        Raises:
            ConfigError: the cluster is too small.
            LaunchError: they could not be started. Nothing is left running.
        """
        try:
            reservation = reserve(
                self._demand,
                timeout=self._settings.placement_group_timeout_s,
                use_current=use_current_placement_group,
            )
            self._exit.callback(_unless_over(reservation.release))
            self._start_in(reservation)
        except BaseException as error:
            self.close(f"the workers could not be started: {error}")
            raise
        atexit.register(self.close)

    def _start_in(self, reservation: Reservation) -> None:
        import ray

        self._reception = self._exit.enter_context(
            Reception(
                self._demand.workers,
                what="Ray actors",
                addresses=[ray.util.get_node_ip_address()],
                start_timeout=self._start_timeout,
            )
        )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        worker = ray.remote(WorkerActor)
        actors = [
            worker.options(
                num_cpus=self._demand.cpus,
                num_gpus=self._demand.gpus,
                max_restarts=0,
                scheduling_strategy=strategy(reservation.group, placement_group_bundle_index=bundle),
            ).remote()
            for bundle in reservation.bundles
        ]
        self._exit.callback(_unless_over(partial(_kill, actors)))
        places: list[Place] = self._gathered([actor.place.remote() for actor in actors], "Ray has not started")
        order = by_node(places)
        gpus = visible_gpus(places)
        self._job.start()
        ranks = self._gathered(
            [
                actors[which].bring.remote(self._reception.invitation, index, places[which], gpus[places[which].node])
                for index, which in enumerate(order)
            ],
            "no worker has been started by",
            patience=2,
        )
        self.actors = [actors[which] for _, which in sorted(zip(ranks, order, strict=True))]
        for rank, actor in enumerate(self.actors):
            actor.alive.remote().future().add_done_callback(partial(self._actor_ended, rank))

    def _gathered(self, refs: Sequence[Any], missing: str, *, patience: int = 1) -> list[Any]:
        """What the actors answer.

        Args:
            missing: begins the sentence about those that do not.
            patience: how many start timeouts they have.

        Raises:
            LaunchError: one has failed, or not answered in time, or the job has ended meanwhile.
        """
        futures: list[Future[Any]] = [ref.future() for ref in refs]
        deadline = monotonic() + patience * self._start_timeout
        open_: set[Future[Any]] = set(futures)
        while open_:
            done, open_ = wait_for(open_, min(_TURN, max(0.0, deadline - monotonic())), return_when="FIRST_EXCEPTION")
            for future in done:
                if (error := future.exception()) is not None:
                    raise _launch_error(error)
            if open_ and self._ended.is_set():
                raise self._failure or LaunchError("the workers ended while they started")
            if open_ and monotonic() >= deadline:
                late = [str(index) for index, future in enumerate(futures) if future in open_]
                raise LaunchError(
                    f"{missing} actor{'s' if len(late) > 1 else ''} {', '.join(late)} of {len(refs)} within "
                    f"{patience * self._start_timeout:g} s; create_settings(timeout_s=...) waits longer, and the files "
                    "worker-*.err in Ray's logs say what they do"
                )
        return [future.result() for future in futures]

    def _run(self) -> None:
        """The supervisor's thread."""
        assert self._reception is not None
        failure: BaseException | None = None
        try:
            self._reception.gather(remedy="Can the nodes reach the driver's machine?")
            run_function(
                self._reception,
                _worker.serve,
                env=self._env,
                verbose=self._settings.verbose,
                output_directory=self._settings.output_filename,
                timestamps=self._settings.prefix_output_with_timestamp,
                grace_period=self._settings.grace_period,
                nics=tuple(self._settings.nics),
                start_timeout=self._start_timeout,
            )
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            failure = error
        self._over(failure)

    def _over(self, failure: BaseException | None) -> None:
        """The job has ended: whoever waits is told why."""
        with self._lock:
            self._failure = failure
            self._ended.set()
            calls = list(self._calls)
            self._calls.clear()
        reason = str(failure) if failure is not None else "the workers have ended"
        try:
            # Before calls are over: then whoever waits for one can fetch the errors that this leaves in its references.
            _unless_over(lambda: [actor.over.remote(reason) for actor in self.actors])()
        finally:
            for call in calls:
                self._conclude(call)

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """End all workers, for this reason; returns at once."""
        if self._reception is not None:
            self._reception.fail(reason, error)

    def close(self, reason: str = "the executor was shut down") -> None:
        """End all workers, and give everything back. Further calls have no effect."""
        atexit.unregister(self.close)
        with self._exit:  # whatever happens meanwhile: Ctrl-C may be pressed again while workers have time to end
            if self._job.ident is None:
                return
            with self._lock:
                busy = bool(self._calls)
            if not busy:
                _unless_over(lambda: [actor.over.remote(reason) for actor in self.actors])()
                self._job.join(_IDLE_END if self.actors else 0.0)
            if self._job.is_alive():
                self.fail(reason)
                self._job.join((self._settings.grace_period or _GRACE) + _SURE_END)

    # Calls.

    def submit(
        self, kind: Kind, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], count: int
    ) -> Call:
        """Have the first ``count`` workers make a call.

        Raises:
            InvalidArgumentError: function or arguments cannot be pickled.
            JobFailedError: the workers have ended.
        """
        import ray

        payload, needs_ray = pack(kind, function, args, kwargs)
        with self._lock:
            self._check()
            stored = ray.put(payload)
            pairs = [
                actor.call.options(num_returns=2).remote(self._numbers[rank], stored, needs_ray)
                for rank, actor in enumerate(self.actors[:count])
            ]
            for rank in range(count):
                self._numbers[rank] += 1
            call = Call([value for value, _ in pairs])
            self._calls.add(call)
        for rank, (_, status) in enumerate(pairs):
            status.future().add_done_callback(partial(self._settled, call, rank))
        return call

    def wait(self, call: Call) -> None:
        """Wait until a call is over on all of its ranks.

        Raises:
            JobFailedError: a worker, an actor or a node was lost.
            Exception: the exception that the function raised on the first rank where it failed.
        """
        import ray

        while not call.done.wait(_TURN):
            pass
        if call.error is not None:
            for ref in call.refs:  # Ray prints errors that nobody has fetched
                with suppress(Exception):
                    ray.get(ref, timeout=0)
            raise call.error

    def _check(self) -> None:
        if self._ended.is_set():
            why = f": {self._failure}" if self._failure is not None else ""
            raise JobFailedError(f"the workers have ended{why}\nstart() starts new ones") from self._failure

    def _settled(self, call: Call, rank: int, status: Future[Any]) -> None:
        """One rank has ended a call; on a thread of Ray's."""
        import ray

        error = status.exception()
        cause = getattr(error, "cause", None)
        with self._lock:
            call.left -= 1
            if error is not None:
                call.failures[rank] = cause if isinstance(cause, BaseException) else error
            # Where Ray has lost or cancelled it, all workers are ended, and only then is the call over.
            over = call.left == 0 and call in self._calls and not any(map(_from_ray, call.failures.values()))
            if over:
                self._calls.discard(call)
            elif error is not None and not _from_ray(error) and len(call.failures) == 1 and call in self._calls:
                call.overdue = threading.Timer(self._grace, self._overdue, (call, rank))
                call.overdue.daemon = True
                call.overdue.start()
        if isinstance(error, ray.exceptions.TaskCancelledError):
            self.fail(f"the call was cancelled on rank {rank} (ray.cancel)")
        elif isinstance(error, ray.exceptions.RayActorError):
            self.fail(f"the actor of rank {rank} has ended: {words(error)}")
        elif over:
            self._conclude(call)

    @property
    def _grace(self) -> float:
        return _GRACE if self._settings.grace_period is None else self._settings.grace_period

    def _overdue(self, call: Call, rank: int) -> None:
        """Some ranks are still in a call that rank ``rank`` has failed in a while ago."""
        with self._lock:
            if call not in self._calls:
                return
            error = call.failures[rank]
        self.fail(
            f"rank {rank} failed in a call ({type(error).__name__}: {error}), and {call.left} other "
            f"rank{'s' if call.left > 1 else ''} had not ended it {self._grace:g} s later"
        )

    def _conclude(self, call: Call) -> None:
        with self._lock:
            timer, call.overdue = call.overdue, None
        if timer is not None:
            # Its thread must not be the last to refer to the call: Ray ends a process in which a reference to one of
            # its objects goes while ray.shutdown() is at work in another thread.
            timer.cancel()
            timer.join()
        own = {rank: error for rank, error in call.failures.items() if not (_is_echo(error) or _from_ray(error))}
        if own:
            call.error = own[min(own)]
        elif self._failure is not None:
            call.error = self._failure
        elif call.failures:
            call.error = call.failures[min(call.failures)]
        elif call.left:
            call.error = JobFailedError("the workers ended before the call was over")
        call.done.set()

    def _actor_ended(self, rank: int, alive: Future[Any]) -> None:
        error = alive.exception()
        if error is not None:
            self.fail(f"the actor of rank {rank} has ended: {words(error)}")


def pack(
    kind: Kind, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, bool]:
    """A call for workers, and whether it has references to Ray's objects.

    Raises:
        InvalidArgumentError: function or arguments cannot be pickled.
    """
    import ray

    content = (kind.value, function, tuple(args), dict(kwargs))
    try:
        try:
            # What Ray's own pickler makes is read by importing Ray, which takes longer than all else of the first call.
            return _pickled(pickling.Pickler, content), False
        except _Reference:
            return _pickled(pickling.naming_files(ray.cloudpickle.Pickler), content, with_references=True), True
    except Exception as error:
        raise InvalidArgumentError(
            f"the function or its arguments cannot be sent to the workers ({type(error).__name__}: {error}); "
            "open files, locks and connections must be created inside the function"
        ) from error


class _Reference(Exception):  # noqa: N818 - nobody sees it
    """What is to be pickled has references to Ray's objects."""


def _pickled(pickler: type[Any], content: Any, *, with_references: bool = False) -> bytes:
    """Raises:
    _Reference: there are references to Ray's objects, and there should not be.
    """
    import ray

    kinds = (ray.ObjectRef, ray.actor.ActorHandle)

    class Pickler(pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if not with_references and isinstance(value, kinds):
                raise _Reference
            return super().reducer_override(value)

    file = io.BytesIO()
    Pickler(file).dump(content)
    return file.getvalue()


def by_node(places: Sequence[Place]) -> list[int]:
    """The actors' order: those of one node follow each other, nodes in the order in which they first appear."""
    first: dict[str, int] = {}
    for index, place in enumerate(places):
        first.setdefault(place.node, index)
    return sorted(range(len(places)), key=lambda index: (first[places[index].node], index))


def visible_gpus(places: Sequence[Place]) -> dict[str, dict[str, str]]:
    """For each node, the variable that shows all of its workers all of their GPUs: hvd.local_rank() chooses one."""
    gpus: dict[str, list[str]] = {}
    for place in places:
        gpus.setdefault(place.node, []).extend(place.gpus)
    return {node: {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(ids))} if ids else {} for node, ids in gpus.items()}


def words(error: BaseException) -> str:
    """What Ray says of an actor's end, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "is dead because" in line or "died because" in line]
    chosen = (said or lines or [""])[0]
    return chosen.partition(" Some common causes")[0].partition(" To troubleshoot")[0] or type(error).__name__


def _launch_error(error: BaseException) -> BaseException:
    """An actor's failure to start, as what it means for the job."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HvdglooError):
        return cause
    text = str(error)
    if "No module named 'hvdgloo" in text:
        return LaunchError(
            "a node of Ray's cluster has no hvdgloo; install this version on all of them, or give it to them: "
            'ray.init(runtime_env={"pip": ["hvdgloo"]})'
        )
    failure = LaunchError(f"a Ray actor could not be started: {words(error)}")
    failure.__cause__ = error
    return failure


def _is_echo(error: BaseException) -> bool:
    """Whether an exception only says that the workers have ended, or that another rank has failed."""
    from hvdgloo.errors import HorovodInternalError

    return isinstance(error, JobFailedError | HorovodInternalError)


def _from_ray(error: BaseException) -> bool:
    """Whether it is Ray's, about the actor or the call, and not the function's."""
    import ray

    return isinstance(error, ray.exceptions.RayActorError | ray.exceptions.TaskCancelledError)


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)


def _unless_over(action: Callable[[], Any]) -> Callable[[], None]:
    """``action``, unless this process no longer is in Ray: then Ray has ended everything itself."""

    def guarded() -> None:
        import ray

        if ray.is_initialized():
            action()

    return guarded
