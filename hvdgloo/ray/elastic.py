"""``ElasticRayExecutor``: a job whose workers join and leave with the nodes of a Ray cluster."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NoReturn, TypeVar

from hvdgloo.errors import ConfigError
from hvdgloo.ray import _settings
from hvdgloo.ray._actor import bring_agent_of
from hvdgloo.ray._cluster import check_ray
from hvdgloo.ray._settings import Settings
from hvdgloo.runner import call_arguments
from hvdgloo.runner.elastic.options import ElasticOptions
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener
from hvdgloo.runner.inbound.task import Invitation

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_INTERVAL = 1.0
"""Seconds between two checks of the cluster."""

_PAUSES = (1.0, 30.0)
"""Shortest and longest delay in seconds before an actor that ended is replaced. The delay doubles each time, until an
actor has lived for the longest delay."""

_PENDING = 10.0
"""Seconds that Ray has to start an actor before it is moved to another node with room."""

_LOOK_END = 5.0
"""Seconds to wait for a check of the cluster when the job is over: a user's discovery may take any time."""


def refuse_elastic() -> NoReturn:
    """Refuse an elastic job, and name the executor for it.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "RayExecutor() has a fixed number of workers: leave out min_workers=, max_workers=, reset_limit= and "
        "elastic_timeout=, or use ElasticRayExecutor"
    )


class RayHostDiscovery:
    """Discovery of the nodes of the cluster that this program has joined, and of their slots.

    Args:
        use_gpu: give workers GPUs.
        cpus_per_slot, gpus_per_slot: resources of each worker.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = _settings.whole("cpus_per_slot", cpus_per_slot)
        self.gpus_per_slot = _settings.whole("gpus_per_slot", gpus_per_slot)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each living node by its address, as if the node were otherwise unused."""
        import ray

        found: Counter[str] = Counter()
        for node in ray.nodes():
            if node["Alive"]:
                found[node["NodeManagerAddress"]] += self.slots(node["Resources"])
        return {address: slots for address, slots in found.items() if slots}

    def slots(self, resources: Mapping[str, float]) -> int:
        """Return the number of workers for which a node with these resources has room."""
        slots = resources.get("CPU", 0) // self.cpus_per_slot
        if self.use_gpu:
            slots = min(slots, resources.get("GPU", 0) // self.gpus_per_slot)
        return int(slots)


@dataclass
class ElasticSettings(Settings):
    """Settings of an ``ElasticRayExecutor``; see its ``create_settings``.

    Attributes:
        min_num_proc, max_num_proc: the fewest and the most workers; None for no limit.
        reset_limit: how often the workers may form a new epoch.
        elastic_timeout: seconds to wait for enough workers.
        discovery: an object with ``find_available_hosts_and_slots()``, which returns addresses of nodes and slots.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    discovery: Any = None


class ElasticRayExecutor:
    """Executor of a function on workers that join and leave with the nodes of a Ray cluster.

    Args:
        settings: from ``create_settings``.
        use_gpu, cpus_per_slot, gpus_per_slot: resources that Ray reserves for each worker.
        env_vars: variables for the workers.
        override_discovery: let a ``RayHostDiscovery`` list the nodes, and ignore ``settings.discovery``.

    Raises:
        ConfigError: (a ValueError) an argument cannot be used; Ray is not initialized.
        MissingDependencyError: (an ImportError) Ray is not installed.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600.0,
        timeout_s: float | None = None,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **others: Any,
    ) -> ElasticSettings:
        """Create settings for an ``ElasticRayExecutor``.

        Args:
            min_num_proc, max_num_proc: the fewest and the most workers; by default 1, and no limit.
            reset_limit: how often the workers may form a new epoch.
            elastic_timeout: seconds to wait for enough workers once some were lost; at the start it is ``timeout_s``.
            min_np, max_np: old names of ``min_num_proc`` and ``max_num_proc``; they give a warning.
            timeout_s, ssh_identity_file, nics, others: as for ``RayExecutor.create_settings``.

        Raises:
            ConfigError: a value cannot be used.
        """
        base = _settings.create_settings(timeout_s, ssh_identity_file, nics=nics, **others)
        rename = partial(call_arguments.renamed, "create_settings")
        least = _settings.whole("min_num_proc", rename("min_num_proc", min_num_proc, "min_np", min_np, default=1))
        given = rename("max_num_proc", max_num_proc, "max_np", max_np)
        most = None if given is None else _settings.whole("max_num_proc", given, least)
        return ElasticSettings(
            **vars(base),
            min_num_proc=least,
            max_num_proc=most,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if not isinstance(settings, ElasticSettings):
            raise ConfigError(
                f"ElasticRayExecutor(settings={settings!r}): give the result of ElasticRayExecutor.create_settings()"
            )
        settings.check()
        gpus = _settings.gpus_of(use_gpu, gpus_per_slot, "gpus_per_slot")
        self._room = RayHostDiscovery(use_gpu, cpus_per_slot, gpus or 1)
        self._discovery = self._room if override_discovery or settings.discovery is None else settings.discovery
        if not callable(getattr(self._discovery, "find_available_hosts_and_slots", None)):
            raise ConfigError(f"settings.discovery={self._discovery!r} has no method find_available_hosts_and_slots()")
        self._settings = settings
        self._env = _settings.variables(env_vars, "ElasticRayExecutor(env_vars=...)")
        check_ray()

    def start(self) -> None:
        """Do nothing: ``run`` starts the workers. Programs written for Horovod call this."""

    def run(self, worker_fn: Callable[[], T], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[T]:
        """Call ``worker_fn()``, which trains in ``hvd.elastic.run``, on workers on all available nodes.

        Args:
            callbacks: refused, unless empty: the launcher reports which workers join and leave.

        Returns:
            the results of the workers present at the end, in the order of their ranks.

        Raises:
            LaunchError: there were not enough workers in time.
            JobFailedError: the job could not survive a failure.
            Exception: the exception that ``worker_fn`` raised, as for ``hvdgloo.run.run``.
        """
        import ray

        if callbacks:
            raise ConfigError("run(callbacks=...) is not supported: the workers' output appears here")
        settings = self._settings
        with (
            TaskListener(
                None,
                what="Ray actors",
                addresses=[ray.util.get_node_ip_address()],
                start_timeout=max(settings.start_timeout, settings.elastic_timeout),
            ) as listener,
            _Actors(listener.invitation, self._discovery, self._room, settings.max_num_proc),
        ):
            listener.gather(least=settings.min_num_proc, remedy="`ray status` shows the cluster's resources")
            return run_function(
                listener,
                worker_fn,
                env=self._env,
                output=settings.output,
                times=settings.times,
                nics=tuple(settings.nics),
                elastic=ElasticOptions(
                    min_np=settings.min_num_proc,
                    max_np=settings.max_num_proc,
                    reset_limit=settings.reset_limit,
                    elastic_timeout=settings.elastic_timeout,
                ),
            )


@dataclass
class _Kept:
    """An actor.

    Attributes:
        handle: Ray's handle.
        asked_at: time on the monotonic clock at which Ray was asked for it.
        up_at: time at which it started; None if Ray has not started it yet.
    """

    handle: Any
    asked_at: float
    up_at: float | None = None


@dataclass
class _Node:
    """State of one node.

    Attributes:
        actors: actors that live, or that Ray has been asked for, by their numbers.
        pause: delay in seconds before an actor that ends is replaced.
        again_at: time on the monotonic clock from which the next actor may be started.
    """

    actors: dict[int, _Kept] = field(default_factory=dict)
    pause: float = _PAUSES[0]
    again_at: float = 0.0

    def put_off(self) -> None:
        """Delay the next actor, after one was lost or could not be started."""
        self.again_at = monotonic() + self.pause
        self.pause = min(2 * self.pause, _PAUSES[1])


class _Actors:
    """As many actors on each node as the discovery lists slots, for as long as the context lasts."""

    def __init__(self, invitation: Invitation, discovery: Any, room: RayHostDiscovery, most: int | None) -> None:
        self._invitation = invitation
        self._discovery = discovery
        self._room = room
        self._most = most
        self._nodes: dict[str, _Node] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdgloo-ray-actors", daemon=True)

    def __enter__(self) -> _Actors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        self._over.set()
        try:
            self._thread.join(_LOOK_END)
        finally:
            with self._lock:  # actors that end meanwhile are removed, on a thread of Ray's
                handles = [kept.handle for node in self._nodes.values() for kept in node.actors.values()]
            if ray.is_initialized():
                for handle in handles:
                    ray.kill(handle)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._adjust()
            except Exception:  # a node is just leaving, or the user's discovery failed: the next check may succeed
                logger.warning("the nodes of Ray's cluster could not be listed; trying again", exc_info=True)
            self._over.wait(_INTERVAL)

    def _adjust(self) -> None:
        import ray

        wanted = dict(self._discovery.find_available_hosts_and_slots())
        if self._over.is_set():
            return  # the job ended during a slow discovery
        for listed in ray.nodes():
            address, node_id = listed["NodeManagerAddress"], listed["NodeID"]
            slots = min(wanted.get(address, 0), self._room.slots(listed["Resources"])) if listed["Alive"] else 0
            wanted[address] = wanted.get(address, 0) - slots
            with self._lock:
                node = self._nodes.setdefault(node_id, _Node())
                surplus = list(node.actors.items())[slots:]
                for number, _ in surplus:
                    del node.actors[number]
            for _, kept in surplus:
                ray.kill(kept.handle)
            while len(node.actors) < slots and monotonic() >= node.again_at and self._has_room_beside(node):
                self._start(node_id, node)

    def _has_room_beside(self, node: _Node) -> bool:
        """Return whether ``node`` may have one more actor.

        At the limit it may if another actor still waits for a busy node; that one is then removed.
        """
        import ray

        if self._most is None or sum(len(each.actors) for each in self._nodes.values()) < self._most:
            return True
        late = monotonic() - _PENDING
        with self._lock:
            found = next(
                (
                    (other, number)
                    for other in self._nodes.values()
                    for number, kept in other.actors.items()
                    if other is not node and kept.up_at is None and kept.asked_at <= late
                ),
                None,
            )
            if found is None:
                return False
            other, number = found
            kept = other.actors.pop(number)
            other.put_off()
        ray.kill(kept.handle)
        return True

    def _start(self, node_id: str, node: _Node) -> None:
        import ray

        room = self._room
        number = next(self._numbers)
        actor = (
            ray.remote(AgentActor)
            .options(
                num_cpus=room.cpus_per_slot,
                num_gpus=room.gpus_per_slot if room.use_gpu else 0,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote()
        )
        kept = _Kept(actor, monotonic())
        with self._lock:
            over = self._over.is_set()
            if not over:
                node.actors[number] = kept
        if over:
            ray.kill(actor)
            return
        actor.there.remote().future().add_done_callback(lambda future: self._is_up(kept, future))
        ended = actor.bring.remote(self._invitation, number)
        ended.future().add_done_callback(lambda future: self._ended(node, number, future))

    def _is_up(self, kept: _Kept, future: Future[Any]) -> None:
        if future.exception() is None:
            with self._lock:
                kept.up_at = monotonic()

    def _ended(self, node: _Node, number: int, future: Future[Any]) -> None:
        with self._lock:
            kept = node.actors.pop(number, None)
            if kept is None:
                return
            if kept.up_at is not None and monotonic() - kept.up_at >= _PAUSES[1]:
                node.pause = _PAUSES[0]
            node.put_off()
        logger.info("an actor ended: %s", future.exception() or "its agent was no longer needed")


class AgentActor:
    """The class that ``ray.remote`` turns into an actor, bringing one worker's agent. Its methods do not overlap."""

    def there(self) -> None:
        """Return once Ray has started the actor."""

    def bring(self, invitation: Invitation, index: int) -> int:
        """Bring the agent, and return when it has ended."""
        return bring_agent_of(invitation, index)
