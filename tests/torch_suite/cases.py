"""torch's own test cases of torch.distributed, on one backend: ``python -m tests.torch_suite.cases BACKEND``.

torch's wheel has them (``torch.testing._internal.distributed.distributed_test``). Importing them takes longer than most
of them do, so this process imports them once; each case then has processes of its own, which are forked. Each outcome
is printed as a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch.testing._internal.common_device_type  # noqa: F401 - otherwise imported by each rank
from torch.testing._internal import common_distributed

from tests.torch_suite.outcome import FAILED, PASSED, SKIPPED, Outcome

LIMIT_S = 120.0
"""Seconds after which a case is killed. torch gives up before that, and prints where each rank is."""

RANKS = 4
"""Ranks of most cases: some need four, or an even number."""

MANY_RANKS = 8
"""Ranks of cases that torch skips with fewer."""

FORK = multiprocessing.get_context("fork")


class BackendName(str):
    """A backend's name that passes for gloo.

    torch's cases compare it with the names of torch's own backends to decide whether to run. Those that are for MPI
    only run as well: it is the other backend for CPU tensors.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return other != "mpi" and not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def load(backend: str) -> type[unittest.TestCase]:
    """Import torch's cases for a backend."""
    os.environ["BACKEND"] = backend
    common_distributed.DistTestCases.backend_feature["plugin"].add(backend)
    # The module reads the name when it is imported. Functions that read it later get the plain one.
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": BackendName(backend)}):
        distributed_test = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    if backend == "hvdgloo" or os.environ.get("HVDGLOO_AS_GLOO"):
        importlib.import_module("hvdgloo.torch.distributed._group")  # otherwise imported by each rank
        # Cases of these backends look for the profiler's events, which only operations in C++ record.
        for backends in (
            distributed_test.PROFILING_SUPPORTED_BACKENDS,
            distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
        ):
            backends.remove("gloo")

    class TestDistBackend(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(FORK.Process)

    return TestDistBackend


def names_of(cases: type[unittest.TestCase]) -> list[str]:
    """Return the names of all cases."""
    return unittest.TestLoader().getTestCaseNames(cases)


def _run_here(cases: type[unittest.TestCase], name: str, ranks: int, folder: Path, answer: Connection) -> None:
    """Run a case in this process, which was forked for it."""
    os.setsid()  # so that all its processes can be killed together
    os.environ["WORLD_SIZE"] = str(ranks)
    tempfile.tempdir = str(folder)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    result = unittest.TestResult()
    cases(name).run(result)
    if result.skipped:
        answer.send((SKIPPED, result.skipped[0][1]))
    elif result.wasSuccessful():
        answer.send((PASSED, ""))
    else:
        answer.send((FAILED, "\n".join(text for _, text in (*result.errors, *result.failures))))


@dataclass
class Running:
    """A case that was started."""

    name: str
    ranks: int
    process: Any
    answer: Connection
    folder: tempfile.TemporaryDirectory[str]
    began: float

    @classmethod
    def start(cls, cases: type[unittest.TestCase], name: str, ranks: int) -> Running:
        folder = tempfile.TemporaryDirectory()
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run_here, args=(cases, name, ranks, Path(folder.name), there))
        process.start()
        there.close()
        return cls(name, ranks, process, here, folder, time.monotonic())

    @property
    def deadline(self) -> float:
        return self.began + LIMIT_S

    def end(self) -> Outcome:
        """Kill the processes that are left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        try:
            result, text = self.answer.recv()
        except EOFError:
            result, text = FAILED, f"ended with status {self.process.exitcode}, after at most {LIMIT_S:g} s"
        if result == FAILED:
            text += "\n" + (Path(self.folder.name) / "output").read_text(errors="replace")
        self.answer.close()
        self.folder.cleanup()
        return Outcome(self.name, self.ranks, result, text, time.monotonic() - self.began)


def run(cases: type[unittest.TestCase], names: list[str], jobs: int) -> Iterator[Outcome]:
    """Run cases, some of them at a time."""
    too_few = common_distributed.TEST_SKIPS["small_worldsize"].message
    left, running = [(name, RANKS) for name in reversed(names)], []
    while left or running:
        while left and len(running) < jobs:
            running.append(Running.start(cases, *left.pop()))
        patience = min(each.deadline for each in running) - time.monotonic()
        ended = wait([each.process.sentinel for each in running], max(0.0, patience))
        for each in list(running):
            if each.process.sentinel in ended or time.monotonic() >= each.deadline:
                running.remove(each)
                outcome = each.end()
                if outcome.text == too_few and each.ranks == RANKS:
                    left.append((each.name, MANY_RANKS))
                else:
                    yield outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("names", nargs="*", metavar="CASE", help="without, all")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    arguments = parser.parse_args()
    os.environ["WORLD_SIZE"] = str(RANKS)
    cases = load(arguments.backend)
    known = names_of(cases)
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"torch has no {', '.join(sorted(unknown))}")
    for outcome in run(cases, arguments.names or known, arguments.jobs):
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
