"""``RayExecutor``, the interface for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from hvdgloo._job import excepthook
from hvdgloo.errors import ConfigError
from hvdgloo.ray import _settings
from hvdgloo.ray._cluster import check_ray
from hvdgloo.ray._settings import Settings
from hvdgloo.ray._worker import Kind
from hvdgloo.ray._workers import Call, Workers
from hvdgloo.ray.elastic import refuse_elastic
from hvdgloo.runner import call_arguments

__all__ = ["RayExecutor"]

T = TypeVar("T")


class RayExecutor:
    """Workers on a Ray cluster, which make calls together until they are shut down.

    Each worker is a process of its own next to a Ray actor, on the actor's node, with the actor's GPUs, environment,
    working directory and modules. ``hvd.init()`` in it finds all the others; workers on one node share memory. Their
    output appears here, each line with its rank.

    As a context manager, an executor is shut down at the end.

    Args:
        settings: from ``create_settings``; None for the defaults.
        num_workers: number of workers, on any nodes with room, few if possible (placement strategy PACK).
        num_hosts, num_workers_per_host: instead of ``num_workers``: the number of nodes, and of workers on each of them
            (STRICT_SPREAD).
        cpus_per_worker: CPUs that Ray reserves for each worker.
        gpus_per_worker: GPUs for each worker, with ``use_gpu``; by default 1.
        use_gpu: reserve GPUs, too; a worker sees the GPUs of all workers on its node, and ``hvd.local_rank()`` selects
            its own.
        use_current_placement_group: if this program runs in a placement group (in Ray Tune, for example), take the
            workers' resources from it.
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, override_discovery: refused, or without
            effect: ``ElasticRayExecutor`` runs elastic jobs.
        num_slots, cpus_per_slot, gpus_per_slot: old names of ``num_workers_per_host``, ``cpus_per_worker`` and
            ``gpus_per_worker``; they give a warning.

    Raises:
        ConfigError: (a ValueError) an argument cannot be used, or contradicts another one; Ray is not initialized.
        MissingDependencyError: (an ImportError) Ray is not installed.
    """

    create_settings = staticmethod(_settings.create_settings)

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        gpus_per_worker: int | None = None,
        use_gpu: bool = False,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float | None = None,
        override_discovery: bool = True,
        *,
        num_slots: int | None = None,
        cpus_per_slot: int | None = None,
        gpus_per_slot: int | None = None,
    ) -> None:
        excepthook.install()  # errors in arguments are shown without our frames
        if min_workers is not None or max_workers is not None or reset_limit is not None or elastic_timeout is not None:
            refuse_elastic()
        self._settings = judged(settings)
        rename = partial(call_arguments.renamed, "RayExecutor")
        self._demand = _settings.demand(
            num_workers,
            num_hosts,
            rename("num_workers_per_host", num_workers_per_host, "num_slots", num_slots, default=1),
            rename("cpus_per_worker", cpus_per_worker, "cpus_per_slot", cpus_per_slot, default=1),
            rename("gpus_per_worker", gpus_per_worker, "gpus_per_slot", gpus_per_slot),
            use_gpu,
        )
        self._use_current_placement_group = use_current_placement_group
        self._workers: Workers | None = None
        check_ray()

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def num_workers(self) -> int:
        """Number of workers, once they have been started."""
        return self._demand.workers

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, and return when all are ready.

        Args:
            executable_cls: a class; each worker makes an object of it, which ``execute`` passes to its function.
            executable_args, executable_kwargs: arguments for the class.
            extra_env_vars: variables for the workers' environment.

        Raises:
            ConfigError: the cluster can never have room for the workers, or they have been started already.
            LaunchError: no room became free in time, or a worker could not be started; nothing is left running.
            Exception: the exception that ``executable_cls`` raised on the first rank where it failed.
        """
        if executable_cls is not None and not callable(executable_cls):
            raise ConfigError(f"start(executable_cls={executable_cls!r}): it is not a class")
        if executable_cls is None and (executable_args or executable_kwargs):
            raise ConfigError(
                "start(): executable_args= and executable_kwargs= need executable_cls=, which is not given"
            )
        if self._workers is not None:
            if not self._workers.ended:
                raise ConfigError("start(): the workers have been started already; shutdown() ends them")
            self.shutdown()
        check_ray()
        self._settings.check()
        workers = Workers(
            self._demand, self._settings, _settings.variables(extra_env_vars, "start(extra_env_vars=...)")
        )
        workers.start(use_current_placement_group=self._use_current_placement_group)
        self._workers = workers
        if executable_cls is not None:
            try:
                self._results(Kind.CREATE, executable_cls, executable_args or (), executable_kwargs or {})
            except BaseException:
                self.shutdown()
                raise

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on all workers at once.

        Ctrl-C ends the workers.

        Args:
            callbacks: for elastic jobs only.

        Returns:
            the results, in the order of ranks.

        Raises:
            InvalidArgumentError: the function or its arguments cannot be pickled.
            JobFailedError: a worker, its actor or its node was lost; with rank and host. The workers have ended.
            Exception: the exception that ``fn`` raised on the first rank where it failed. Its cause is a
                ``RemoteTraceback``. If all workers have ended the call, they can still be used.
        """
        results: list[T] = self._results(Kind.RUN, *_arguments("run", fn, args, kwargs, callbacks))
        return results

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Start ``run``, and return at once.

        Returns:
            Ray's references to the results, in the order of ranks, for ``ray.get``. ``ray.cancel`` on any of them ends
            all workers.

        Raises:
            InvalidArgumentError: the function or its arguments cannot be pickled.
            JobFailedError: the workers have ended.
        """
        return self._submitted(Kind.RUN, *_arguments("run_remote", fn, args, kwargs, callbacks)).refs

    def execute(self, fn: Callable[[Any], T], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[T]:
        """Call ``fn(object)`` on all workers at once, with each worker's object of ``executable_cls``.

        Without ``executable_cls``, the object is None. Otherwise like ``run``.
        """
        results: list[T] = self._results(Kind.EXECUTE, *_arguments("execute", fn, None, None, callbacks))
        return results

    def execute_single(self, fn: Callable[[Any], T]) -> T:
        """Call ``fn(object)`` on rank 0 only; the other ranks are not involved. Otherwise like ``execute``."""
        results: list[T] = self._results(Kind.EXECUTE, *_arguments("execute_single", fn, None, None, None), count=1)
        return results[0]

    def shutdown(self) -> None:
        """End the workers and release the resources that Ray reserved for them. ``start`` starts new ones."""
        if self._workers is not None:
            workers, self._workers = self._workers, None
            workers.close()

    def _submitted(
        self,
        kind: Kind,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        count: int | None = None,
    ) -> Call:
        if self._workers is None:
            raise ConfigError("there are no workers yet: call start() first")
        return self._workers.submit(kind, function, args, kwargs, count or self._demand.workers)

    def _results(
        self,
        kind: Kind,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        count: int | None = None,
    ) -> list[Any]:
        import ray

        call = self._submitted(kind, function, args, kwargs, count)
        assert self._workers is not None
        try:
            self._workers.wait(call)
        except KeyboardInterrupt:
            # Ranks in the middle of a collective operation cannot continue.
            workers, self._workers = self._workers, None
            workers.close("Ctrl-C was pressed")
            raise
        results: list[Any] = ray.get(call.refs)
        return results


def judged(settings: Any) -> Settings:
    """Return the settings after checking them; None gives the defaults.

    Raises:
        ConfigError: they are not Settings, or hold values that cannot be used.
    """
    if settings is None:
        return Settings()
    if not isinstance(settings, Settings):
        raise ConfigError(
            f"RayExecutor(settings={settings!r}): the first argument must be the result of "
            "RayExecutor.create_settings(), or None; give the number of workers by name: num_workers="
        )
    settings.check()
    return settings


def _arguments(
    method: str,
    fn: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    callbacks: Sequence[Callable[..., Any]] | None,
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    if not callable(fn):
        raise ConfigError(f"{method}(): the first argument is a function, not {fn!r}")
    if callbacks:
        raise ConfigError(f"{method}(callbacks=...) is for elastic jobs; this one has a fixed size")
    call_arguments.check_arguments(method, args, kwargs)
    return fn, args or (), kwargs or {}
