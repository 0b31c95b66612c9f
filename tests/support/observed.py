"""A job that is only simulated, and looked at by a real ``Observatory``: as many ranks as one likes, with a straggler,
stalls, lost ranks and hostile names.

    >>> job = SimulatedJob(ranks=4, hosts=2, slow=3)
    >>> job.advance(60)
    >>> job.observatory.snapshot().stragglers[0].rank
    3
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.samples import (
    Causes,
    Flow,
    Gpu,
    HostSample,
    Late,
    Lateness,
    Missing,
    Note,
    OuterSteps,
    Plane,
    Progress,
    Sample,
    Steps,
)

MIB = 2**20
GIB = 2**30
BUCKETS = 20

EVIL = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"><svg/onload=alert(1)>",
    "</script><script>alert(1)//",
    "javascript:alert(1)//%0A{{7*7}}",
    "name\u202egnp.exe\u0000\u0007\u001b[31m",
)
"""Names that do harm where they are not escaped."""

CAUSES = ("", "stolen", "throttled", "memory", "gpu", "input", "busy")
"""Reasons that may make the slow rank slow; nothing is unusual about it for ""."""


class SimulatedJob:
    """A job of ranks that make steps, with a clock of its own that ``advance`` moves.

    Args:
        ranks, hosts: how many; ranks are spread over hosts in blocks.
        slow: the rank that the others wait for; None for none.
        cause: why; one of ``CAUSES``.
        lag: seconds that it needs longer for a step.
        step: seconds that a step takes without it.
        evil: hosts, tensors and output lines have names out of ``EVIL``.
        gpus: whether hosts have one for each rank.
        meets_every: number of inner steps from one outer step to the next; 0 if there are no outer steps.
        logs: whether the program logs a loss, an accuracy and its progress, in epochs of 100 steps.
        started: when the job was, in seconds since 1970.
        seed: of the noise.
    """

    def __init__(
        self,
        ranks: int = 4,
        hosts: int = 2,
        *,
        slow: int | None = 3,
        cause: str = "stolen",
        lag: float = 0.014,
        step: float = 0.1,
        evil: bool = False,
        gpus: bool = False,
        logs: bool = False,
        meets_every: int = 0,
        started: float = 1_700_000_000.0,
        seed: int = 0,
    ) -> None:
        assert cause in CAUSES
        assert slow is None or 0 <= slow < ranks
        self.now = started
        self.size = ranks
        self.epoch = 0
        self.slow = slow
        self.cause = cause
        self.lag = lag if slow is not None else 0.0
        self.step = step
        self.gpus = gpus
        self.logs = logs
        self.meets_every = meets_every
        self.hosts = [EVIL[n % len(EVIL)] + str(n) if evil else f"h{n + 1}" for n in range(hosts)]
        self.tensors = list(EVIL) if evil else ["fc.weight", "fc.bias", "conv.weight"]
        self.evil = evil
        self.observatory = Observatory(
            job="simulated",
            command=f"hvdgloo-run -np {ranks} python {EVIL[0] if evil else 'train.py'}",
            started=started,
            versions={"hvdgloo": "0.0", "python": "3.11", "torch": "2.13.0"},
            clock=lambda: self.now,
        )
        self._random = random.Random(seed)
        self._steps = [0] * ranks
        self._last = [[0, 0.0] for _ in range(ranks)]
        self._recent: list[tuple[int, float]] = []
        self._rounds = 0
        self._waits = [0] * BUCKETS
        self._cpu = [0.0] * ranks
        self._seconds = 0.0
        self._waiting = [0.0] * ranks
        self._before_first = [0.0] * ranks
        self._elapsed = 0.0
        self._host_bytes = 0
        self._gone: set[int] = set()
        self._hung: tuple[int, str, float] | None = None
        self._stacks: list[tuple[int, str]] = []
        self.place()

    def host(self, rank: int) -> str:
        """The host that a rank is on."""
        return self.hosts[rank * len(self.hosts) // self.size]

    def place(self) -> None:
        """Tells the observatory where ranks are."""
        seats, seen = [], dict.fromkeys(self.hosts, 0)
        for rank in range(self.size):
            host = self.host(rank)
            seats.append((rank, host, seen[host], 1000 + rank))
            seen[host] += 1
        self.observatory.placed(self.epoch, seats)

    def advance(self, seconds: int = 1, *, tick: bool = True) -> None:
        """Lets time pass: each second every rank and host says how it is, and readers are told."""
        for _ in range(seconds):
            self.now += 1.0
            self._elapsed += 1.0
            if self._hung is None and not self._gone:
                self._train()
            for rank in range(self.size):
                if rank not in self._gone:
                    self.observatory.observe(self.host(rank), self._sample(rank))
            for name in self.hosts:
                self.observatory.observe(name, self._host_sample(name))
            self._write()
            if tick:
                self.observatory.tick()

    def stall(self, rank: int, stack: str = 'File "train.py", line 7, in forward\n    time.sleep(3600)') -> None:
        """From now on a rank submits nothing, and all others wait for it."""
        self._hung = (rank, self.tensors[0], self._elapsed)
        text = f"ranks {rank} have not submitted {self.tensors[0]}, which others have waited for since 60 s"
        self.observatory.observe(self.host(0), Note(0, self.now, "stall", text))
        self._stacks = [(rank, stack)]

    def resume(self) -> None:
        """The end of a stall."""
        self._hung, self._stacks = None, []
        self.observatory.observe(self.host(0), Note(0, self.now, "stall ended", "all ranks go on"))

    def lose(self, rank: int, reason: str = "was killed by SIGKILL") -> None:
        """A rank's process is killed; the others make no further step."""
        self._gone.add(rank)
        self.observatory.worker(rank, "failed", reason)

    def finish(self, exit_code: int = 0) -> None:
        """All ranks leave one after the other, each half a second after it has said its last words."""
        for rank in range(self.size):
            self.now += 0.1
            self.observatory.observe(self.host(rank), msgspec.structs.replace(self._sample(rank), doing="ended"))
        for rank in range(self.size):
            self.now += 0.5
            self.observatory.worker(rank, "ended")
            self.observatory.tick()
        self.now += 3.0
        self.observatory.ended(exit_code)

    def shrink(self) -> None:
        """The job goes on without the lost ranks, as an elastic job does: those that are left get new numbers."""
        left = [rank for rank in range(self.size) if rank not in self._gone]
        self.size = len(left)
        if self.slow is not None:
            self.slow = left.index(self.slow) if self.slow in left else None
            self.lag = self.lag if self.slow is not None else 0.0
        self._gone.clear()
        self._last = [[0, 0.0] for _ in range(self.size)]
        self._recent, self._rounds, self._waits = [], 0, [0] * BUCKETS
        self.epoch += 1
        self.place()
        self.observatory.event("elastic", f"the job goes on with {self.size} ranks")

    @contextmanager
    def live(self) -> Iterator[Observatory]:
        """Lets the simulated time be the real one while the block runs, and the job go on by itself."""
        ended = threading.Event()
        self.now = max(self.now, time.time())

        def run() -> None:
            while not ended.wait(max(0.0, self.now + 1.0 - time.time())):
                self.advance()

        thread = threading.Thread(target=run, name="simulated-job", daemon=True)
        thread.start()
        try:
            yield self.observatory
        finally:
            ended.set()
            thread.join()

    def _train(self) -> None:
        """A second of steps, and who was last in each."""
        length = self.step + self.lag
        count = max(1, round(1.0 / length))
        timed = count if self._seconds else count - 1  # it is not known when the first one began
        self._seconds += timed * length
        for _ in range(count):
            self._rounds += 1
            if self.slow is not None and self._random.random() < 0.92:
                last, waited = self.slow, self.lag * self._random.uniform(0.8, 1.2)
            else:
                last, waited = self._random.randrange(self.size), self.step * 0.002
            self._last[last][0] += 1
            self._last[last][1] += waited
            self._recent.append((last, waited))
            self._waits[min(BUCKETS - 1, max(0, int(waited / 1e-4).bit_length()))] += 1
        del self._recent[:-1000]
        self._host_bytes += count * 25 * MIB
        for rank in range(self.size):
            self._steps[rank] += count
            late = 0.0 if rank == self.slow else self.lag
            self._waiting[rank] += timed * late
            self._before_first[rank] += timed * (
                0.01 + (self.lag if rank == self.slow and self.cause == "input" else 0)
            )
            self._cpu[rank] += self._random.uniform(0.9, 1.1)

    def _sample(self, rank: int) -> Sample:
        steps = self._steps[rank]
        hung = self._hung
        doing = "computing" if rank == self.slow or self.lag < self.step / 2 else "waiting"
        pending, pending_seconds = "", 0.0
        if self._gone:
            doing, pending = "waiting", self.tensors[0]
        if hung:
            pending_seconds = self._elapsed - hung[2]
            doing, pending = ("computing", "") if rank == hung[0] else ("waiting", hung[1])
        sample = Sample(
            rank=rank,
            size=self.size,
            epoch=self.epoch,
            pid=1000 + rank,
            at=self.now,
            operations=steps * 3,
            bytes=steps * 25 * MIB,
            steps=Steps(
                count=steps,
                seconds=self._seconds,
                waiting=self._waiting[rank],
                communicating=self._seconds * 0.2,
                before_first=self._before_first[rank],
                last=self.step + self.lag,
            ),
            causes=Causes(
                negotiation=self._waiting[rank], queue=steps * 1e-4, copy=steps * 1e-3, wire=self._seconds * 0.25
            ),
            flows=(
                Flow("gloo", 0, steps * 2, steps * 24 * MIB, self._seconds * 0.2),
                Flow("agreement", 0, steps, steps * MIB, 0.0),
            ),
            doing=doing if steps else "starting",
            pending=pending,
            pending_seconds=pending_seconds,
            cpu_seconds=self._cpu[rank],
            memory=2 * GIB + rank * MIB,
            gpu=self._gpu(rank),
            planes=(Plane("gloo", 0, "cpu", f"hosts {' and '.join(self.hosts[:2])}"),),
        )
        if self.meets_every:
            met = steps // self.meets_every
            outer = OuterSteps(met, met * 102_000_000, 0.03 * self._seconds, self.meets_every, self.now - 2)
            sample = msgspec.structs.replace(sample, outer=outer)
        if rank:
            return sample
        return msgspec.structs.replace(
            sample,
            settings={"params.fusion_threshold_mb": 32.0, "params.cycle_time_ms": 0.0},
            lateness=self._lateness(),
            missing=(Missing(hung[1], self._elapsed - hung[2], (hung[0],), 1),) if hung else (),
            stacks=tuple(self._stacks),
            **self._logged(steps),
        )

    def _logged(self, steps: int) -> dict[str, Any]:
        if not self.logs or not steps:
            return {}
        logged = (("loss", 3 * math.exp(-steps / 400)), ("val_accuracy", 1 - 0.9 * math.exp(-steps / 600)))
        return {"logged": logged, "progress": Progress((steps - 1) % 100, 100, (steps - 1) // 100, 10)}

    def _lateness(self) -> Lateness:
        recent: dict[int, list[float]] = {}
        for rank, seconds in self._recent:
            count = recent.setdefault(rank, [0, 0.0])
            count[0] += 1
            count[1] += seconds
        return Lateness(
            rounds=self._rounds,
            recent=len(self._recent),
            waits=tuple(self._waits),
            ranks=tuple(
                Late(
                    rank,
                    int(count),
                    seconds,
                    *((int(recent[rank][0]), recent[rank][1]) if rank in recent else (0, 0.0)),
                )
                for rank, (count, seconds) in enumerate(self._last)
                if count
            ),
        )

    def _gpu(self, rank: int) -> int:
        return sum(1 for other in range(rank) if self.host(other) == self.host(rank)) if self.gpus else -1

    def _host_sample(self, name: str) -> HostSample:
        ranks = [rank for rank in range(self.size) if self.host(rank) == name]
        cause = self.cause if self.slow in ranks else ""
        return HostSample(
            at=self.now,
            cores=16,
            cpu=0.99 if cause == "busy" else 0.4,
            stolen=0.12 if cause == "stolen" else 0.0,
            throttled=0.4 if cause == "throttled" else 0.0,
            memory=40 * GIB,
            memory_total=64 * GIB,
            memory_pressure=0.25 if cause == "memory" else 0.0,
            received=self._host_bytes,
            sent=self._host_bytes,
            read=self._host_bytes // 10,
            written=0,
            gpus=tuple(
                Gpu(
                    n,
                    "NVIDIA H100",
                    0.9,
                    30 * GIB,
                    80 * GIB,
                    900 if cause == "gpu" and rank == self.slow else 1980,
                    1980,
                )
                for n, rank in enumerate(ranks)
            )
            if self.gpus
            else (),
        )

    def _write(self) -> None:
        for rank in range(min(self.size, 8)):
            if rank in self._gone:
                continue
            text = f"step {self._steps[rank]:,}: loss {2.3 * 0.999 ** self._steps[rank]:.4f}"
            if self.evil:
                text = f"{self._random.choice(EVIL)} {text}"
            self.observatory.output(rank, 1, f"{text}\n".encode())
