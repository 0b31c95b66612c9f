"""The cost of a step's agreement for the nodes of a tree: processor time of one real control thread at a time.

    python benchmarks/tree.py [--hosts 128] [--slots 8] [--fanin 16] [--rounds 5]

The node under test has real connections (Unix sockets to the ranks of its host, TCP to other leaders), at whose other
ends one process says what the others would say. All of them say it at once; in the last case, other leaders send what
came while they waited for an answer together, as they do (``tree_operations.BATCH_SECONDS``). Neither the tensors nor
what the node's own rank does with the order are part of it. The least of a few rounds, in milliseconds, and the range.
With ``--fanin 0``, what rank 0 takes without a tree.

    python benchmarks/tree.py --processes 256 [--hosts 16] [--fanin 4] [--seconds 20]

lets a process for each rank agree with all others, as if they were on so many hosts: small allreduces, which travel
with the agreement, all checked, some that ranks disagree about, and a join at the end. Ranks find each other by way of
a real rendezvous service. Prints how many operations there were, and what they took.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.local import LocalGroup
from hvdgloo._engine.connection import ControlConnection
from hvdgloo._engine.control import Control
from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.engine import Engine
from hvdgloo._engine.messages import Execute, Gathered, Message, Part, Request, Response, Submit, frame
from hvdgloo._engine.readiness import masks_of
from hvdgloo._engine.run_lengths import runs_of_mask, runs_of_masks
from hvdgloo._engine.tree import PATIENCE_SECONDS, Aggregator
from hvdgloo._engine.tree_position import TreePosition, position_of
from hvdgloo._job.control_plane import ControlPlane, World, tree_position_of
from hvdgloo._job.settings import engine_settings
from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.handshake import Link, listen
from hvdgloo.config import Config
from hvdgloo.errors import MismatchError
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from hvdgloo.topology import Host, Topology, Worker
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec

_TIMEOUT = 600.0
_PATIENCE = 60.0
_SECRET = bytes(range(32))
_KEYS = bytes(range(32)), bytes(range(32, 64))
_STEPS_IN_A_ROW = 5
CASES = ((5, 5), (161, 8), (161, 161))
"""Numbers of a step's tensors, and of messages in which each rank names them."""


def requests(tensors: int) -> tuple[Request, ...]:
    spec = TensorSpec(DType.FLOAT32, (1000, 1000))
    return tuple(Request(f"allreduce.{i}", Collective.ALLREDUCE, (spec,)) for i in range(tensors))


def chunks(tensors: int, messages: int) -> list[range]:
    length = -(-tensors // messages)
    return [range(at, min(tensors, at + length)) for at in range(0, tensors, length)]


def tcp_pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


class Idle:
    """Stands in for a rank's Member and Executor: it has nothing to submit itself, and what is ordered is done."""

    backlog = 0
    has_pending = False

    def set_callbacks(self, **_: object) -> None: ...
    def abort(self, error: Exception) -> None: ...
    def execute(self, *_: object, **__: object) -> None: ...
    def execute_queued(self) -> None: ...
    def drain(self, *, idle: bool) -> None: ...
    def take_offer(self) -> None: ...
    def accept(self, message: Execute, now: float) -> list[object]:
        return []


class Others:
    """All with whom the node is connected, in a process of their own."""

    def __init__(self, place: TreePosition, socks: dict[int, socket.socket], orders: Connection) -> None:
        self._place = place
        self._orders = orders
        links = {rank: Link(sock, FrameMac(_KEYS[1]), FrameMac(_KEYS[0])) for rank, sock in socks.items()}
        self._connections = {rank: ControlConnection(link) for rank, link in links.items()}
        self._next_number = 0

    def run(self) -> None:
        tensors, messages = 0, 0
        while True:
            told = self._orders.recv()
            if told is None:
                return
            tensors, messages = told
            self._step(tensors, messages)
            self._orders.send("done")

    def _step(self, tensors: int, messages: int) -> None:
        """Until the node has passed on, or given, the order to execute everything."""
        parts = chunks(tensors, messages)
        waiting: dict[int, Iterator[Message]] = {}
        for rank, connection in self._connections.items():
            if rank == self._place.parent:
                continue
            if rank in self._place.leaders and messages == tensors > 100:
                waiting[rank] = iter([self._said(rank, range(1, tensors))])
                connection.send_frame(frame(self._said(rank, range(1))))
                continue
            for part in parts:
                connection.send_frame(frame(self._said(rank, part)))
        left = {rank: tensors for rank in self._connections if rank != self._place.parent}
        until = time.monotonic() + 60
        while any(left.values()):
            assert time.monotonic() < until, left
            for rank, connection in self._connections.items():
                connection.flush()
                for message in connection.receive():
                    if rank == self._place.parent:
                        self._answer(connection, message)
                    elif isinstance(message, Execute):
                        left[rank] -= len(message.items)
                        for more in waiting.pop(rank, ()):
                            connection.send_frame(frame(more))

    def _said(self, rank: int, part: range) -> Message:
        if not self._next_number:
            asked = requests(part.stop)[part.start :]
            if rank not in self._place.leaders:
                return Submit((), asked)
            ranks = runs_of_mask(self._place.below[rank])
            return Gathered((), tuple(Part(ranks, request) for request in asked))
        if rank not in self._place.leaders:
            return Submit(tuple(part))
        return Gathered(runs_of_masks(masks_of(tuple(part))))

    def _answer(self, connection: ControlConnection, message: Message) -> None:
        """Return the root's answer when all others are ready, too."""
        assert isinstance(message, Gathered)
        items: list[int | Response] = []
        for part in message.parts:
            assert isinstance(part.what, Request)
            items.append(Response(part.what, signature=int(part.what.name.partition(".")[2])))
        for start, length in zip(message.whole[::2], message.whole[1::2], strict=True):
            items += range(start, start + length)
        connection.send_frame(frame(Execute(tuple(items))))

    def know_numbers(self) -> None:
        self._next_number = 1


class Node:
    """One rank's control thread."""

    def __init__(self, rank: int, slots: Sequence[int], fanin: int) -> None:
        size = sum(slots)
        place = position_of(rank, slots, fanin) if fanin else None
        self.place = place or TreePosition(rank, -1, {r: 1 << r for r in range(size)}, frozenset(), 0, 0)
        everyone = {0: tuple(range(size))}
        ends: dict[int, tuple[socket.socket, socket.socket]] = {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for peer in (*self.place.children, *([self.place.parent] if self.place.parent >= 0 else [])):
                ends[peer] = socket.socketpair() if place and peer in place.members else tcp_pair(listener)
        context = multiprocessing.get_context("fork")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=self._play, args=({p: b for p, (_, b) in ends.items()}, theirs))
        self._process.start()
        links = {peer: Link(one, FrameMac(_KEYS[0]), FrameMac(_KEYS[1])) for peer, (one, _) in ends.items()}
        rules = CoordinatorSettings(_TIMEOUT, 1024, 0.0, True, _TIMEOUT, 0.0)
        idle = cast(Any, Idle())
        self._control = Control(
            rank,
            links,
            idle,
            idle,
            Coordinator(size, everyone, rules, str, place) if rank == 0 else None,
            parent=self.place.parent,
            aggregator=Aggregator(place, everyone, PATIENCE_SECONDS, _TIMEOUT) if place else None,
            operation_timeout=_TIMEOUT,
            spin_time=0.0,
            describe=str,
            on_end=lambda error: None,
        )
        self._control.start()
        assert self._control._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._control._thread.ident)
        self._said = False

    def _play(self, socks: dict[int, socket.socket], orders: Connection) -> None:
        others = Others(self.place, socks, orders)
        tensors, messages = orders.recv()
        others._step(tensors, messages)
        others.know_numbers()
        orders.send("done")
        others.run()

    def step(self, tensors: int, messages: int) -> None:
        self._orders.send((tensors, messages))
        for part in chunks(tensors, messages):
            self._control.say(Submit(tuple(part)) if self._said else Submit((), requests(part.stop)[part.start :]))
        assert self._orders.poll(90), "the step does not end"
        self._orders.recv()
        self._said = True

    def measured(self, tensors: int, messages: int, rounds: int) -> list[float]:
        """Seconds of the control thread for a step, in each of a few rounds."""
        self.step(tensors, 1)
        self.step(tensors, messages)
        used = []
        for _ in range(rounds):
            begun = time.clock_gettime(self._clock)
            for _ in range(_STEPS_IN_A_ROW):
                self.step(tensors, messages)
            used.append((time.clock_gettime(self._clock) - begun) / _STEPS_IN_A_ROW)
        return used

    def close(self) -> None:
        self._orders.send(None)
        self._process.join(10)


class WrongError(Exception):
    """A result is not what it should be."""


def be_rank(rank: int, slots: Sequence[int], fanin: int, endpoint: str, seconds: float) -> int:
    """One process's part in a job; how many operations it has taken part in."""
    size = sum(slots)
    places = [(host, local) for host, count in enumerate(slots) for local in range(count)]
    topology = Topology(
        0,
        tuple(Host(f"h{host}", f"identity {host}") for host in range(len(slots))),
        tuple(Worker(each, *place, 0, "127.0.0.1", 0) for each, place in enumerate(places)),
        control_fanin=fanin,
        control_tree_ranks=2,
    )
    config = Config(secret=_SECRET, connect_timeout=60, start_timeout=60)
    place = tree_position_of(rank, topology)
    assert place is not None
    with RendezvousClient(endpoint, _SECRET) as client, listen("127.0.0.1", None) as listener:
        control_plane = ControlPlane(config, _SECRET, None, client, World(rank, topology, "soak"), "127.0.0.1")
        links, decided = control_plane.connect(place, listener if rank == 0 else None, [])
    # No tensor is large enough for a data plane.
    engine = Engine(rank, topology, links, LocalGroup(1).backend(0), engine_settings(config, decided), position=place)
    engine.start()
    drawn = random.Random(0)
    done, goes_on = 0, True

    def allreduce(name: str, values: npt.NDArray[np.float64], op: ReduceOp) -> npt.NDArray[np.float64]:
        result = np.empty_like(values)
        spec = (TensorSpec(DType.FLOAT64, values.shape),)
        asked = Request(f"allreduce.{name}", Collective.ALLREDUCE, spec, op)
        engine.submit(asked, [Buffer.of_array(values)], [Buffer.of_array(result)]).wait(_PATIENCE)
        return result

    allreduce("all are there", np.zeros(1), ReduceOp.SUM)
    until = time.monotonic() + seconds
    while goes_on:
        number, rows = drawn.randrange(40), drawn.randrange(1, 9)
        if drawn.random() < 0.05:
            try:
                allreduce(f"odd{number}", np.ones(rows + (rank == number % size)), ReduceOp.SUM)
            except MismatchError as error:
                if f"on rank {number % size}" not in str(error):
                    raise WrongError(str(error)) from error
            else:
                raise WrongError("ranks that disagree were not told so")
        elif not (
            allreduce(f"t{number}.{rows}", np.full(rows, rank + 1.0), ReduceOp.SUM) == size * (size + 1) / 2
        ).all():
            raise WrongError(f"t{number}.{rows}")
        done += 1
        if done % 20 == 0:
            goes_on = bool(allreduce("goes on", np.array([float(time.monotonic() < until)]), ReduceOp.MIN)[0])
    engine.submit(Request("join", Collective.JOIN)).wait(_PATIENCE)
    engine.close()
    return done


def agree(ranks: int, hosts: int, fanin: int, seconds: float) -> None:
    """Print the progress of so many processes."""
    slots = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
    context = multiprocessing.get_context("fork")

    def serve(told: Connection) -> None:
        with RendezvousServer(secret=_SECRET, size=ranks) as server:
            told.send(server.endpoint)
            told.recv()

    def work(rank: int, endpoint: str, told: Connection) -> None:
        begun = time.process_time()
        told.send((be_rank(rank, slots, fanin, endpoint, seconds), time.process_time() - begun))

    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    endpoint = ours.recv()
    workers = []
    begun = time.monotonic()
    for rank in range(ranks):
        near, far = context.Pipe()
        process = context.Process(target=work, args=(rank, endpoint, far), daemon=True)
        process.start()
        far.close()
        workers.append((process, near))
    told = [near.recv() if near.poll(seconds + 5 * _PATIENCE) else None for _, near in workers]
    for process, _ in workers:
        process.join(_PATIENCE)
    assert all(process.exitcode == 0 for process, _ in workers), [process.exitcode for process, _ in workers]
    ours.send(None)
    server.join(10)
    (operations,) = {answer[0] for answer in told if answer is not None}
    used = [answer[1] for answer in told if answer is not None]
    print(f"{ranks} processes as on {hosts} hosts, fan-in {fanin}: {operations} operations, all right")
    wall = time.monotonic() - begun
    print(f"  {wall:.0f} s; processor time: rank 0 {used[0]:.1f} s, others up to {max(used[1:]):.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, help="hosts (default 128, with --processes 16)")
    parser.add_argument("--slots", type=int, default=8, help="ranks on each (default 8)")
    parser.add_argument("--fanin", type=int, help="leaders that report to one (default 16; 0: no tree)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--processes", type=int, help="instead: so many ranks that agree, a process each")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they do (default 20)")
    options = parser.parse_args()
    if options.processes:
        agree(options.processes, options.hosts or 16, options.fanin or 4, options.seconds)
        return
    hosts, fanin = options.hosts or 128, 16 if options.fanin is None else options.fanin
    slots = [options.slots] * hosts
    # The root, the busiest other leader, and one that has no others below it.
    nodes = {"root": 0}
    if fanin:
        nodes |= {"inner leader": options.slots, "last leader": options.slots * (hosts - 1)}
    print(f"{hosts} hosts x {options.slots}, fan-in {fanin}; milliseconds of processor time per step")
    for name, rank in nodes.items():
        for tensors, messages in CASES:
            node = Node(rank, slots, fanin)
            used = sorted(seconds * 1e3 for seconds in node.measured(tensors, messages, options.rounds))
            node.close()
            place = f"{name} ({len(node.place.members)} ranks, {len(node.place.leaders)} leaders)"
            print(
                f"  {place:40} {tensors:4} tensors in {messages:4}: {used[0]:7.2f}   ({used[0]:.2f} to {used[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
