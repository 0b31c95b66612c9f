"""``hvdgloo.spark.run``: a function in processes beside Spark's tasks, and its results.

A Spark job brings an agent for each task; from there on it is a job of the launcher's. Spark decides where tasks run,
and how long they live; ranks, output, results and failures are as in ``hvdgloo.run.run``.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsFloat, TextIO, TypeVar

from hvdgloo._job import excepthook
from hvdgloo.config import Config, without_place
from hvdgloo.errors import ConfigError, UnusableHostsError
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.meeting import Arrival
from hvdgloo.runner.inbound.reception import Reception
from hvdgloo.spark import _failures
from hvdgloo.spark._agent_task import lists, make_task
from hvdgloo.spark._session import Session, active

T = TypeVar("T")

_END_S = 5.0
"""Seconds in which the Spark job ends by itself once its agents have; then it is cancelled."""
_CANCELLED_S = 20.0
_SOON_S = 1.0
"""Seconds after which waiting for slots is worth a line: tasks that have just ended may still be counted."""
_OTHERS_S = 3.0
"""Seconds in which other executors can say that they lack something, too."""


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    spark: Any = None,
    barrier: bool = True,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` processes at once, each beside a task of Spark's.

    The processes find what their tasks have: working directory, modules (``--py-files``, ``--archives``), environment
    and GPUs (``hvdgloo.spark.task.get_available_devices()``). They end with the tasks. What they print appears here,
    prefixed with their ranks.

    Args:
        num_proc: number of processes; by default ``spark.sparkContext.defaultParallelism``.
        start_timeout: seconds that tasks have to start; by default HVDGLOO_SPARK_START_TIMEOUT, else 600.
        env: variables of the processes, beside those of their executors; its PYTHONPATH precedes the executors'.
            Without it, they get nothing of this process's environment, except for settings (``HVDGLOO_...``,
            ``HOROVOD_...``).
        stdout, stderr: text streams for the output; by default ``sys.stdout`` and ``sys.stderr``.
        verbose: 0 for no word of hvdgloo's own, 1 for a line when tasks have started, 2 for what is being done.
        nics: which addresses the hosts use for each other, as for ``hvdgloo-run --nics``.
        prefix_output_with_timestamp: begin every line with the time.
        executable: the processes' Python; by default that of Spark's tasks.
        spark: a SparkSession; by default the active one.
        barrier: start all tasks at once, or none of them. Without it, and always under dynamic allocation, they start
            as executors come.
        use_mpi, use_gloo, extra_mpi_args: there is only Gloo; ``use_mpi=True`` is rejected.

    Returns:
        the results in the order of ranks.

    Raises:
        ConfigError: an argument cannot be used, or Spark has fewer task slots than ``num_proc``.
        InvalidArgumentError: the function or its arguments cannot be pickled.
        LaunchError: there is no active SparkContext, or tasks did not start in time.
        UnusableHostsError: executors lack hvdgloo, or have another version of it, or of Python.
        JobFailedError: a process was killed or exited, an executor was lost, or the Spark job was cancelled.
        Exception: what ``fn`` raised on the first rank where it failed; its cause is a ``RemoteTraceback``.
    """
    excepthook.install()  # what is wrong with an argument is shown without frames of ours
    if not callable(fn):
        raise ConfigError(f"run(): the first argument is a function, not {fn!r}; its arguments follow it, in args=")
    _judge_controllers(use_gloo, use_mpi, extra_mpi_args)
    session = active(spark)
    job = _Job(session, number_of_tasks(session, num_proc), barrier=barrier and not session.grows)
    timeout = _start_timeout(start_timeout)
    variables = _variables(env)
    python_path = variables.pop("PYTHONPATH", "")
    say = _Speaker(stderr, verbose)
    deadline = time.monotonic() + timeout
    job.check_slots(deadline, say)
    with (
        Reception(
            job.size, what="Spark tasks", addresses=[session.driver] if session.driver else (), start_timeout=timeout
        ) as reception,
        job.running(reception, python_path, executable),
    ):
        arrivals = reception.gather(remedy=job.remedy, poll=job.check_executors)
        say.started(arrivals)
        return run_function(
            reception,
            fn,
            args,
            kwargs,
            env=variables,
            verbose=verbose > 1,
            stdout=stdout,
            stderr=stderr,
            timestamps=prefix_output_with_timestamp,
            nics=_names(nics),
        )


def run_elastic(*args: Any, **kwargs: Any) -> NoReturn:
    """Horovod's way to train on executors that come and go.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "hvdgloo.spark.run_elastic(): a job on Spark has a fixed number of ranks; call hvdgloo.spark.run(), which "
        "raises an error if a rank is lost, and have the function begin with its last checkpoint"
    )


def number_of_tasks(session: Session, num_proc: int | None) -> int:
    """How many tasks to start.

    Raises:
        ConfigError: ``num_proc`` is no number of processes.
    """
    number = session.default_parallelism if num_proc is None else num_proc
    if not isinstance(number, int) or number < 1:
        raise ConfigError(f"run(num_proc={num_proc!r}): give a whole number of processes, at least 1")
    return number


class _Job:
    """The Spark job that brings agents.

    Args:
        size: number of its tasks.
        barrier: whether they start all at once.
    """

    def __init__(self, session: Session, size: int, *, barrier: bool) -> None:
        self._session = session
        self._context = session.context
        self.size = size
        self._barrier = barrier
        self._group = f"hvdgloo-{uuid.uuid4()}"
        self._lacking: Any = None
        self._lacking_since: float | None = None
        self._wrong_python: dict[str, str] = {}
        if not barrier and session.is_set("spark.speculation"):
            raise ConfigError(
                "spark.speculation=true starts tasks a second time, and no rank may be: set it to false, or use a "
                "barrier stage" + (" (without dynamic allocation)" if session.grows else " (barrier=True)")
            )

    def check_slots(self, deadline: float, say: _Speaker) -> None:
        """Refuse a job that Spark has no room for.

        Slots that other tasks use become free; executors that have not come yet may still come.

        Raises:
            ConfigError: the executors that are there cannot run so many tasks.
        """
        session = self._session
        if session.grows:
            return
        slots = session.slots()
        while slots < self.size and not session.settled() and time.monotonic() < deadline:
            time.sleep(0.1)
            slots = session.slots()
        if slots < self.size:
            tasks = "task" if slots == 1 else "tasks"
            raise ConfigError(
                f"run(num_proc={self.size}): Spark runs {slots} {tasks} at once; give num_proc={slots or 1} or fewer, "
                "or the application more executors or cores (spark.executor.instances, spark.executor.cores, "
                "spark.cores.max, local[N]; each task takes spark.task.cpus of them, and its GPUs)"
            )
        soon = time.monotonic() + _SOON_S
        while (free := slots - session.busy()) < self.size:
            if time.monotonic() > soon:
                say.line(
                    f"waiting for Spark's other tasks: {self.size} slots are needed, and {free} of {slots} are free"
                )
                return
            time.sleep(0.05)

    @property
    def remedy(self) -> str:
        """What to look at where tasks do not start."""
        return (
            f"{self._session.resources()}. Are other jobs using the cluster, and can it give so many cores (and GPUs)? "
            "A longer start_timeout, or HVDGLOO_SPARK_START_TIMEOUT, waits longer."
        )

    @contextmanager
    def running(self, reception: Reception, python_path: str, executable: str | None) -> Iterator[None]:
        """The tasks run while this lasts; afterwards nothing of the job is left."""
        from pyspark import InheritableThread

        self._lacking = self._context.accumulator([], lists())
        task = make_task(reception.invitation, python_path, executable, self._lacking)

        def job() -> None:
            try:
                self._context.setJobGroup(self._group, f"hvdgloo.spark.run, {self.size} ranks", interruptOnCancel=True)
                tasks = self._context.range(0, self.size, numSlices=self.size)
                (tasks.barrier() if self._barrier else tasks).mapPartitionsWithIndex(task).collect()
            except Exception as error:  # noqa: BLE001 - whatever Spark and its JVM raise, it is why tasks are gone
                self._wrong_python = _failures.wrong_python(str(error))
                if not self._wrong_python:
                    stopped = self._session.is_stopped
                    reception.fail(_failures.STOPPED if stopped else _failures.explain(str(error)))

        # It has the caller's scheduler pool and job tags.
        thread = InheritableThread(target=job, name="hvdgloo-spark-job", daemon=True)
        thread.start()
        clean = False
        try:
            yield
            clean = True
        finally:
            if clean:
                thread.join(_END_S)
            self._cancel(thread)

    def _cancel(self, thread: threading.Thread) -> None:
        """End what still runs. Its agents have been told to end."""
        if not thread.is_alive():
            return
        try:
            self._context.cancelJobGroup(self._group)
        except Exception:  # noqa: BLE001 - the session was stopped, and the job with it
            pass
        thread.join(_CANCELLED_S)

    def check_executors(self) -> None:
        """Look at what executors lack.

        Raises:
            UnusableHostsError: of some, and others have had the time to say the same.
        """
        if self._wrong_python:
            raise self._unusable(
                self._wrong_python,
                "Have PYSPARK_PYTHON, or spark.pyspark.python, name the same version of Python on all hosts",
            )
        lacking = {f"{host} (task {index})": what for index, host, what in sorted(self._lacking.value)}
        if not lacking:
            return
        now = time.monotonic()
        self._lacking_since = self._lacking_since or now
        if len(lacking) == self.size or now - self._lacking_since > _OTHERS_S:
            raise self._unusable(
                lacking,
                "Install the same version of hvdgloo for the executors' Python (PYSPARK_PYTHON), or send an "
                "environment that has it (--archives)",
            )

    def _unusable(self, reasons: Mapping[str, str], remedy: str) -> UnusableHostsError:
        lines = "\n".join(f"  {label}: {what}" for label, what in reasons.items())
        return UnusableHostsError(
            f"{len(reasons)} of {self.size} Spark tasks cannot start a rank:\n{lines}\n{remedy}", hosts=reasons
        )


class _Speaker:
    """Lines of hvdgloo's own."""

    def __init__(self, stream: TextIO | None, verbose: int) -> None:
        self._stream = stream
        self._verbose = verbose

    def line(self, text: str) -> None:
        if self._verbose > 0:
            stream = self._stream or sys.stderr
            stream.write(f"hvdgloo.spark: {text}\n")
            stream.flush()

    def started(self, arrivals: Sequence[Arrival]) -> None:
        hosts = sorted({arrival.host for arrival in arrivals})
        shown = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        self.line(
            f"{len(arrivals)} tasks have started on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}: {shown}"
        )
        if self._verbose > 1:
            for arrival in arrivals:
                self.line(f"  task {arrival.index}: {arrival.label}, from {arrival.address}, process {arrival.pid}")


# Arguments.


def _judge_controllers(use_gloo: bool | None, use_mpi: bool | None, extra_mpi_args: str | None) -> None:
    if use_mpi:
        raise ConfigError("run(use_mpi=True): there is no MPI here; leave it out")
    if extra_mpi_args:
        warnings.warn("run(extra_mpi_args=...) has no effect: there is no MPI here", stacklevel=3)


def _start_timeout(value: float | None) -> float:
    if value is None:
        return Config.from_env().spark_start_timeout
    if not (isinstance(value, SupportsFloat) and 0 < value < math.inf):
        raise ConfigError(f"run(start_timeout={value!r}): it is not a number of seconds")
    return float(value)


def _variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """What workers are given by the caller. A job in whose worker this runs is not theirs."""
    if env is not None and not all(isinstance(each, str) for pair in env.items() for each in pair):
        raise ConfigError("run(env=...): names and values of variables are texts")
    variables = without_place(env or {})
    if _stands_for_horovod():
        variables.setdefault("HVDGLOO_AS_HOROVOD", "1")
    return variables


def _stands_for_horovod() -> bool:
    """Whether this program's ``import horovod`` is hvdgloo, so that the workers' has to be."""
    horovod = sys.modules.get("horovod")
    return Config.from_env().as_horovod or getattr(horovod, "stands_in_for", None) is not None


def _names(nics: str | Iterable[str] | None) -> tuple[str, ...]:
    if nics is None:
        return ()
    return (nics,) if isinstance(nics, str) else tuple(nics)
