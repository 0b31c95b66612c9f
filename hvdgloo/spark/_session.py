"""The active Spark session, and the number of tasks for which it has room."""

from __future__ import annotations

import re
import time
from typing import Any, SupportsIndex

from hvdgloo.errors import ConfigError, LaunchError, MissingDependencyError

_NO_SESSION = "Could not find an active SparkContext, are you running in a PySpark session?"
_CONNECT = (
    "this is a session of Spark Connect, which has no SparkContext, and hvdgloo.spark needs one: run the program where "
    "Spark's driver is (spark-submit, a notebook on the cluster), with SparkSession.builder.master(...) instead of "
    "remote(...)"
)

_ALL = 2**31 - 1
"""A number of tasks larger than any stage's."""


class Session:
    """A SparkContext, with the facts about it that a job of ours needs."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self._scala = context._jsc.sc()

    @property
    def default_parallelism(self) -> int:
        """Number of tasks that Spark runs at once, as far as it knows."""
        return int(self.context.defaultParallelism)

    def setting(self, name: str, default: str = "") -> str:
        return str(self.context.getConf().get(name, default))

    def is_set(self, name: str) -> bool:
        return self.setting(name).strip().lower() == "true"

    @property
    def driver(self) -> str:
        """Address at which executors reach the driver."""
        return self.setting("spark.driver.host")

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.context)

    @property
    def is_local(self) -> bool:
        """True if tasks run in the driver's own JVM."""
        return bool(self._scala.isLocal())

    @property
    def grows(self) -> bool:
        """True if Spark requests executors when there is work for them (dynamic allocation)."""
        return self.is_set("spark.dynamicAllocation.enabled")

    def slots(self) -> int:
        """Return the number of tasks that the present executors can run at once."""
        profile = self._scala.resourceProfileManager().defaultResourceProfile()
        return int(self._scala.maxNumConcurrentTasks(profile))

    def busy(self) -> int:
        """Return the number of running tasks, from the scheduler, since Spark's public figures are outdated."""
        running = self._scala.taskScheduler().runningTasksByExecutors().values().iterator()
        count = 0
        while running.hasNext():
            count += int(running.next())
        return count

    def settled(self) -> bool:
        """Return whether the requested executors are present, or had time to start.

        A lost executor is replaced, so it restarts that time.
        """
        if self.is_local or self._all_are_here():
            return True
        patience = self._scala.conf().getTimeAsSeconds("spark.scheduler.maxRegisteredResourcesWaitingTime", "30s")
        return time.time() - max(int(self.context.startTime), self._last_loss()) / 1000 > float(patience)

    def _all_are_here(self) -> bool:
        """Return whether a number of executors was requested, and that many are present."""
        told = re.match(r"local-cluster\[\s*(\d+)", self.setting("spark.master"))
        wanted = told[1] if told else self.setting("spark.executor.instances")
        return wanted.isdigit() and self._executors() >= int(wanted)

    def _last_loss(self) -> int:
        """Return the Unix time, in milliseconds, at which an executor was last lost; 0 if none was."""
        known = self._scala.statusStore().executorList(False)
        removed = [known.apply(index).removeTime() for index in range(known.size())]
        return max((int(each.get().getTime()) for each in removed if each.isDefined()), default=0)

    def first_error(self, group: str, index: int) -> str:
        """Return Spark's error message for a task's first attempt; empty if it has none.

        Args:
            group: the job's group.
            index: the task's index in its stage.
        """
        store = self._scala.statusStore()
        for job in self._scala.statusTracker().getJobIdsForGroup(group):
            stages = store.job(job).stageIds()
            for stage in (stages.apply(place) for place in range(stages.size())):
                attempts = store.taskList(stage, 0, _ALL)
                for attempt in (attempts.apply(place) for place in range(attempts.size())):
                    if (attempt.index(), attempt.attempt()) == (index, 0) and attempt.errorMessage().isDefined():
                        return str(attempt.errorMessage().get())
        return ""

    def _executors(self) -> int:
        return len(self._scala.statusTracker().getExecutorInfos()) - 1  # one of them is the driver

    def resources(self) -> str:
        """Describe the current executors and slots, for a message."""
        if self.grows and not self._executors():
            return "Spark has no executors yet"
        executors = "the driver itself" if self.is_local else f"{self._executors()} executors"
        return f"Spark has {self.slots()} task slots ({executors}), {self.busy()} in use"


def is_stopped(context: Any) -> bool:
    """Return whether a SparkContext has ended. One that was stopped by the JVM may still be the active one here."""
    try:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    except Exception:  # noqa: BLE001 - py4j's errors: the JVM is gone, and the context with it
        return True


def active(spark: Any = None) -> Session:
    """Return the given session, or the active one.

    Args:
        spark: a SparkSession, or a SparkContext.

    Raises:
        ConfigError: ``spark`` is neither, or a session of Spark Connect.
        LaunchError: there is no active session, or it has ended.
        MissingDependencyError: pyspark is not installed.
    """
    try:
        from pyspark import SparkContext
    except ModuleNotFoundError as error:
        if error.name != "pyspark":
            raise
        raise MissingDependencyError("hvdgloo.spark needs pyspark: pip install 'hvdgloo[spark]'") from None
    if spark is None:
        context = getattr(SparkContext, "_active_spark_context", None)
        if context is None and _connected():
            raise ConfigError(_CONNECT)
    else:
        if type(spark).__module__.startswith("pyspark.sql.connect"):
            raise ConfigError(_CONNECT)
        context = spark if isinstance(spark, SparkContext) else getattr(spark, "sparkContext", None)
        if not isinstance(context, SparkContext):
            raise ConfigError(f"spark={spark!r}: give a SparkSession")
    if context is None or is_stopped(context):
        raise LaunchError(_NO_SESSION)
    return Session(context)


def _connected() -> bool:
    """Return whether the active session is one of Spark Connect."""
    import sys

    connect = sys.modules.get("pyspark.sql.connect.session")  # not imported means that there is no such session
    return connect is not None and connect.SparkSession.getActiveSession() is not None


def checked_number(number: int, call: str, name: str = "num_proc") -> int:
    """Return a number of processes after checking it; ``call`` and ``name`` are its function and argument.

    Raises:
        ConfigError: it is not a number of processes.
    """
    if isinstance(number, bool) or not isinstance(number, SupportsIndex) or int(number) < 1:
        raise ConfigError(f"{call}({name}={number!r}): give a whole number of processes, at least 1")
    return int(number)
