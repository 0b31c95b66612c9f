"""``hvdgloo.run.run(func, np=4)``: run a Python function on several processes, and get its results.

In early Horovod ``horovod.run`` is a package and ``horovod.run.run`` the function; later ``horovod.run`` is the
function. This module can be called, so both ways of writing it work.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, JobFailedError, LaunchError, RemoteTraceback
from hvdgloo.rendezvous.auth import generate_secret
from hvdgloo.runner import task
from hvdgloo.runner.hosts import parse_hosts, read_hostfile
from hvdgloo.runner.launch import LIBRARY_SIGNALS, Report, launch
from hvdgloo.runner.spec import Host, LaunchSpec

__all__ = ["run"]

T = TypeVar("T")

_ELASTIC = "jobs that grow and shrink are not supported yet; leave it out for a job of a fixed size"
_MPI = "there is no MPI here; leave it out"


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    grace_period: float | None = None,
    output_filename: str | None = None,
    prefix_output_with_timestamp: bool = False,
    verbose: bool | int | None = None,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    host_discovery_script: str | None = None,
) -> list[T]:
    """Call ``func(*args, **kwargs)`` in ``np`` worker processes at once.

    The function travels by cloudpickle, so it may come from a script, a notebook or a closure. What the workers print
    appears in ``sys.stdout`` and ``sys.stderr`` with their ranks before it. Ctrl-C is passed on to the workers (if this
    is the main thread) and raises KeyboardInterrupt here when they have ended.

    Args:
        np, num_proc: number of processes; two names for one thing.
        hosts: ``host:slots,...``; by default this one.
        hostfile: the same in a file.
        start_timeout: seconds that ``hvd.init()`` waits for the other workers.
        grace_period: seconds between asking workers to end and killing them; by default 3 after a failure and 30 after
            Ctrl-C.
        output_filename: a directory that also receives what each rank prints.
        prefix_output_with_timestamp: begin every line with the time.
        verbose: say what is being done.
        executable: the Python interpreter of the workers; by default this one.
        env: variables that the workers find in addition to this process's own.
        ssh_port, ssh_identity_file, network_interface, network_interfaces, disable_cache, use_gloo: accepted for
            Horovod's sake; on this machine alone they change nothing.

    Returns:
        the results in the order of ranks.

    Raises:
        ConfigError: an argument that cannot be used, or is for MPI or for elastic jobs.
        InvalidArgumentError: the function or its arguments cannot be pickled.
        LaunchError: the workers could not be started.
        JobFailedError: a worker was killed, exited, or its result cannot be pickled; with rank, host and last lines.
        Exception: whatever ``func`` raised on the first rank where it failed. Its cause is a ``RemoteTraceback`` with
            rank, host and the worker's traceback.
    """
    _refuse({"use_mpi": use_mpi, "mpi_args": mpi_args}, _MPI)
    _refuse(
        {
            "min_num_proc": min_num_proc,
            "max_num_proc": max_num_proc,
            "min_np": min_np,
            "max_np": max_np,
            "slots": slots,
            "reset_limit": reset_limit,
            "cooldown_range": cooldown_range,
            "host_discovery_script": host_discovery_script,
        },
        _ELASTIC,
    )
    count = num_proc if num_proc is not None else np
    environ = {**os.environ, **(env or {})}
    secret = generate_secret()
    spec = LaunchSpec(
        command=task.command(executable or _own_interpreter()),
        hosts=_hosts(hosts, hostfile, count),
        np=count,
        cwd=os.getcwd(),
        environ=environ,
        secret=secret,
        function=task.pack_function(func, args, kwargs or {}, secret),
        start_timeout=start_timeout if start_timeout is not None else Config.from_env(environ).start_timeout,
        grace_period=grace_period,
        output_directory=None if output_filename is None else os.path.abspath(output_filename),
        timestamps=prefix_output_with_timestamp,
        verbose=bool(verbose),
    )
    with _Results(secret) as results:
        report = launch(
            spec,
            stdout=sys.stdout,
            stderr=sys.stderr,
            quiet=not verbose,
            signals=LIBRARY_SIGNALS,
            results=results,
        )
        return _conclude(report, results)


def _refuse(given: Mapping[str, object], reason: str) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(f"run({name}=...): {reason}")


def _own_interpreter() -> str:
    if not sys.executable:
        raise LaunchError("this program does not know its Python interpreter; give one: run(..., executable=...)")
    return sys.executable


def _hosts(hosts: str | None, hostfile: str | None, np: int) -> tuple[Host, ...]:
    if np < 1:
        raise ConfigError(f"run(np={np}): a job has at least one process")
    if hosts is not None and hostfile is not None:
        raise ConfigError("run(): give either hosts or hostfile, not both")
    if hosts is not None:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile is not None else (Host("localhost", np),)


class _Results:
    """What each rank leaves behind, in files until the job is over: results may be larger than pipes and patience."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._files: dict[int, IO[bytes]] = {}

    def __enter__(self) -> _Results:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, rank: int, data: bytes) -> None:
        if rank not in self._files:
            self._files[rank] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._files[rank].write(data)

    def outcome(self, rank: int) -> task.Outcome | None:
        """None if the worker ended before it could leave anything."""
        file = self._files.pop(rank, None)
        if file is None:
            return None
        with file:
            file.seek(0)
            return task.unpack_outcome(file.read(), rank, self._secret)


def _conclude(report: Report, results: _Results) -> list[Any]:
    if report.outcome.interrupted == signal.SIGINT:
        raise KeyboardInterrupt
    if report.outcome.exit_code != 0:
        raise _failure(report, results)
    values = []
    for slot in report.slots:
        outcome = results.outcome(slot.rank)
        if outcome is None or outcome.result is None:
            what = outcome.text if outcome is not None else "ended by itself"
            raise JobFailedError(
                f"rank {slot.rank} on host {slot.hostname} {what} and left no result",
                rank=slot.rank,
                host=slot.hostname,
            )
        values.append(pickle.loads(outcome.result))  # noqa: S301 - part of what was sealed
    return values


def _failure(report: Report, results: _Results) -> BaseException:
    """The exception that stands for the job's failure: the first worker's own, if it left one."""
    first = report.outcome.first
    if first is None or first.rank is None:
        return report.error()
    failed = [rank for rank, status in report.outcome.statuses.items() if status]
    left = {rank: outcome for rank in failed if (outcome := results.outcome(rank)) is not None}
    chosen = left.get(first.rank)
    rank = first.rank
    if chosen is not None and chosen.secondary:
        # This rank only noticed, faster than the culprit ended, that it was left alone.
        causes = [other for other, outcome in left.items() if outcome.traceback and not outcome.secondary]
        rank = causes[0] if causes else rank
        chosen = left[rank]
    if chosen is None:
        return report.error()
    host = next(slot.hostname for slot in report.slots if slot.rank == rank)
    return _exception(chosen, rank, host) or JobFailedError(
        f"rank {rank} on host {host} {'raised ' if chosen.traceback else ''}{chosen.text}"
        + (f"\n\n{chosen.traceback}" if chosen.traceback else ""),
        rank=rank,
        host=host,
        exit_code=report.outcome.exit_code,
        last_lines=report.last_lines,
    )


def _exception(outcome: task.Outcome, rank: int, host: str) -> BaseException | None:
    if outcome.exception is None:
        return None
    try:
        error = pickle.loads(outcome.exception)  # noqa: S301 - part of what was sealed
    except Exception:  # noqa: BLE001 - a class that only the worker can import; the text remains
        return None
    error.__cause__ = RemoteTraceback(
        f"raised by rank {rank} on host {host}\n\n{outcome.traceback}",
        rank=rank,
        host=host,
        traceback=outcome.traceback,
    )
    for name, value in (("rank", rank), ("host", host)):
        if not hasattr(error, name):  # an hvdgloo error may have a rank of its own: the one that was lost
            try:
                setattr(error, name, value)
            except AttributeError:
                pass  # a class with __slots__
    assert isinstance(error, BaseException)
    return error


class RunModule(types.ModuleType):
    """The type of this module: ``hvdgloo.run(func, np=4)`` is ``hvdgloo.run.run(func, np=4)``."""

    run = staticmethod(run)
    __call__ = staticmethod(run)


sys.modules[__name__].__class__ = RunModule
