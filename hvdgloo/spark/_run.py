"""``hvdgloo.spark.run``: a function in processes next to Spark's tasks, and its results.

A Spark job brings an agent for each task; from there on it is a job of the launcher's. Spark decides where tasks run
and how long they live; ranks, output, results and failures are as in ``hvdgloo.run.run``.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat, TextIO, TypeVar

from hvdgloo._job import excepthook
from hvdgloo.config import Config, without_place
from hvdgloo.errors import ConfigError, UnusableHostsError
from hvdgloo.runner import call_arguments
from hvdgloo.runner.elastic.options import ElasticOptions
from hvdgloo.runner.inbound.hello import TaskHello
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener
from hvdgloo.runner.job.spec import Output, Times
from hvdgloo.spark import _failures
from hvdgloo.spark._agent_task import lists, make_task
from hvdgloo.spark._session import Session, active, checked_number

T = TypeVar("T")

_END_S = 5.0
"""Seconds that the Spark job has to end by itself once its agents have ended; then it is cancelled."""
_OVER_S = 30.0
"""Seconds that the driver has to notice that all agents have ended before the end of their tasks is a failure."""
_STEP_S = 0.5
"""Length in seconds of the steps of a wait that must not end merely because this process could not run."""
_CANCELLED_S = 20.0
"""Seconds that Spark has to end a cancelled job."""
_CANCEL_AGAIN_S = 0.5
"""Seconds after which a job that still runs is cancelled again."""
_SETTLED_S = 2.0
"""Seconds for which Spark must list all executors before they count as present: it still lists one just lost."""
_SOON_S = 1.0
"""Seconds after which a wait for slots is reported; before, tasks that just ended may still be counted."""
_OTHERS_S = 3.0
"""Seconds that other executors have to report that they lack something, too."""


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
    heartbeat_timeout: float | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` processes at once, each next to a task of Spark's.

    The processes have their tasks' working directory, modules (``--py-files``, ``--archives``), environment and GPUs
    (``hvdgloo.spark.task.get_available_devices()``), and end with the tasks. Their output appears here, prefixed with
    their ranks.

    Args:
        num_proc: number of processes; by default ``spark.sparkContext.defaultParallelism``, but no more than Spark has
            task slots.
        start_timeout: seconds that tasks have to start; by default HVDGLOO_SPARK_START_TIMEOUT, otherwise 600.
        env: variables of the processes, in addition to their executors'; its PYTHONPATH precedes the executors'.
            Without it, they get nothing of this process's environment, except for settings (``HVDGLOO_...``,
            ``HOROVOD_...``).
        stdout, stderr: text streams for the output; by default ``sys.stdout`` and ``sys.stderr``.
        verbose: 0 for no messages of hvdgloo's own, 1 for a line when tasks have started, 2 for progress.
        nics: the addresses that hosts use for each other, as for ``hvdgloo-run --nics``.
        prefix_output_with_timestamp: begin every line with the time.
        executable: the processes' Python; by default the one of Spark's tasks.
        spark: a SparkSession; by default the active one.
        barrier: start all tasks at once, or none of them. Without it, and always under dynamic allocation, tasks start
            as executors arrive.
        heartbeat_timeout: seconds of silence between this process and a host after which each considers the other
            lost; by default a host is lost after 5 seconds, and this process after 60. On Linux, executors then still
            ask their kernel whether this machine answers, since one long call may hold this process's interpreter for
            any time.
        use_mpi, use_gloo, extra_mpi_args: accepted for Horovod's sake. There is only Gloo; ``use_mpi=True`` is
            rejected.

    Returns:
        the results in the order of ranks.

    Raises:
        ConfigError: an argument cannot be used, or Spark has fewer task slots than ``num_proc``.
        InvalidArgumentError: the function or its arguments cannot be pickled.
        LaunchError: there is no active SparkContext, or tasks did not start in time.
        UnusableHostsError: executors lack hvdgloo, or have another version of it or of Python.
        JobFailedError: a process was killed or exited, an executor was lost, or the Spark job was cancelled.
        Exception: the exception that ``fn`` raised on the first rank where it failed; its cause is a
            ``RemoteTraceback``.
    """
    excepthook.install()  # what is wrong with an argument is shown without frames of ours
    call_arguments.judge_controllers("run", use_gloo, use_mpi, "extra_mpi_args", extra_mpi_args)
    session = active(spark)
    timeout = _start_timeout(start_timeout)
    size = number_of_tasks(session, num_proc, timeout)
    return _call(
        _Job(session, size, barrier=barrier and not session.grows, is_given=num_proc is not None),
        (fn, args, kwargs),
        start_timeout=timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        timestamps=prefix_output_with_timestamp,
        executable=executable,
        heartbeat_timeout=heartbeat_timeout,
    )


def check_room(
    num_proc: int,
    *,
    start_timeout: float | None = None,
    spark: Any = None,
    barrier: bool = True,
    **_: Any,
) -> None:
    """Check that Spark has enough slots for ``run``, before any work is done for it.

    Args:
        num_proc, start_timeout, spark, barrier: as for ``run``; its other arguments are accepted and ignored.

    Raises:
        ConfigError, LaunchError: as for ``run``.
    """
    session = active(spark)
    job = _Job(session, num_proc, barrier=barrier and not session.grows)
    job.check_room(time.monotonic() + _start_timeout(start_timeout))


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    executable: str | None = None,
    spark: Any = None,
    heartbeat_timeout: float | None = None,
) -> list[T]:
    """Call ``fn`` like ``run``, but on executors that may join and leave; ``fn`` trains in ``hvd.elastic.run``.

    The tasks belong to an ordinary stage, and Spark starts them as it has room. A lost task takes only its own rank
    with it, and Spark retries it (``spark.task.maxFailures`` times): its rank joins as a new one.

    Args:
        num_proc: number of ranks to wait for at the start; by default as for ``run``, or ``min_num_proc``.
        min_num_proc: the fewest ranks with which training continues; by default ``num_proc``.
        max_num_proc: the most ranks, and the number of tasks that are started; by default ``num_proc``.
        elastic_timeout: seconds to wait for enough ranks once some were lost; by default HVDGLOO_ELASTIC_TIMEOUT,
            otherwise 600. At the start it is ``start_timeout``.
        reset_limit: how often ranks may form a new epoch.
        heartbeat_timeout: as for ``run``.
        min_np, max_np: old names of ``min_num_proc`` and ``max_num_proc``; they give a warning.

    Returns:
        the results of the ranks present at the end, in order.

    Raises:
        ConfigError, LaunchError, JobFailedError, Exception: as for ``run``.
    """
    excepthook.install()
    least = call_arguments.renamed("run_elastic", "min_num_proc", min_num_proc, "min_np", min_np)
    most = call_arguments.renamed("run_elastic", "max_num_proc", max_num_proc, "max_np", max_np)
    session = active(spark)
    for name, number in (("num_proc", num_proc), ("min_num_proc", least), ("max_num_proc", most)):
        if number is not None:
            checked_number(number, "run_elastic", name)
    timeout = _start_timeout(start_timeout)
    if num_proc is None and least is None:
        size = min(number_of_tasks(session, None, timeout), most or sys.maxsize)
    else:
        size = number_of_tasks(session, least if num_proc is None else num_proc, timeout)
    if least is not None and least > size:
        raise ConfigError(f"run_elastic(): min_num_proc={least} is more than num_proc={size}")
    if most is not None and most < size:
        raise ConfigError(f"run_elastic(): max_num_proc={most} is less than num_proc={size}")
    return _call(
        _Job(session, most or size, barrier=False, least=size, is_given=(num_proc or least or most) is not None),
        (fn, args, kwargs),
        elastic=ElasticOptions(
            min_np=size if least is None else least,
            max_np=size if most is None else most,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
        ),
        start_timeout=timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        timestamps=prefix_output_with_timestamp,
        executable=executable,
        heartbeat_timeout=heartbeat_timeout,
    )


def _call(
    job: _Job,
    call: tuple[Callable[..., T], Sequence[Any], Mapping[str, Any] | None],
    *,
    start_timeout: float,
    env: Mapping[str, str] | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
    verbose: int,
    nics: str | Iterable[str] | None,
    timestamps: bool,
    executable: str | None,
    heartbeat_timeout: float | None,
    elastic: ElasticOptions | None = None,
) -> list[T]:
    """Have tasks started, and a function called next to them. Arguments are as for ``run``.

    Args:
        job: brings agents.
        call: the function and its arguments.
        elastic: how the number of ranks may change; None if it is fixed.
    """
    call_arguments.check_call("run", *call)
    for name, stream in (("stdout", stdout), ("stderr", stderr)):
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise ConfigError(f"run({name}={stream!r}): give a text stream, such as open() returns")
    silence = None if heartbeat_timeout is None else _seconds("heartbeat_timeout", heartbeat_timeout)
    variables = _variables(env)
    python_path = variables.pop("PYTHONPATH", "")
    say = _Speaker(stderr, verbose)
    job.check_slots(time.monotonic() + start_timeout, say)
    listener = TaskListener(
        None if job.least is not None else job.size,
        what="Spark tasks",
        addresses=job.addresses,
        port_range=Config.from_env().port_range,
        start_timeout=start_timeout,
    )
    with listener, job.running(listener, python_path, executable):
        say.started(listener.gather(remedy=job.remedy, poll=job.check_executors, least=job.least))
        with _interrupts_for_ranks():
            return run_function(
                listener,
                *call,
                env=variables,
                output=Output(timestamps=timestamps, verbose=verbose > 1),
                times=Times(heartbeat_timeout=silence),
                stdout=stdout,
                stderr=stderr,
                nics=call_arguments.names(nics),
                np=job.least,
                elastic=elastic,
            )


@contextmanager
def _interrupts_for_ranks() -> Iterator[None]:
    """Have Ctrl-C reach the ranks first, so that they have time to end.

    pyspark's handler would cancel all jobs at once; here tasks end with their ranks. A handler of the caller's stays.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _is_of_pyspark(handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _is_of_pyspark(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("pyspark.")


def number_of_tasks(session: Session, num_proc: int | None, start_timeout: float | None = None) -> int:
    """Choose the number of tasks to start: ``num_proc``, or as many as Spark is set to run at once and has room for.

    ``spark.default.parallelism`` is often a number of partitions, several for each core.

    Args:
        start_timeout: seconds in which executors may still arrive; None for the setting.

    Raises:
        ConfigError: ``num_proc`` is not a number of processes.
    """
    if num_proc is not None:
        return checked_number(num_proc, "run")
    wanted = session.default_parallelism
    if session.grows:
        return wanted
    return min(wanted, _slots(session, wanted, time.monotonic() + _start_timeout(start_timeout)) or wanted)


def _slots(session: Session, needed: int, deadline: float) -> int:
    """Count the tasks that Spark can run at once, waiting until they suffice or no more executors are expected."""
    slots = session.slots()
    unsettled = time.monotonic()
    while slots < needed and time.monotonic() < deadline:
        if not session.settled():
            unsettled = time.monotonic()
        elif session.is_local or time.monotonic() - unsettled > _SETTLED_S:
            break
        time.sleep(0.1)
        slots = session.slots()
    return slots


class _Job:
    """The Spark job that brings agents.

    Args:
        size: number of tasks.
        barrier: start all tasks at once.
        least: the fewest tasks for a start, where tasks may join and leave; None where all are needed.
        is_given: True if the caller gave a number of processes.
    """

    def __init__(
        self, session: Session, size: int, *, barrier: bool, least: int | None = None, is_given: bool = True
    ) -> None:
        self._session = session
        self._context = session.context
        self.size = size
        self.least = least
        self._is_given = is_given
        self.addresses = [session.driver] if session.driver else []
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

    def check_room(self, deadline: float) -> int:
        """Refuse a job for which Spark has no room.

        Slots used by other tasks count, since they become free, and missing executors are waited for.

        Returns:
            the number of tasks that Spark can run at once; 0 under dynamic allocation, where it does not matter.

        Raises:
            ConfigError: the available executors cannot run that many tasks.
        """
        session, needed = self._session, self._needed
        if session.grows:
            return 0
        slots = _slots(session, needed, deadline)
        if slots < needed:
            tasks = "task" if slots == 1 else "tasks"
            asked = f"run(num_proc={needed})" if self._is_given else f"run() of {needed} processes"
            raise ConfigError(
                f"{asked}: Spark runs {slots} {tasks} at once; give num_proc={slots or 1} or fewer, "
                "or the application more executors or cores (spark.executor.instances, spark.executor.cores, "
                "spark.cores.max, local[N]; each task takes spark.task.cpus of them, and its GPUs)"
            )
        return slots

    @property
    def _needed(self) -> int:
        return self.size if self.least is None else self.least

    def check_slots(self, deadline: float, say: _Speaker) -> None:
        """Refuse a job for which Spark has no room, and wait a moment for slots that are in use.

        Raises:
            ConfigError: the available executors cannot run that many tasks.
        """
        session, needed = self._session, self._needed
        slots = self.check_room(deadline)
        if session.grows:
            return
        soon = time.monotonic() + _SOON_S
        while (free := slots - session.busy()) < needed:
            if time.monotonic() > soon:
                say.line(f"waiting for Spark's other tasks: {needed} slots are needed, and {free} of {slots} are free")
                return
            time.sleep(0.05)

    @property
    def remedy(self) -> str:
        """Advice for the case that tasks do not start."""
        return (
            f"{self._session.resources()}. Are other jobs using the cluster, and does it have enough cores (and GPUs)? "
            "A longer start_timeout, or HVDGLOO_SPARK_START_TIMEOUT, waits longer."
        )

    @contextmanager
    def running(self, listener: TaskListener, python_path: str, executable: str | None) -> Iterator[None]:
        """Run the tasks while the context lasts; afterwards nothing of the job is left."""
        from pyspark import InheritableThread

        self._lacking = self._context.accumulator([], lists())
        task = make_task(listener.invitation, python_path, executable, self._lacking, again=self.least is not None)

        def job() -> None:
            try:
                self._context.setJobGroup(self._group, f"hvdgloo.spark.run, {self.size} ranks", interruptOnCancel=True)
                tasks = self._context.range(0, self.size, numSlices=self.size)
                (tasks.barrier() if self._barrier else tasks).mapPartitionsWithIndex(task).collect()
            except Exception as error:  # noqa: BLE001 - any error of Spark or its JVM is the reason why tasks ended
                self._wrong_python = _failures.wrong_python(str(error))
                listener.fail(self._why(str(error)))
            else:
                if not _happens(over, _OVER_S):
                    listener.fail("all Spark tasks have ended")

        over = threading.Event()
        # An InheritableThread has the caller's scheduler pool and job tags.
        thread = InheritableThread(target=job, name="hvdgloo-spark-job", daemon=True)
        thread.start()
        clean = False
        try:
            yield
            clean = True
        finally:
            over.set()
            if clean and self.least is None:  # otherwise tasks may wait for slots that they will not get
                thread.join(_END_S)
            self._cancel(thread)

    def _why(self, text: str) -> str:
        """Return the reason why Spark's job failed, as a continuation of ``the job failed:``.

        Args:
            text: text of the exception that pyspark raised.
        """
        if self._wrong_python:
            return "; ".join(f"{label} cannot be used: {what}" for label, what in self._wrong_python.items())
        if self._session.is_stopped:
            return _failures.STOPPED
        again = _failures.refused_again(text)
        try:
            first = self._session.first_error(self._group, again) if again is not None else ""
        except Exception:  # noqa: BLE001 - py4j's errors: Spark has forgotten the job, or has just been stopped
            first = ""
        return _failures.explain(first or text)

    def _cancel(self, thread: threading.Thread) -> None:
        """Cancel the job, whose agents have been told to end, until it has ended.

        Cancelling once is not enough, since it has no effect on a job that has not been submitted yet.
        """
        deadline = time.monotonic() + _CANCELLED_S
        while thread.is_alive() and time.monotonic() < deadline:
            try:
                self._context.cancelJobGroup(self._group)
            except Exception:  # noqa: BLE001 - the session was stopped, and the job with it
                pass
            thread.join(_CANCEL_AGAIN_S)

    def check_executors(self) -> None:
        """Check whether executors lack something.

        Raises:
            UnusableHostsError: some do, and the others had time to report the same.
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


def _happens(event: threading.Event, seconds: float) -> bool:
    """Wait for an event and return whether it happened.

    Time during which another thread's long call holds the interpreter counts as one step.
    """
    return any(event.wait(_STEP_S) for _ in range(math.ceil(seconds / _STEP_S)))


class _Speaker:
    """Writer of hvdgloo's own lines."""

    def __init__(self, stream: TextIO | None, verbose: int) -> None:
        self._stream = stream
        self._verbose = verbose

    def line(self, text: str) -> None:
        if self._verbose > 0:
            stream = self._stream or sys.stderr
            stream.write(f"hvdgloo.spark: {text}\n")
            stream.flush()

    def started(self, arrivals: Sequence[TaskHello]) -> None:
        hosts = sorted({arrival.host for arrival in arrivals})
        shown = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        self.line(
            f"{len(arrivals)} {'task has' if len(arrivals) == 1 else 'tasks have'} started on {len(hosts)} "
            f"{'host' if len(hosts) == 1 else 'hosts'}: {shown}"
        )
        if self._verbose > 1:
            for arrival in arrivals:
                self.line(f"  task {arrival.index}: {arrival.label}, from {arrival.address}, process {arrival.pid}")


# Arguments.


def _start_timeout(value: float | None) -> float:
    if value is None:
        return Config.from_env().spark_start_timeout
    return _seconds("start_timeout", value)


def _seconds(name: str, value: float) -> float:
    if not (isinstance(value, SupportsFloat) and 0 < value < math.inf):
        raise ConfigError(f"run({name}={value!r}): it is not a number of seconds")
    return float(value)


def _variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables that the caller gives to workers, without the place of a job that this process is in."""
    if env is not None and not all(isinstance(each, str) for pair in env.items() for each in pair):
        raise ConfigError("run(env=...): names and values of variables must be strings")
    variables = without_place(env or {})
    if _stands_for_horovod():
        variables.setdefault("HVDGLOO_AS_HOROVOD", "1")
    return variables


def _stands_for_horovod() -> bool:
    """Return whether this program's ``import horovod`` is hvdgloo, so that the workers' has to be, too."""
    horovod = sys.modules.get("horovod")
    return Config.from_env().as_horovod or getattr(horovod, "stands_in_for", None) is not None
