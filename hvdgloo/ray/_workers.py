"""The workers of a ``RayExecutor`` from their start to their end.

Each worker has a Ray actor, which brings its agent. The launcher's supervisor runs on a thread of the driver's as long
as there are workers; it shows their output and reports which worker failed first. Calls and results travel through Ray.

**After a failure.** If a call raises an exception on one rank, the others may be in a collective operation that never
ends. They are given a moment to end their calls, too: if they do, since the mistake was the same everywhere, the
workers stay and the next call can be made. Otherwise all workers are ended. They are ended at once if a worker, an
actor or a node is lost, a call is cancelled, or Ctrl-C is pressed.
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
from hvdgloo.errors import HvdglooError, InvalidArgumentError, JobFailedError, LaunchError
from hvdgloo.ray import _worker
from hvdgloo.ray._actor import ActorLocation, WorkerActor
from hvdgloo.ray._placement import Reservation, reserve
from hvdgloo.ray._settings import Demand, Settings
from hvdgloo.ray._worker import Kind
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener

_GRACE = 3.0
"""Seconds that other ranks have to end a call in which one rank failed, as in any job."""

_TURN = 0.5
"""Seconds after which a wait checks whether there is still something to wait for."""

_IDLE_END = 10.0
"""Seconds that idle workers have to end by themselves."""

_SURE_END = 60.0
"""Seconds beyond the grace period within which the supervisor has ended everything, by killing if necessary."""


class Call:
    """A call that was sent to workers.

    Attributes:
        refs: Ray's references to the results, in order of ranks.
        done: set when all ranks have ended the call, or can never end it.
        error: the reason why there are no results, once ``done`` is set.
    """

    def __init__(self, refs: Sequence[Any]) -> None:
        self.refs = list(refs)
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.failures: dict[int, BaseException] = {}
        self.left = len(self.refs)
        self.overdue: threading.Timer | None = None  # runs from the first rank's failure until the call is over


class Workers:
    """The workers of an executor, which have to be closed after use.

    Attributes:
        actors: the workers' actors, in order of ranks.
    """

    def __init__(self, demand: Demand, settings: Settings, extra_env_vars: Mapping[str, str]) -> None:
        self._demand = demand
        self._settings = settings
        self._env = extra_env_vars
        self._start_timeout = settings.start_timeout
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._exit = ExitStack()
        self._listener: TaskListener | None = None
        self._job = threading.Thread(target=self._run, name="hvdgloo-ray-job", daemon=True)
        self.actors: list[Any] = []
        self._numbers = [0] * demand.workers  # of each actor's next call

    @property
    def ended(self) -> bool:
        """True once the workers have ended."""
        return self._ended.is_set()

    # Start and end.

    def start(self, *, use_current_placement_group: bool) -> None:
        """Start the workers, and return when all are ready for calls.

        Raises:
            ConfigError: the cluster is too small.
            LaunchError: the workers could not be started. Nothing is left running.
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

        self._listener = self._exit.enter_context(
            TaskListener(
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
        places: list[ActorLocation] = self._gathered([actor.place.remote() for actor in actors], "Ray has not started")
        order = by_node(places)
        gpus = visible_gpus(places)
        self._job.start()
        ranks = self._gathered(
            [
                actors[which].bring.remote(self._listener.invitation, index, places[which], gpus[places[which].node])
                for index, which in enumerate(order)
            ],
            "no worker has been started by",
            patience=2,
        )
        self.actors = [actors[which] for _, which in sorted(zip(ranks, order, strict=True))]
        for rank, actor in enumerate(self.actors):
            actor.alive.remote().future().add_done_callback(partial(self._actor_ended, rank))

    def _gathered(self, refs: Sequence[Any], missing: str, *, patience: int = 1) -> list[Any]:
        """Return the actors' answers.

        Args:
            missing: beginning of the message about actors that do not answer.
            patience: number of start timeouts to wait.

        Raises:
            LaunchError: an actor failed or did not answer in time, or the job ended meanwhile.
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
                    "worker-*.err in Ray's logs show what the actors are doing"
                )
        return [future.result() for future in futures]

    def _run(self) -> None:
        """Supervise the job, on a thread of its own."""
        assert self._listener is not None
        failure: BaseException | None = None
        try:
            self._listener.gather(remedy="Can the nodes reach the driver's machine?")
            run_function(
                self._listener,
                _worker.serve,
                env=self._env,
                output=self._settings.output,
                times=self._settings.times,
                nics=tuple(self._settings.nics),
            )
        except BaseException as error:  # noqa: BLE001 - raised again where a call is awaited
            failure = error
        self._over(failure)

    def _over(self, failure: BaseException | None) -> None:
        """Record that the job has ended, and end all waits for calls with the reason."""
        with self._lock:
            self._failure = failure
            self._ended.set()
            calls = list(self._calls)
            self._calls.clear()
        reason = str(failure) if failure is not None else "the workers have ended"
        try:
            # Before the calls are over, so that a thread that waits for one can fetch the errors from its references.
            _unless_over(lambda: [actor.over.remote(reason) for actor in self.actors])()
        finally:
            for call in calls:
                self._conclude(call)

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Have all workers ended for this reason; return at once."""
        if self._listener is not None:
            self._listener.fail(reason, error)

    def close(self, reason: str = "the executor was shut down") -> None:
        """End all workers and release all resources. Idempotent."""
        atexit.unregister(self.close)
        with self._exit:  # even if Ctrl-C is pressed again while workers have time to end
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
            InvalidArgumentError: the function or its arguments cannot be pickled.
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
        """Wait until a call has ended on all of its ranks.

        Raises:
            JobFailedError: a worker, an actor or a node was lost.
            Exception: the exception that the function raised on the first rank where it failed.
        """
        import ray

        while not call.done.wait(_TURN):
            pass
        if call.error is not None:
            for ref in call.refs:  # Ray prints errors that were never fetched
                with suppress(Exception):
                    ray.get(ref, timeout=0)
            raise call.error

    def _check(self) -> None:
        if self._ended.is_set():
            why = f": {self._failure}" if self._failure is not None else ""
            raise JobFailedError(f"the workers have ended{why}\nstart() starts new ones") from self._failure

    def _settled(self, call: Call, rank: int, status: Future[Any]) -> None:
        """Record that one rank ended a call; runs on a thread of Ray's."""
        import ray

        error = status.exception()
        cause = getattr(error, "cause", None)
        with self._lock:
            call.left -= 1
            if error is not None:
                call.failures[rank] = cause if isinstance(cause, BaseException) else error
            # If Ray lost or cancelled the call, all workers are ended, and only then is the call over.
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
            self.fail(f"the actor of rank {rank} ended: {words(error)}")
        elif over:
            self._conclude(call)

    @property
    def _grace(self) -> float:
        return _GRACE if self._settings.grace_period is None else self._settings.grace_period

    def _overdue(self, call: Call, rank: int) -> None:
        """End the job if ranks are still in a call in which rank ``rank`` failed a while ago."""
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
            # The timer's thread must not hold the last reference to the call: Ray ends a process in which a reference
            # to one of its objects is deleted while ray.shutdown() runs in another thread.
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
            self.fail(f"the actor of rank {rank} ended: {words(error)}")


def pack(
    kind: Kind, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, bool]:
    """Pickle a call for workers; also return whether it contains references to Ray's objects.

    Raises:
        InvalidArgumentError: the function or its arguments cannot be pickled.
    """
    import ray

    content = (kind.value, function, tuple(args), dict(kwargs))
    try:
        try:
            # Unpickling what Ray's pickler wrote imports Ray, which takes longer than the rest of the first call.
            return _pickled(pickling.Pickler, content), False
        except _Reference:
            return _pickled(pickling.naming_files(ray.cloudpickle.Pickler), content, with_references=True), True
    except Exception as error:
        raise InvalidArgumentError(
            f"the function or its arguments cannot be sent to the workers ({type(error).__name__}: {error}); "
            "open files, locks and connections must be created inside the function"
        ) from error


class _Reference(Exception):  # noqa: N818 - never leaves this module
    """A content to be pickled contains references to Ray's objects."""


def _pickled(pickler: type[Any], content: Any, *, with_references: bool = False) -> bytes:
    """Pickle ``content``.

    Raises:
        _Reference: it contains references to Ray's objects, although ``with_references`` is False.
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


def by_node(places: Sequence[ActorLocation]) -> list[int]:
    """Return the actors' order: grouped by node, nodes in the order in which they first appear."""
    first: dict[str, int] = {}
    for index, place in enumerate(places):
        first.setdefault(place.node, index)
    return sorted(range(len(places)), key=lambda index: (first[places[index].node], index))


def visible_gpus(places: Sequence[ActorLocation]) -> dict[str, dict[str, str]]:
    """Return, for each node, the variable that shows its workers all of their GPUs: hvd.local_rank() selects one."""
    gpus: dict[str, list[str]] = {}
    for place in places:
        gpus.setdefault(place.node, []).extend(place.gpus)
    return {node: {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(ids))} if ids else {} for node, ids in gpus.items()}


def words(error: BaseException) -> str:
    """Extract the reason for an actor's end from Ray's message, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "is dead because" in line or "died because" in line]
    chosen = (said or lines or [""])[0]
    return chosen.partition(" Some common causes")[0].partition(" To troubleshoot")[0] or type(error).__name__


def _launch_error(error: BaseException) -> BaseException:
    """Convert an actor's failure to start into the job's error."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HvdglooError):
        return cause
    text = str(error)
    if "No module named 'hvdgloo" in text:
        return LaunchError(
            "hvdgloo is not installed on a node of Ray's cluster; install this version on all nodes, or let Ray do so: "
            'ray.init(runtime_env={"pip": ["hvdgloo"]})'
        )
    failure = LaunchError(f"a Ray actor could not be started: {words(error)}")
    failure.__cause__ = error
    return failure


def _is_echo(error: BaseException) -> bool:
    """Return whether an error only reports that the workers have ended, or that another rank failed."""
    from hvdgloo.errors import HorovodInternalError

    return isinstance(error, JobFailedError | HorovodInternalError)


def _from_ray(error: BaseException) -> bool:
    """Return whether Ray raised this error about the actor or the call, rather than the user's function."""
    import ray

    return isinstance(error, ray.exceptions.RayActorError | ray.exceptions.TaskCancelledError)


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)


def _unless_over(action: Callable[[], Any]) -> Callable[[], None]:
    """Skip ``action`` if this process has left Ray, which has then ended everything itself."""

    def guarded() -> None:
        import ray

        if ray.is_initialized():
            action()

    return guarded
