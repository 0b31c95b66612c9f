"""A real job of processes: a rendezvous server in the test, and workers that anything could have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from hvdgloo.rendezvous import RendezvousServer, generate_secret
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support import warm

MARKING = """
import json, os, signal, sys, threading, time
import numpy as np
import hvdgloo.numpy as hvd

def mark(name, text=""):
    path = os.path.join(os.environ["JOB_FOLDER"], name)
    with open(path + ".part", "w") as file:
        file.write(str(text))
    os.rename(path + ".part", path)
"""
"""The beginning of a program, with ``mark(name, text)``, which writes a file that ``Job.wait_for_file`` waits for."""


@dataclass(frozen=True)
class Ended:
    """The end of one worker."""

    returncode: int
    stdout: str
    stderr: str


def _start(
    arguments: Sequence[str], env: Mapping[str, str], out: IO[bytes], err: IO[bytes], python: str | None
) -> subprocess.Popen[bytes] | warm.Process:
    """An interpreter in a session of its own. Without a ``python`` it is a warm one; not every program needs torch."""
    with open(os.devnull, "rb") as null:
        if python is None and sys.platform == "linux":
            fds = {"stdin": null.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
            torch = "torch" in arguments[-1] or env.get("HVDGLOO_CPU_OPERATIONS") == "gloo"
            return warm.Process(arguments, env=env, modules=() if torch else warm.NUMPY, **fds)
        return subprocess.Popen(
            [python or sys.executable, *arguments], env=env, stdin=null, stdout=out, stderr=err, start_new_session=True
        )


class Job:
    """``size`` workers that run ``code``, with ranks given as a launcher gives them.

    Args:
        code: a program; ``import hvdgloo.numpy as hvd`` and the like are its own affair.
        folder: for the workers' output; they find its path in ``JOB_FOLDER``.
        fresh: in interpreters of their own, where a fork of ``tests.support.warm`` would do otherwise: for tests of an
            interpreter's start and end, and of what is not to be imported.
        python: an interpreter, such as ``warm.python`` gives, instead of that for torch or numpy.
        elastic: the workers get their ranks from it, and ``add`` starts more.
        environ: further variables.
    """

    def __init__(
        self,
        size: int,
        code: str,
        folder: Path,
        *,
        fresh: bool = False,
        python: str | None = None,
        elastic: ElasticEpochs | None = None,
        **environ: str,
    ) -> None:
        self._folder, self._code = folder, textwrap.dedent(code)
        self._python = sys.executable if fresh and python is None else python
        self._secret = generate_secret()
        self._environ = environ
        self._elastic = elastic is not None
        hosts = None if self._elastic else [("localhost", size)]
        self._server = RendezvousServer(secret=self._secret, hosts=hosts, elastic=elastic)
        self._server.start()
        self.workers: list[subprocess.Popen[bytes] | warm.Process] = []
        for _ in range(size):
            self.add()

    def add(self, **environ: str) -> None:
        """One more worker."""
        number = len(self.workers)
        variables = {
            **os.environ,
            "HVDGLOO_RENDEZVOUS": self._server.endpoint,
            "HVDGLOO_SECRET": self._secret.hex(),
            **({} if self._elastic else {"HVDGLOO_RANK": str(number)}),
            "HVDGLOO_ADDRESS": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "JOB_FOLDER": str(self._folder),
            **self._environ,
            **environ,
        }
        folder = self._folder
        with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
            self.workers.append(_start(["-u", "-c", self._code], variables, out, err, self._python))

    def wait(self, timeout: float = 30.0) -> list[Ended]:
        """Wait for every worker's end.

        Raises:
            AssertionError: one has not ended in time; with the output of all.
        """
        deadline = time.monotonic() + timeout
        for rank, worker in enumerate(self.workers):
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                shown = "\n".join(f"--- {r}: {self.output(r)}" for r in range(len(self.workers)))
                raise AssertionError(f"rank {rank} has not ended within {timeout:g} s\n{shown}") from None
        return [self.output(rank) for rank in range(len(self.workers))]

    def succeed(self, timeout: float = 30.0) -> list[Ended]:
        """Wait for all workers, which must end with status 0."""
        ended = self.wait(timeout)
        assert [each.returncode for each in ended] == [0] * len(ended), ended
        return ended

    def output(self, rank: int) -> Ended:
        """Return a worker's output so far, and its status (None-safe: 999 while it runs)."""
        status = self.workers[rank].poll()
        texts = [(self._folder / f"{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
        return Ended(999 if status is None else status, *texts)

    def wait_for_file(self, name: str, timeout: float = 30.0) -> str:
        """Wait until a worker has written a file (by renaming it into place); its text."""
        path = self._folder / name
        deadline = time.monotonic() + timeout
        while not path.exists():
            over = time.monotonic() > deadline or all(worker.poll() is not None for worker in self.workers)
            if over and not path.exists():  # which a worker may have written before it ended
                raise AssertionError(f"{name} was not written: {[self.output(r) for r in range(len(self.workers))]}")
            time.sleep(0.01)
        return path.read_text()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self.workers:
            try:
                os.killpg(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            worker.wait()
        self._server.stop()
