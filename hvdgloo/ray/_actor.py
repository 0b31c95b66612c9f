"""The Ray actor that represents one worker: it brings the worker's agent and passes calls on to the worker.

The actor itself runs no user code and unpickles none of the user's objects: results are handed to Ray as bytes, which
become objects where they are read. So an actor needs little memory and imports no framework.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hvdgloo._platform.spelling import in_one_line
from hvdgloo.errors import JobFailedError, LaunchError
from hvdgloo.ray import _calls
from hvdgloo.ray._calls import Connection, Listener
from hvdgloo.ray._worker import RETURNED
from hvdgloo.runner.function_results import exception_of
from hvdgloo.runner.inbound.task import Invitation, bring_agent
from hvdgloo.runner.worker.function_task import TaskResult

_TOLD_WITHIN = 30.0
"""Seconds to wait for the driver's reason why a worker ended; it first gives the other workers time to end, too."""


@dataclass(frozen=True)
class ActorLocation:
    """Location of an actor.

    Attributes:
        node: Ray's id of the node.
        address: the node's IP address.
        hostname: name of the machine or the container.
        gpus: ids of the GPUs that Ray assigned to this actor.
    """

    node: str
    address: str
    hostname: str
    gpus: tuple[str, ...]

    @property
    def node_name(self) -> str:
        """The node's name, as short as in Ray's own tools."""
        return f"Ray node {self.node[:8]}"


class Result:
    """A worker's result in the object store. Unpickling it gives the object itself, whose arrays stay in the store."""

    def __init__(self, data: bytearray, buffers: list[bytearray]) -> None:
        self._data = data
        self._buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _loaded, (pickle.PickleBuffer(self._data), [pickle.PickleBuffer(buffer) for buffer in self._buffers])


def _loaded(data: Any, buffers: list[Any]) -> Any:
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - a result of the user's own function, brought by Ray


class CallFailed(Exception):  # noqa: N818 - it becomes the user's own exception where it is read
    """Failure of a call. Unpickling it, where the actor's exception is read, gives the user's exception."""

    def __init__(self, outcome: TaskResult, rank: int, host: str) -> None:
        super().__init__(f"rank {rank} on host {host}: {outcome.text}")
        self._outcome = outcome, rank, host

    def __reduce__(self) -> Any:
        return exception_of, self._outcome


def own_place() -> ActorLocation:
    """Return the location of this process, which is an actor."""
    import ray

    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return ActorLocation(context.get_node_id(), ray.util.get_node_ip_address(), in_one_line(socket.gethostname()), gpus)


def bring_agent_of(
    invitation: Invitation, index: int, place: ActorLocation | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Bring the agent of this process, which is an actor; see ``bring_agent``."""
    place = place or own_place()
    return bring_agent(
        invitation,
        index,
        name=place.node_name,
        host=place.address,
        machine=place.node,
        env={**(env or {}), **_ray_address()},
    )


class WorkerActor:
    """The class that ``ray.remote`` turns into an actor. All of its methods share one event loop.

    Ray starts the methods of such an actor in any order, but calls must be made in the same order on all ranks, so they
    are numbered.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "hvdgloo-ray-call")
        self._connection: Connection | None = None
        self._rank = -1
        self._host = ""
        self._changed = asyncio.Condition()
        self._turn = 0
        self._over = asyncio.Event()
        self._reason = ""

    async def place(self) -> ActorLocation:
        """Return this actor's location."""
        return own_place()

    async def bring(self, invitation: Invitation, index: int, place: ActorLocation, env: Mapping[str, str]) -> int:
        """Bring the agent, and wait until its worker has connected.

        Args:
            index: this actor's number among all actors.
            place: this actor's location.
            env: variables for the worker.

        Returns:
            the worker's rank.

        Raises:
            LaunchError: the driver could not be reached, refused the agent, or ended the job.
        """
        loop = asyncio.get_running_loop()
        listener = Listener()
        self._host = f"{place.address} ({place.node_name})"
        ended: asyncio.Future[int] = loop.create_future()

        def bring() -> None:
            try:
                status = bring_agent_of(invitation, index, place, {**env, _calls.VARIABLE: listener.name})
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                loop.call_soon_threadsafe(ended.set_exception, error)
            else:
                loop.call_soon_threadsafe(ended.set_result, status)

        # A thread of its own, since the agent ends when its parent thread does. The thread ends with the agent, which
        # this process does not outlive.
        threading.Thread(target=bring, name="hvdgloo-ray-agent", daemon=True).start()
        connected = loop.run_in_executor(self._pool, listener.accept)
        try:
            waiting: set[asyncio.Future[Any]] = {connected, ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.close()
        if not connected.done() or connected.exception() is not None:
            await ended
            raise LaunchError("the driver ended the job before this worker had started")
        self._connection = connected.result()
        hello = await loop.run_in_executor(self._pool, self._connection.receive)
        if hello is None:
            raise LaunchError(f"the worker on {self._host} ended while it started")
        self._rank = int(hello[0])
        return self._rank

    async def call(self, number: int, payload: bytes, needs_ray: bool) -> tuple[Any, None]:
        """Have the worker make a call.

        Args:
            number: position of this call among all calls to this actor, which are made in this order.
            payload: the pickled call; see ``_workers.pack``.
            needs_ray: True if the arguments contain references to Ray's objects.

        Returns:
            the result, and None, which tells that the call has ended without the result being fetched.

        Raises:
            CallFailed: the call raised an exception.
            JobFailedError: the worker has ended.
        """
        loop = asyncio.get_running_loop()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._turn == number or self._over.is_set())
                replied = loop.run_in_executor(self._pool, self._exchange, payload, needs_ray)
                self._turn = number + 1
                self._changed.notify_all()
            reply = await replied
        except asyncio.CancelledError:
            self._close()  # a call cannot be interrupted and resumed, so this worker has to end
            raise
        if reply is None:
            try:
                await asyncio.wait_for(self._over.wait(), _TOLD_WITHIN)
            except asyncio.TimeoutError:
                self._reason = f"the worker of rank {self._rank} on host {self._host} has ended"
            raise JobFailedError(self._reason, rank=self._rank, host=self._host)
        how, data, *buffers = reply
        if how != RETURNED:
            raise CallFailed(pickle.loads(data), self._rank, self._host)  # noqa: S301 - our own worker's
        return Result(data, buffers), None

    async def alive(self) -> None:
        """Return when the job has ended. A caller that awaits this is notified at once if the actor is lost."""
        await self._over.wait()

    async def over(self, reason: str) -> None:
        """Record that the job has ended; calls without a result fail with ``reason``."""
        self._reason = reason
        self._over.set()
        self._close()
        async with self._changed:
            self._changed.notify_all()

    def _exchange(self, payload: bytes, needs_ray: bool) -> list[bytearray] | None:
        """Send a call and return the reply; None if the worker has ended."""
        if self._connection is None:
            return None
        try:
            self._connection.send([b"ray" if needs_ray else b"", payload])
            return self._connection.receive()
        except OSError:
            return None

    def _close(self) -> None:
        """Close the connection, so that the worker ends as soon as it waits for another call."""
        if self._connection is not None:
            self._connection.close()


def _ray_address() -> dict[str, str]:
    """Return the variables with which the worker can join this actor's cluster."""
    import ray

    context = ray.get_runtime_context()
    return {"RAY_ADDRESS": context.gcs_address, "RAY_NAMESPACE": context.namespace or ""}
