"""Workers that use mpi4py without hvdgloo: to MPI each of them is alone, and nothing else would tell them.

A process that has loaded mpi4py has its shared object among its memory maps. These are read a few times in the first
half minute of the first worker on the host, as all workers run the same program. A worker that has loaded hvdgloo, too,
warns by itself (``hvdgloo._job.other_launchers``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from hvdgloo.runner.processes import reaper
from hvdgloo.runner.processes.worker_process import WorkerProcess
from hvdgloo.runner.protocol.frames import ForeignMpi, Frame

LOOKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds after a worker's start when its memory maps are read."""

SURE_AFTER = 10.0
"""Seconds after which a running program that imported mpi4py is not expected to import hvdgloo any more."""

_MPI4PY = re.compile(rb"/mpi4py/MPI\.[^/\n]*\.so$", re.MULTILINE)
_LOADED_BY_HVDGLOO = re.compile(rb"/msgspec/_core\.[^/\n]*\.so$", re.MULTILINE)
_OF_MPI_S = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")  # how variables begin that launchers of MPI set


class ForeignMpiWatch:
    """Watches the first worker on this host.

    Args:
        send: sends a frame to the launcher.
    """

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._given: Mapping[str, str] = {}
        self._worker: WorkerProcess | None = None
        self._started = 0.0
        self._looks: list[float] = []
        self._seen_at: float | None = None

    def started(self, worker: WorkerProcess, environ: Mapping[str, str]) -> None:
        """Watch a worker that was started with this environment, if it is the host's first."""
        if self._worker is None:
            self._worker, self._given = worker, environ
            self._started, self._looks = time.monotonic(), list(LOOKS)

    @property
    def deadline(self) -> float | None:
        """The time of the next look on the monotonic clock; None if there is none."""
        return self._started + self._looks[0] if self._looks else None

    def tick(self) -> None:
        """Look if it is time, and report once it is certain. To be called in each turn of the agent's loop."""
        if self._worker is None or not self._looks:
            return
        now = time.monotonic()
        if not self._worker.running:
            self._end(report=self._seen_at is not None)  # it cannot import hvdgloo any more
        elif now >= self._started + self._looks[0]:
            self._looks = [look for look in self._looks if self._started + look > now]
            self._look(now, self._worker.pid)

    def _look(self, now: float, pid: int) -> None:
        alone = False
        for each in (pid, *reaper.descendants(pid)):  # the worker may be a shell
            maps = _read(each, "maps")
            if _LOADED_BY_HVDGLOO.search(maps):
                self._end(report=False)
                return
            alone = alone or (_MPI4PY.search(maps) is not None and not self._is_started_by_mpi(each))
        if not alone:
            self._seen_at = None
        elif self._seen_at is None:
            self._seen_at = now
        elif now >= self._seen_at + SURE_AFTER:
            self._end(report=True)
            return
        if alone and not self._looks:
            self._looks.append(now - self._started + SURE_AFTER)

    def _is_started_by_mpi(self, pid: int) -> bool:
        """Tell whether the worker has started an mpirun of its own, which has started this process."""
        # The launcher itself may run under srun, say, whose variables the worker has then from us.
        pairs = (each.partition("=") for each in _read(pid, "environ").decode("utf-8", "surrogateescape").split("\0"))
        return any(name.startswith(_OF_MPI_S) and self._given.get(name) != value for name, _, value in pairs)

    def _end(self, *, report: bool) -> None:
        self._looks.clear()
        if report:
            self._send(ForeignMpi())


def _read(pid: int, name: str) -> bytes:
    """Read a file about a process; empty if it has ended, or the system has no such files."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
