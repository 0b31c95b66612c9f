"""Random collectives for a long time, all results checked: shapes, types, orders, process sets, several threads.

    python benchmarks/soak.py --seconds 600 [--plane gloo|shm]
    python benchmarks/soak.py --seconds 600 --plane hierarchical --hosts h1:2,h2:2
    python benchmarks/soak.py --seconds 600 --np 2 --alternating 3

Each thread of a rank works in a process set of its own (they overlap). It draws batches of operations, the same on all
members, submits each batch in an order of its own, and compares every result with numpy's. Memory and open files are
checked ten times; at the end they must be what they were halfway through. Over the hierarchical plane every tensor is
reduced in each host first, however small; that it was the requested plane is checked as well.

With ``--alternating`` the threads of a rank call async and synchronize in turn instead, each of one tensor of its own.
Any of them may do the engine's work while it waits, for a moment; none may have to wait for long because of it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import hvdgloo.numpy as hvd
import hvdgloo.run

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
SAMPLES = 10
_ROUNDS = 50  # operations of a thread between two questions whether to go on
_SHARE = 5  # one thread may have so many times the operations of another
PLANES: dict[str, dict[str, str]] = {
    "default": {},
    "gloo": {"HVDGLOO_CPU_OPERATIONS": "gloo"},
    "shm": {"HVDGLOO_CPU_OPERATIONS": "shm"},
    "hierarchical": {"HVDGLOO_HIERARCHICAL_THRESHOLD": "1", "HVDGLOO_HIERARCHICAL_DISTRIBUTION_THRESHOLD": "1"},
}
KINDS = ("allreduce", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


@dataclass(frozen=True)
class Draw:
    """One operation, drawn alike on all members of a set."""

    kind: str
    name: str
    dtype: str
    rows: int
    width: int
    op: int
    root: int
    seed: int

    def data(self, member: int, rows: int | None = None) -> np.ndarray:
        """A member's tensor: small whole numbers, so that every order of summing is exact."""
        generator = np.random.default_rng((self.seed, member))
        return generator.integers(0, 4, (self.rows if rows is None else rows, self.width)).astype(self.dtype)

    def splits(self, member: int, size: int) -> list[int]:
        generator = np.random.default_rng((self.seed, member, 1))
        return [int(n) for n in generator.multinomial(self.rows, [1 / size] * size)]


def draw(rng: random.Random, members: list[int], step: int, place: str) -> Draw:
    large = rng.random() < 0.1
    return Draw(
        kind=rng.choice(KINDS),
        # Names are reused, with other shapes and types.
        name=f"{place}.{step % 3}",
        dtype=rng.choice(DTYPES),
        rows=rng.choice((0, 1, 2, 3, 5, 17)) if not large else rng.randint(1000, 60_000),
        width=rng.choice((1, 2, 7)),
        op=rng.choice((hvd.Sum, hvd.Min, hvd.Max)),
        root=rng.choice(members),
        seed=rng.randrange(1 << 30),
    )


def submit(d: Draw, place: int, size: int, process_set: hvd.ProcessSet) -> int:
    tensor = d.data(place)
    if d.kind == "allreduce":
        return hvd.allreduce_async(tensor, op=d.op, name=d.name, process_set=process_set)
    if d.kind == "grouped_allreduce":
        return hvd.grouped_allreduce_async([tensor, tensor[:1]], op=d.op, name=d.name, process_set=process_set)
    if d.kind == "allgather":
        return hvd.allgather_async(d.data(place, d.rows + place), name=d.name, process_set=process_set)
    if d.kind == "broadcast":
        return hvd.broadcast_async(tensor, d.root, name=d.name, process_set=process_set)
    if d.kind == "alltoall":
        return hvd.alltoall_async(tensor, d.splits(place, size), name=d.name, process_set=process_set)
    return hvd.reducescatter_async(tensor, name=d.name, op=hvd.Sum, process_set=process_set)


def expected(d: Draw, place: int, members: list[int]) -> list[np.ndarray]:
    size = len(members)
    if d.kind == "allgather":
        return [np.concatenate([d.data(member, d.rows + member) for member in range(size)])]
    if d.kind == "broadcast":
        return [d.data(members.index(d.root))]
    tensors = [d.data(member) for member in range(size)]
    if d.kind == "alltoall":
        pieces = []
        for member, tensor in enumerate(tensors):
            splits = d.splits(member, size)
            begin = sum(splits[:place])
            pieces.append(tensor[begin : begin + splits[place]])
        return [np.concatenate(pieces), np.array([len(piece) for piece in pieces])]
    if d.kind == "reducescatter":
        return [np.array_split(sum(tensors), size)[place].astype(d.dtype)]
    combine = {int(hvd.Sum): np.add, int(hvd.Min): np.minimum, int(hvd.Max): np.maximum}[int(d.op)]
    whole = tensors[0]
    for tensor in tensors[1:]:
        whole = combine(whole, tensor)
    return [whole] if d.kind == "allreduce" else [whole, whole[:1]]


def compare(d: Draw, result: Any, wanted: list[np.ndarray]) -> None:
    results = result if isinstance(result, list | tuple) else [result]
    for actual, value in zip(results, wanted, strict=True):
        if actual.shape != value.shape or not np.array_equal(actual, value):
            raise AssertionError(f"{d} is wrong: {actual!r} instead of {value!r}")


class Soaker:
    """One rank's threads."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.end = time.monotonic() + seconds
        self.seed = seed
        self.done: Counter[str] = Counter()
        self.longest = 0.0  # seconds that one operation of ``alternate`` took
        self.failures: list[str] = []

    def soak(self, number: int, process_set: hvd.ProcessSet) -> None:
        """One thread, in one set, until the set's first member says that time is up."""
        members = process_set.ranks
        place, size = members.index(hvd.rank()), len(members)
        alike, own = random.Random(f"{self.seed} {number}"), random.Random(f"{self.seed} {number} {place}")
        step = 0
        while self.goes_on(number, process_set):
            batch = [draw(alike, members, step, f"{number}.{index}") for index in range(alike.randint(1, 8))]
            order = list(range(len(batch)))
            own.shuffle(order)
            handles = {index: submit(batch[index], place, size, process_set) for index in order}
            own.shuffle(order)
            for index in order:
                compare(batch[index], hvd.synchronize(handles[index]), expected(batch[index], place, members))
                self.done[batch[index].kind] += 1
            step += 1

    def alternate(self, number: int, process_set: hvd.ProcessSet) -> None:
        """One thread of several that each have one small operation under way."""
        size, step = hvd.size(), 0
        while step % _ROUNDS or self.goes_on(number, process_set):
            begun = time.monotonic()
            value = np.full(1 + step % 7, step + number + hvd.rank(), np.int64)
            total = hvd.synchronize(hvd.allreduce_async(value, op=hvd.Sum, name=f"own {number}"))
            self.longest = max(self.longest, time.monotonic() - begun)
            wanted = size * (step + number) + size * (size - 1) // 2
            if total.shape != value.shape or (total != wanted).any():
                raise AssertionError(f"step {step} is wrong: {total!r} instead of {wanted}")
            self.done[f"thread {number}"] += 1
            step += 1

    def goes_on(self, number: int, process_set: hvd.ProcessSet) -> bool:
        mine = np.array([time.monotonic() < self.end and not self.failures], np.uint8)
        return bool(hvd.allreduce(mine, op=hvd.Min, name=f"goes on {number}", process_set=process_set)[0])

    def run(self, number: int, process_set: hvd.ProcessSet, *, alternating: bool = False) -> None:
        try:
            (self.alternate if alternating else self.soak)(number, process_set)
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            self.failures.append(f"rank {hvd.rank()}, thread {number}: {type(error).__name__}: {error}")


def resources() -> tuple[int, int]:
    """Resident bytes, open descriptors."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def plane_in_use() -> str:
    """The world's data plane, as ``--plane`` spells it."""
    from hvdgloo._job.process import current

    return str(current().engine._groups[0].host.backend.name)


def worker(seconds: float, seed: int, plane: str, alternating: int) -> dict[str, Any]:
    """One rank."""
    hvd.init()
    if plane not in ("default", plane_in_use()):
        raise SystemExit(f"the plane is {plane_in_use()}, not {plane}: these ranks can have no other")
    everyone = list(range(hvd.size()))
    subsets = [everyone[:2], everyone[1:], [everyone[0], everyone[-1]]]
    sets = [hvd.add_process_set(ranks) for ranks in subsets if len(ranks) < len(everyone)]
    soaker = Soaker(seconds, seed)
    mine = [(0, hvd.global_process_set), (1, hvd.global_process_set)]
    mine += [(2 + index, each) for index, each in enumerate(sets) if each.included()]
    if alternating:
        mine = [(number, hvd.global_process_set) for number in range(alternating)]
    body = partial(soaker.run, alternating=bool(alternating))
    threads = [threading.Thread(target=body, args=each, name=f"soak-{each[0]}", daemon=True) for each in mine]
    for thread in threads:
        thread.start()
    samples = []
    for _ in range(SAMPLES):
        threads[0].join(seconds / SAMPLES)
        samples.append(resources())
    for thread in threads:
        thread.join(seconds + 60)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    samples.append(resources())
    if not stuck:
        hvd.barrier()  # a rank that leaves ends the others' collectives, and ranks are in unequal numbers of sets
    hvd.shutdown()
    return {
        "done": soaker.done,
        "failures": soaker.failures,
        "stuck": stuck,
        "samples": samples,
        "longest": soaker.longest,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--seconds", type=float, default=60, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--growth", type=int, default=48, help="MiB that memory may grow by (default 48)")
    parser.add_argument("--plane", choices=PLANES, default="default", help="the data plane that is wanted")
    parser.add_argument("--hosts", help="host:slots,... (default: this one)")
    parser.add_argument("--python", help="the ranks' interpreter (default: this one)")
    parser.add_argument(
        "--alternating", type=int, default=0, help="how many threads that only wait in turn (see above)"
    )
    parser.add_argument("--longest", type=float, default=1.0, help="seconds that they may wait for one (default 1)")
    options = parser.parse_args()
    arguments = options.seconds, options.seed, options.plane, options.alternating
    where = {"np": options.np, "hosts": options.hosts, "executable": options.python}
    results = hvdgloo.run.run(worker, arguments, env=PLANES[options.plane], **where)
    wrong = [failure for result in results for failure in result["failures"]]
    for rank, result in enumerate(results):
        memory, files = zip(*result["samples"], strict=True)
        growth = memory[-1] - memory[SAMPLES // 2 - 1]
        print(f"rank {rank}: {sum(result['done'].values())} operations")
        print(f"  memory, MiB: {' '.join(str(size >> 20) for size in memory)}")
        print(f"  open files: {' '.join(map(str, files))}")
        if result["stuck"]:
            wrong.append(f"rank {rank}: {', '.join(result['stuck'])} never ended")
        if growth > options.growth << 20:
            wrong.append(f"rank {rank}: memory grew by {growth >> 20} MiB")
        if files[-1] > files[SAMPLES // 2 - 1]:
            wrong.append(f"rank {rank}: {files[-1] - files[SAMPLES // 2 - 1]} more open files than before")
        if options.alternating:
            print(f"  longest wait, ms: {1e3 * result['longest']:.1f}")
            if result["longest"] > options.longest:
                wrong.append(f"rank {rank}: an operation took {result['longest']:.1f} s")
            counts = sorted(result["done"].values())
            if len(counts) != options.alternating or counts[0] < counts[-1] / _SHARE:
                wrong.append(f"rank {rank}: some thread had far fewer turns than another: {dict(result['done'])}")
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(results[0]["done"].items())))
    print("\n".join(wrong) or "all results right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
