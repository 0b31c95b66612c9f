"""GPUs that exist in memory only, whose work is done late, and as out of order as events allow.

What is given to a stream waits in a queue. An operation runs when a thread looks whether an event has happened, or when
the schedule wants it to; which of those that could run does is the schedule's choice. Memory that is freed goes back to
its stream, is overwritten there, and is the next to be given out on that stream, as with torch's allocator.

Ranks are threads of one process here. A thread belongs to the rank whose number its name ends with, or to the one that
``as_rank`` says; each rank has default streams of its own. What a thread has seen of the GPUs, it alone knows: another
one learns of it through a handle or through memory that is freed, or when threads begin and end (``knowledge``).
"""

from __future__ import annotations

import random
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.gpus.clocks import Access, Clock, History, races

OFFSET = 1 << 52
"""Simulated addresses are this much above the real ones: code that uses one on the host reads no memory at all."""

POISON = 0xFB
_GRANULE = 512
_HOST = -1


class HostAccessError(AssertionError):
    """The host has read or written memory that is a GPU's."""


class Schedule:
    """The order and the times in which operations run.

    Args:
        kind: "late": nothing runs before a thread waits for it; "early": all that can run does at once; "any": some
            of it, in an order that ``seed`` decides.

    Attributes:
        is_paused: nothing runs at all.
    """

    def __init__(self, kind: str = "late", seed: int = 0) -> None:
        self.kind = kind
        self.random = random.Random(seed)
        self.is_paused = False

    def at_once(self) -> int:
        """Return the number of operations that run as soon as one has been given to a stream."""
        return {"late": 0, "early": 1 << 30}.get(self.kind, self.random.choice([0, 0, 1, 3]))


@dataclass(eq=False)
class Block:
    """A piece of a GPU's memory, or of page-locked memory of the host (device ``_HOST``)."""

    memory: torch.Tensor
    device: int
    rank: int
    stream: Stream | None
    history: History = field(default_factory=History)
    users: set[Stream] = field(default_factory=set)  # streams that ``used_here`` named

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class Storage:
    """Keeps a block in use; the block goes back when this is collected."""

    def __init__(self, machine: Machine, block: Block) -> None:
        self.block = block
        weakref.finalize(self, machine.free, block).atexit = False


@dataclass(eq=False)
class Operation:
    """Something in a stream's queue.

    Attributes:
        run: does it.
        ready: whether it may run, apart from those before it in the queue.
        needs: the streams that must get on before it may.
        part: in a collective; see ``nccl``.
    """

    what: str
    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    needs: Callable[[], Sequence[Stream]] = lambda: ()
    part: Any = None


class Stream:
    """A queue of operations on one GPU."""

    def __init__(self, number: int, device: int, rank: int) -> None:
        self.number, self.device, self.rank = number, device, rank
        self.queue: deque[Operation] = deque()
        self.clock = Clock()
        self.launched = 0
        self.is_captured = False

    def __repr__(self) -> str:
        return f"stream {self.number} of rank {self.rank} on GPU {self.device}"


class Event:
    """A place in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.clock = Clock(stream.clock)
        self.has_happened = False


class Machine:
    """All GPUs of a job.

    Args:
        count: how many each rank sees.
        schedule: in which order things happen.

    Attributes:
        races: what the checker has found.
    """

    def __init__(self, count: int = 4, schedule: Schedule | None = None) -> None:
        self.count = count
        self.schedule = schedule or Schedule()
        self.races: list[str] = []
        self._waits: dict[int, int] = {}
        self.lock = threading.RLock()
        self._streams: list[Stream] = []
        self._default: dict[tuple[int, int], Stream] = {}
        self._local = threading.local()
        self._free: dict[Stream, list[Block]] = {}
        self._limbo: list[tuple[Block, list[Event]]] = []
        self._blocks: dict[int, Block] = {}
        self._seen: dict[int, Clock] = {}  # by rank: what any of its threads knows
        self._freed: deque[tuple[Block, Clock]] = deque()
        self._is_collecting = False
        self.bytes_in_use = 0

    # Threads and streams

    @property
    def rank(self) -> int:
        """The rank that this thread belongs to."""
        own = getattr(self._local, "rank", None)
        if own is None:
            found = re.search(r"(\d+)$", threading.current_thread().name)
            own = self._local.rank = int(found[1]) if found and "Thread" not in threading.current_thread().name else 0
        return int(own)

    @property
    def waits(self) -> int:
        """The number of times that this rank's threads have blocked until a GPU had finished something."""
        return self._waits.get(self.rank, 0)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Let this thread belong to a rank."""
        before = self.rank
        self._local.rank = rank
        try:
            yield
        finally:
            self._local.rank = before

    @property
    def knowledge(self) -> Clock:
        """The operations that this thread, as its rank, knows to have ended on the GPUs."""
        if not hasattr(self._local, "knowledge"):
            self._local.knowledge = {}
        known: Clock = self._local.knowledge.setdefault(self.rank, Clock())
        return known

    def new_stream(self, device: int) -> Stream:
        """A stream of this thread's rank."""
        with self.lock:
            stream = Stream(len(self._streams), device, self.rank)
            self._streams.append(stream)
            return stream

    def default_stream(self, device: int) -> Stream:
        with self.lock:
            key = self.rank, device
            if key not in self._default:
                self._default[key] = self.new_stream(device)
            return self._default[key]

    def current_stream(self, device: int) -> Stream:
        """This thread's."""
        current: dict[tuple[int, int], Stream] = getattr(self._local, "streams", {})
        return current.get((self.rank, device)) or self.default_stream(device)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream this thread's current one on its GPU."""
        before = self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def set_stream(self, stream: Stream) -> None:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        self._local.streams[self.rank, stream.device] = stream

    # Operations

    def launch(
        self,
        stream: Stream,
        what: str,
        run: Callable[[], object],
        reads: Sequence[tuple[Block, int, int]] = (),
        writes: Sequence[tuple[Block, int, int]] = (),
        on_queue: Callable[[Operation], None] = lambda operation: None,
        **conditions: Any,
    ) -> None:
        """Give a stream something to do.

        Args:
            what: it is, for messages.
            run: does it, later.
            reads, writes: blocks with the addresses where what is accessed begins and ends.
            on_queue: is told the operation before it can run.
            conditions: see ``Operation``.
        """
        with self.lock:
            self._collect()
            stream.clock.join(self.knowledge)
            stream.launched += 1
            stream.clock[stream.number] = stream.launched
            for accessed, changes in ((reads, False), (writes, True)):
                for block, begin, end in accessed:
                    if begin < end:
                        access = Access(begin, end, changes, stream.number, stream.launched, what)
                        self.races += races(block.history, stream.clock, [access])
            operation = Operation(what, run, **conditions)
            on_queue(operation)
            stream.queue.append(operation)
            for _ in range(self.schedule.at_once()):
                if not self._advance(None):
                    break

    def record(self, stream: Stream) -> Event:
        """An event that happens when a stream is this far."""
        with self.lock:
            self._collect()
            stream.clock.join(self.knowledge)
            event = Event(stream)

            def happen() -> None:
                event.has_happened = True

            if stream.queue:
                stream.queue.append(Operation("record", happen))
            else:
                happen()
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Make a stream wait for an event."""
        with self.lock:
            stream.clock.join(event.clock)
            if not event.has_happened:
                stream.queue.append(Operation("wait", lambda: None, lambda: event.has_happened, lambda: [event.stream]))

    def query(self, event: Event) -> bool:
        """Tell whether an event has happened. Looking at it is what makes the GPUs proceed."""
        with self.lock:
            for _ in range(4):
                if event.has_happened or not self._advance(event.stream):
                    break
            if event.has_happened:
                self.knowledge.join(event.clock)
                self._seen.setdefault(self.rank, Clock()).join(event.clock)
            return event.has_happened

    def settle(self, stream: Stream) -> None:
        """Block until a stream has done everything."""
        self._waits[self.rank] = self.waits + 1
        event = self.record(stream)
        while not self.query(event):
            threading.Event().wait(1e-4)  # another rank has yet to come

    def finish(self) -> None:
        """Run all that can run."""
        with self.lock:
            while self._advance(None):
                pass

    def _advance(self, wanted: Stream | None) -> bool:
        """Run one operation; False if none can."""
        if self.schedule.is_paused:
            return False
        if self.schedule.kind == "late" and wanted is not None:
            stream = self._before(wanted, set())
        else:
            able = [stream for stream in self._streams if stream.queue and stream.queue[0].ready()]
            stream = self.schedule.random.choice(able) if able else None
        if stream is None:
            return False
        operation = stream.queue[0]
        try:
            with torch.no_grad():
                operation.run()
        except Exception as error:  # a kernel's, which no code is there to catch
            self.races.append(f"{operation.what} on {stream}: {type(error).__name__}: {error}")
        stream.queue.popleft()
        return True

    def _before(self, wanted: Stream, seen: set[Stream]) -> Stream | None:
        """A stream whose next operation can run, and must before the wanted one gets on."""
        if wanted in seen or not wanted.queue:
            return None
        seen.add(wanted)
        operation = wanted.queue[0]
        if operation.ready():
            return wanted
        found = (self._before(stream, seen) for stream in operation.needs())
        return next((stream for stream in found if stream is not None), None)

    # Memory

    def allocate(self, nbytes: int, device: int) -> Storage:
        """Memory of this thread's current stream: the piece that was freed there last, if it is large enough."""
        size = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        with self.lock:
            self._collect()
            stream = self.current_stream(device)
            free = self._free.setdefault(stream, [])
            fitting = [index for index, block in enumerate(free) if size <= block.memory.numel() <= 2 * size]
            if fitting:
                block = free.pop(fitting[-1])
                block.rank = self.rank
            else:
                memory = torch.full((size,), POISON, dtype=torch.uint8)
                block = Block(memory, device, self.rank, stream)
                self._blocks[block.address] = block
            self.bytes_in_use += block.memory.numel()
            return Storage(self, block)

    def free(self, block: Block) -> None:
        """Note that a block is not referred to any more. Called wherever Python collects it, so it is only noted here.

        The last reference is dropped after all others were, so what any thread of the rank has seen by now counts; and
        the memory is given out again only after this, as torch's allocator has a lock.
        """
        self._freed.append((block, Clock(self._seen.get(block.rank, {}))))

    def _collect(self) -> None:
        """Give freed blocks back to their streams. That launches and records, which would come here again."""
        if self._is_collecting:
            return
        self._is_collecting = True
        try:
            self._give_back()
        finally:
            self._is_collecting = False

    def _give_back(self) -> None:
        while self._freed:
            block, known = self._freed.popleft()
            stream = block.stream
            assert stream is not None
            stream.clock.join(known)
            self.bytes_in_use -= block.memory.numel()
            events = [self.record(user) for user in sorted(block.users - {stream}, key=lambda user: user.number)]
            block.users = set()
            if events:
                self._limbo.append((block, [*events, self.record(stream)]))
            else:
                self._poison(block)
        for entry in list(self._limbo):
            block, events = entry
            if all(event.has_happened for event in events):
                self._limbo.remove(entry)
                assert block.stream is not None
                block.history = History()
                block.memory.fill_(POISON)
                self._free.setdefault(block.stream, []).append(block)

    def _poison(self, block: Block) -> None:
        """Overwrite a block as the next user on its stream may, and have it used next."""
        assert block.stream is not None
        whole = block, block.address, block.address + block.memory.numel()
        self.launch(block.stream, "reuse of freed memory", lambda: block.memory.fill_(POISON), (), [whole])
        self._free.setdefault(block.stream, []).append(block)

    def pin(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host."""
        memory = torch.full((max(1, nbytes),), POISON, dtype=torch.uint8)
        with self.lock:
            block = Block(memory, _HOST, self.rank, None)
            self._blocks[block.address] = block
        return memory[:nbytes]

    def pinned_block(self, address: int) -> Block | None:
        """The page-locked memory that an address is in."""
        with self.lock:
            for block in self._blocks.values():
                if block.device == _HOST and block.address <= address < block.address + block.memory.numel():
                    return block
        return None

    @staticmethod
    def require_host(address: int) -> None:
        """Raise HostAccessError if an address is a GPU's."""
        if address >= OFFSET:
            raise HostAccessError("the host reads or writes the memory of a GPU")

    def host_uses(self, address: int, nbytes: int) -> None:
        """The host reads and writes memory; if it is page-locked, GPUs must have been waited for that use it, too.

        Raises:
            HostAccessError: it is a GPU's.
        """
        self.require_host(address)
        block = self.pinned_block(address)
        if block is not None:
            with self.lock:
                access = Access(address, address + nbytes, True, _HOST, 0, "the host")
                self.races += races(History(list(block.history.accesses)), self.knowledge, [access])

    def check(self) -> None:
        """Raise AssertionError if accesses without order were found, in whatever schedule."""
        with self.lock:
            self._collect()
            assert not self.races, "\n".join(dict.fromkeys(self.races))
