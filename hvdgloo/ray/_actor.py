"""The Ray actor that stands for one worker: it brings the worker's agent, and passes calls on to the worker.

No code of the user's runs in the actor itself, and nothing of the user's is unpickled there: results are handed to Ray
as bytes that become what they are where they are read. So an actor needs little memory, and imports no framework.
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
from hvdgloo.runner.conclusion import exception_of
from hvdgloo.runner.inbound.task import Invitation, bring_agent
from hvdgloo.runner.worker.function_task import TaskResult

_TOLD_WITHIN = 30.0
"""Seconds within which the driver says why a worker has ended: it gives the other workers time to end, too."""


@dataclass(frozen=True)
class Place:
    """Where an actor is.

    Attributes:
        node: Ray's id of the node.
        address: of the node.
        hostname: of the machine, or the container.
        gpus: ids of the GPUs that Ray gave to this actor.
    """

    node: str
    address: str
    hostname: str
    gpus: tuple[str, ...]

    @property
    def node_name(self) -> str:
        """As short as Ray's own tools show it."""
        return f"Ray node {self.node[:8]}"


class Result:
    """A worker's result in the object store. Who reads it gets the object itself; its arrays stay in the store."""

    def __init__(self, data: bytearray, buffers: list[bytearray]) -> None:
        self._data = data
        self._buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _loaded, (pickle.PickleBuffer(self._data), [pickle.PickleBuffer(buffer) for buffer in self._buffers])


def _loaded(data: Any, buffers: list[Any]) -> Any:
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - a result of the user's own function, brought by Ray


class CallFailed(Exception):  # noqa: N818 - it becomes the user's own exception where it is read
    """How a call ended that did not return: the user's exception, for those who read the actor's."""

    def __init__(self, outcome: TaskResult, rank: int, host: str) -> None:
        super().__init__(f"rank {rank} on host {host}: {outcome.text}")
        self._outcome = outcome, rank, host

    def __reduce__(self) -> Any:
        return exception_of, self._outcome


def own_place() -> Place:
    """Where the actor is that this process is."""
    import ray

    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Place(context.get_node_id(), ray.util.get_node_ip_address(), in_one_line(socket.gethostname()), gpus)


def bring_agent_of(
    invitation: Invitation, index: int, place: Place | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Bring the agent of the actor that this process is; see ``bring_agent``."""
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
    """What ``ray.remote`` makes an actor of. All of its methods share one event loop.

    Ray begins the methods of such an actor in any order, and calls must have the same one on all ranks: so they are
    numbered.
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

    async def place(self) -> Place:
        """Where this actor is."""
        return own_place()

    async def bring(self, invitation: Invitation, index: int, place: Place, env: Mapping[str, str]) -> int:
        """Bring the agent, and wait until its worker has connected.

        Args:
            index: of this actor among all.
            place: of this actor.
            env: variables for the worker.

        Returns:
            the worker's rank.

        Raises:
            LaunchError: the driver cannot be reached, or has refused the agent, or ended the job.
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

        # A thread of its own, as the agent ends with it. It ends with the agent, which this process does not outlive.
        threading.Thread(target=bring, name="hvdgloo-ray-agent", daemon=True).start()
        connected = loop.run_in_executor(self._pool, listener.accept)
        try:
            waiting: set[asyncio.Future[Any]] = {connected, ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.close()
        if not connected.done() or connected.exception() is not None:
            await ended
            raise LaunchError("the driver has ended the job before this worker was there")
        self._connection = connected.result()
        hello = await loop.run_in_executor(self._pool, self._connection.receive)
        if hello is None:
            raise LaunchError(f"the worker on {self._host} ended while it started")
        self._rank = int(hello[0])
        return self._rank

    async def call(self, number: int, payload: bytes, needs_ray: bool) -> tuple[Any, None]:
        """Have the worker make a call.

        Args:
            number: of this call among all that this actor gets; they are made in this order.
            payload: the pickled call; see ``_workers.pack``.
            needs_ray: its arguments have references to Ray's objects.

        Returns:
            the result, and None: whoever reads only this one learns how the call ended without fetching the result.

        Raises:
            CallFailed: it raised an exception.
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
            self._close()  # whatever the other ranks do: this one cannot be stopped in the middle, and go on later
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
        """Wait for the end: whoever awaits this learns at once that the actor was lost."""
        await self._over.wait()

    async def over(self, reason: str) -> None:
        """Take note that the job has ended; ``reason`` is what calls that have no result yet are told."""
        self._reason = reason
        self._over.set()
        self._close()
        async with self._changed:
            self._changed.notify_all()

    def _exchange(self, payload: bytes, needs_ray: bool) -> list[bytearray] | None:
        """Send a call, and wait for the reply; None if the worker has ended."""
        if self._connection is None:
            return None
        try:
            self._connection.send([b"ray" if needs_ray else b"", payload])
            return self._connection.receive()
        except OSError:
            return None

    def _close(self) -> None:
        """The worker has no more calls to make; it ends as soon as it waits for one."""
        if self._connection is not None:
            self._connection.close()


def _ray_address() -> dict[str, str]:
    """How the worker would join the cluster that this actor is in."""
    import ray

    context = ray.get_runtime_context()
    return {"RAY_ADDRESS": context.gcs_address, "RAY_NAMESPACE": context.namespace or ""}
