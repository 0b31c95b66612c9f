"""What Spark says about itself: the active session, and how many tasks it has room for."""

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
"""More tasks than a stage has."""


class Session:
    """A SparkContext, and what a job of ours has to know about it."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self._scala = context._jsc.sc()

    @property
    def default_parallelism(self) -> int:
        """How many tasks Spark runs at once, as far as it knows."""
        return int(self.context.defaultParallelism)

    def setting(self, name: str, default: str = "") -> str:
        return str(self.context.getConf().get(name, default))

    def is_set(self, name: str) -> bool:
        return self.setting(name).strip().lower() == "true"

    @property
    def driver(self) -> str:
        """The address under which executors reach the driver."""
        return self.setting("spark.driver.host")

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.context)

    @property
    def is_local(self) -> bool:
        """Whether tasks run in the driver's own JVM."""
        return bool(self._scala.isLocal())

    @property
    def grows(self) -> bool:
        """Whether Spark asks for executors when there is work for them."""
        return self.is_set("spark.dynamicAllocation.enabled")

    def slots(self) -> int:
        """How many tasks the executors that are there run at once."""
        profile = self._scala.resourceProfileManager().defaultResourceProfile()
        return int(self._scala.maxNumConcurrentTasks(profile))

    def busy(self) -> int:
        """How many tasks are running: what the scheduler knows, since Spark's public figures are old ones."""
        running = self._scala.taskScheduler().runningTasksByExecutors().values().iterator()
        count = 0
        while running.hasNext():
            count += int(running.next())
        return count

    def settled(self) -> bool:
        """Whether the executors that were asked for have come, or have had the time for it.

        One that is lost is replaced.
        """
        if self.is_local or self._all_are_here():
            return True
        patience = self._scala.conf().getTimeAsSeconds("spark.scheduler.maxRegisteredResourcesWaitingTime", "30s")
        return time.time() - max(int(self.context.startTime), self._last_loss()) / 1000 > float(patience)

    def _all_are_here(self) -> bool:
        """Whether a number of executors was asked for, and is there."""
        told = re.match(r"local-cluster\[\s*(\d+)", self.setting("spark.master"))
        wanted = told[1] if told else self.setting("spark.executor.instances")
        return wanted.isdigit() and self._executors() >= int(wanted)

    def _last_loss(self) -> int:
        """When an executor was lost last, in milliseconds of the Unix time; 0 if none was."""
        known = self._scala.statusStore().executorList(False)
        removed = [known.apply(index).removeTime() for index in range(known.size())]
        return max((int(each.get().getTime()) for each in removed if each.isDefined()), default=0)

    def first_error(self, group: str, index: int) -> str:
        """What Spark knows about the failure of a task's first attempt; empty if it knows nothing.

        Args:
            group: of the job.
            index: of the task in a stage of its.
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
        """What there is just now, for a message."""
        if self.grows and not self._executors():
            return "Spark has no executors yet"
        executors = "the driver itself" if self.is_local else f"{self._executors()} executors"
        return f"Spark has {self.slots()} task slots ({executors}), {self.busy()} in use"


def is_stopped(context: Any) -> bool:
    """Whether a SparkContext has ended. One that was stopped from the JVM's side may still be the active one here."""
    try:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    except Exception:  # noqa: BLE001 - py4j's errors: the JVM is gone, and the context with it
        return True


def active(spark: Any = None) -> Session:
    """The session that is active, or the one that is given.

    Args:
        spark: a SparkSession, or a SparkContext.

    Raises:
        ConfigError: it is a session of Spark Connect, or nothing of the kind.
        LaunchError: there is none.
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
    """Whether the active session is one of Spark Connect."""
    import sys

    connect = sys.modules.get("pyspark.sql.connect.session")  # if nobody has imported it, there is no such session
    return connect is not None and connect.SparkSession.getActiveSession() is not None


def checked_number(number: int, call: str, name: str = "num_proc") -> int:
    """A number of processes that was given to ``call`` as its argument ``name``.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(number, bool) or not isinstance(number, SupportsIndex) or int(number) < 1:
        raise ConfigError(f"{call}({name}={number!r}): give a whole number of processes, at least 1")
    return int(number)
