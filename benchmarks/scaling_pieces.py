"""The pieces of ``scaling.py`` that are measured: what an agreement, a step between or within hosts, and a byte cost.

Small jobs measure them, whose ranks are processes of this machine, or of hosts that are network namespaces of it
(``Place``). Processor time is the ranks' processes' own, with what the kernel does for them. It depends on what else
the processors do: an exchange takes 0.12 ms of a rank's where two ranks have a processor each, and 0.6 where eight
share two and find each other's data in the caches. So there are as many ranks as in what is to be predicted
(``Crowd``): each with a processor of its own for a cluster, many for this machine.

    python benchmarks/scaling_pieces.py CASE FILE

is what each rank of such a job runs; rank 0 writes what is found to ``FILE``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scaling_model import Costs

ROOT = Path(__file__).resolve().parents[1]

PAUSE = 0.010
"""Seconds between two agreements, as between buckets: who has slept finds little in its processor's caches."""

SMALL, LARGE = 1 << 12, 1 << 22
"""Bytes of a tensor of which only the steps cost, and of one of which the bytes do."""

AGREEMENTS, SMALL_ROUNDS, LARGE_ROUNDS, PARTS = 200, 200, 15, 5
CODEC_PIECES = 64
"""Pieces that are encoded one after the other: more than fit into a processor's cache."""


@dataclass(frozen=True)
class Crowd:
    """The number of ranks at work at a time.

    Attributes:
        hosts: that form a ring or a cube, with a rank each; a power of two.
        few: hosts that send what is small to each other at once, with a rank each.
        pairs: hosts on each of which two ranks share memory.
    """

    hosts: int
    few: int
    pairs: int


ALONE, CROWDED = Crowd(2, 2, 1), Crowd(8, 4, 8)
"""Two ranks at a time, which have a processor each; and as many as on one machine that is a cluster's likeness."""


class Place(Protocol):
    """The place where a job's ranks run."""

    def run(self, argv: Sequence[str], hosts: int, slots: int) -> None:
        """Run a program as every rank of a job.

        Raises:
            SystemExit: it failed.
        """
        ...


class Here:
    """This machine: ranks of different hosts are processes that speak over loopback."""

    def run(self, argv: Sequence[str], hosts: int, slots: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HVDGLOO_CPU_OPERATIONS": "gloo" if hosts > 1 else "auto"}
        command = [sys.executable, "-m", "hvdgloo.runner", "-np", str(hosts * slots), *argv]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")


def case(place: Place, name: str, hosts: int, slots: int = 1) -> dict[str, float]:
    """Return the figures of a job of so many ranks; see the functions of that name below. Times are of a rank, in
    seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        place.run([sys.executable, __file__, name, str(result)], hosts, slots)
        return dict(json.loads(result.read_text()))


def measure(place: Place, crowd: Crowd) -> tuple[Costs, float, float]:
    """All pieces of a step, in half a minute; nothing of a start.

    Returns:
        what is done; seconds that a message between hosts takes beyond the processors' time; and bytes a second that
        a host with two ranks reduces or copies.
    """
    pair, more = case(place, "agreements", 2), case(place, "agreements", 6)
    many, alone = case(place, "hosts", crowd.hosts), case(place, "hosts", 2)
    few = case(place, "hosts", crowd.few) if crowd.few != 2 else alone
    here = case(place, "memory", crowd.pairs, 2)
    steps, dimensions = 2 * (crowd.hosts - 1), (crowd.hosts - 1).bit_length()
    sent = steps / crowd.hosts * LARGE
    exchange = many["cube_small_used"] / dimensions
    costs = Costs(
        agreement=pair["elapsed"],
        member=pair["used"],
        message=max(0.0, more["busy"] - pair["busy"]) / 4,
        ring=many["ring_small_used"] / steps,
        ring_byte=(many["ring_large_used"] - many["ring_small_used"]) / sent,
        exchange=exchange,
        byte=(many["cube_large_used"] - 2 * dimensions * exchange) / sent,
        peer=few["at_once_small_used"] / (crowd.few - 1),
        meeting=here["slices_small_used"] / 2,
    )
    delay = max(0.0, alone["at_once_small_elapsed"] - alone["at_once_small_used"])
    return costs, delay, LARGE / (here["slices_large_used"] - here["slices_small_used"])


# In each rank.


def every_rank(call: Callable[[], object], rounds: int, pause: float = 0.0) -> dict[str, float]:
    """Call something so many times on all ranks at once.

    Args:
        pause: seconds from the beginning of one call to the next one's; 0 to call again at once.

    Returns:
        ``elapsed``: the slowest rank's, the median; ``used``: of a rank's processors, the mean of the ranks, of each of
        which it is the median of parts of the rounds; ``first``: rank 0's.
    """
    import hvdgloo.numpy as hvd

    parts, took = [], []
    for part in range(-1, PARTS):  # the first one is not counted
        used = time.process_time()
        for _ in range(rounds // PARTS):
            if pause:
                time.sleep(pause - time.perf_counter() % pause)  # the same clock for all: this machine's
            begin = time.perf_counter()
            call()
            took.append((part, time.perf_counter() - begin))
        parts.append((time.process_time() - used) / (rounds // PARTS))
    mine = [seconds for part, seconds in took if part >= 0], statistics.median(parts[1:])
    ranks = hvd.allgather_object(mine)
    slowest = [max(times) for times in zip(*(times for times, _ in ranks), strict=True)]
    shares = [share for _, share in ranks]
    return {"elapsed": statistics.median(slowest), "used": statistics.fmean(shares), "first": shares[0]}


def agreements() -> dict[str, float]:
    """Agreements after pauses, and one after the other (``busy``). The 4 bytes travel in their messages."""
    import numpy as np

    import hvdgloo.numpy as hvd

    value = np.ones(1, np.float32)

    def agree() -> None:
        hvd.allreduce(value, name="tiny")

    busy = every_rank(agree, 2 * AGREEMENTS)
    found, asleep = every_rank(agree, AGREEMENTS, PAUSE), every_rank(lambda: None, AGREEMENTS, PAUSE)
    return {"busy": busy["first"], **{name: found[name] - asleep[name] for name in found}}


def hosts() -> dict[str, float]:
    """Allreduces among hosts with a rank each, by all ways that there are for so many."""
    from hvdgloo._backends.base import FEW_RANKS
    from hvdgloo._backends.butterfly import Butterfly
    from hvdgloo._backends.cube import Cube
    from hvdgloo._backends.gloo import GlooBackend
    from hvdgloo._backends.process_group import ProcessGroupBackend
    from hvdgloo.types import ReduceOp

    backend, (rank, size) = _backend(), _place()
    assert isinstance(backend, GlooBackend)
    assert backend._wire is not None
    cube = Butterfly(Cube(rank, size), backend._wire)
    ways: dict[str, Callable[[Any], Any]] = {
        "cube": lambda buffer: cube.allreduce(buffer, ReduceOp.SUM),
        "ring": lambda buffer: _finish(ProcessGroupBackend.allreduce(backend, buffer, ReduceOp.SUM)),
    }
    if size <= FEW_RANKS:
        ways["at_once"] = lambda buffer: _finish(backend.allreduce(buffer, ReduceOp.SUM))
    return _ways(ways)


def codec() -> dict[str, tuple[float, float]]:
    """Measure in this process what encoding costs: by the value of ``--wire``, seconds of a byte that is encoded, and
    of one that is decoded."""
    import numpy as np
    import torch

    from hvdgloo._backends.codec_torch import codec_of
    from hvdgloo._backends.narrow import PIECE
    from hvdgloo.types import WireFormat

    torch.set_num_threads(1)
    values = np.random.default_rng(1).standard_normal(CODEC_PIECES * PIECE, np.float32)
    pieces = np.split(values, CODEC_PIECES)
    found = {}
    for wire in (WireFormat.BF16, WireFormat.INT8, WireFormat.INT4):
        one = codec_of(wire)
        encoded = [np.zeros(one.nbytes(PIECE), np.uint8) for _ in pieces]
        encoding, decoding = [], []
        for _ in range(PARTS):
            begun = time.process_time()
            for piece, data in zip(pieces, encoded, strict=True):
                one.encode(piece, data)
            half = time.process_time()
            for piece, data in zip(pieces, encoded, strict=True):
                one.decode(data, piece)
            encoding.append((half - begun) / values.nbytes)
            decoding.append((time.process_time() - half) / values.nbytes)
        found[wire.value] = min(encoding), min(decoding)
    return found


def memory() -> dict[str, float]:
    """Measure the ranks' work on a tensor before and after it goes to other hosts."""
    import hvdgloo.numpy as hvd
    from hvdgloo.types import ReduceOp

    backend, rank, size = _backend(), hvd.local_rank(), hvd.local_size()
    if hvd.size() > size:
        backend = backend._local

    def slices(buffer: Any) -> None:
        part = buffer.nbytes // size
        own, sizes = buffer.part(rank * part, part), [part] * size
        _finish(backend.reducescatter(buffer, own, sizes, ReduceOp.SUM))
        _finish(backend.allgather(own, buffer, sizes))

    return _ways({"slices": slices})


def _ways(ways: dict[str, Callable[[Any], Any]]) -> dict[str, float]:
    import numpy as np

    from hvdgloo.types import Buffer

    found = {}
    for name, way in ways.items():
        for nbytes, rounds in ((SMALL, SMALL_ROUNDS), (LARGE, LARGE_ROUNDS)):
            buffer = Buffer.of_array(np.zeros(nbytes // 4, np.float32))
            figures = every_rank(lambda way=way, buffer=buffer: way(buffer), rounds)  # type: ignore[misc]
            size = "small" if nbytes == SMALL else "large"
            found.update({f"{name}_{size}_{what}": value for what, value in figures.items()})
    return found


def _backend() -> Any:
    from hvdgloo._job.process import current

    return current().engine._groups[0].host.backend


def _place() -> tuple[int, int]:
    import hvdgloo.numpy as hvd

    return hvd.rank(), hvd.size()


def _finish(work: Any) -> None:
    while not work.completes_within(10.0):
        pass


if __name__ == "__main__":
    import hvdgloo.numpy as hvd

    hvd.init()
    found = {"agreements": agreements, "hosts": hosts, "memory": memory}[sys.argv[1]]()
    if hvd.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    hvd.barrier()
