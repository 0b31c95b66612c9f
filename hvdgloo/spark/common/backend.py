"""Backends, on which estimators train: Spark's executors, processes of this host, or your own.

A backend needs only two methods::

    class InPlace(Backend):
        def run(self, fn, args=(), kwargs=None, env=None):
            return [fn(*args, **(kwargs or {}))]

        def num_processes(self):
            return 1
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import hvdgloo.run as _run
from hvdgloo.runner.job.environment import is_host_specific
from hvdgloo.spark import _session

__all__ = ["Backend", "LocalBackend", "SparkBackend", "default_num_proc"]

T = TypeVar("T")


def default_num_proc() -> int:
    """Choose the default number of processes: ``defaultParallelism``, but no more than Spark runs tasks at once.

    Raises:
        LaunchError: there is no active SparkContext.
        MissingDependencyError: pyspark is not installed.
    """
    session = _session.active()
    from hvdgloo.spark._run import number_of_tasks  # which needs pyspark

    return number_of_tasks(session, None)


class Backend(ABC):
    """Base of classes that call a function in all processes of a job."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Call ``fn(*args, **kwargs)`` in each process, and return the results in the order of ranks.

        Args:
            env: variables to set for the processes.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Return the number of processes in which ``run`` calls the function."""

    def check(self) -> None:  # noqa: B027 - a backend need not know anything beforehand
        """Raise an error if ``run`` would fail. Called before data are written for it, which may take long."""


class LocalBackend(Backend):
    """Backend that trains in processes on this host, the driver's: Spark only prepares the data.

    It is for a driver with the GPUs, and for trying things out: it starts no Spark job.

    Args:
        num_proc: number of processes.
        env: variables to set for them, in addition to this process's.
        kwargs: further arguments of ``hvdgloo.run.run``, for example ``verbose=True``.
    """

    def __init__(self, num_proc: int = 1, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = _session.checked_number(num_proc, "LocalBackend")
        self._env = dict(env or {})
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        variables = {**self._env, **(env or {})}
        return _run.run(fn, args, kwargs, num_proc=self._num_proc, env=variables, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc


class SparkBackend(Backend):
    """Backend that trains in Spark's tasks.

    Args:
        num_proc: number of processes; by default ``default_num_proc()``, called at construction.
        env: the processes' variables in addition to their executors'; by default the driver's, except for variables
            that describe its host and its visible GPUs.
        kwargs: further arguments of ``hvdgloo.spark.run``, for example ``stdout``, ``verbose`` or ``nics``.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = default_num_proc() if num_proc is None else _session.checked_number(num_proc, "SparkBackend")
        self._env = env
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        # Imported here, since programs that only train on this host need no Spark.
        from hvdgloo.spark._run import run

        own = {name: value for name, value in os.environ.items() if not is_host_specific(name)}
        variables = {**(own if self._env is None else self._env), **(env or {})}
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # Spark assigns each task its devices
        return run(fn, args, kwargs, num_proc=self._num_proc, env=variables, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc

    def check(self) -> None:
        """Check that Spark has room for the processes.

        Raises:
            ConfigError: Spark has fewer task slots than there are processes.
            LaunchError: there is no active SparkContext.
        """
        from hvdgloo.spark._run import check_room

        check_room(self._num_proc, **self._kwargs)
