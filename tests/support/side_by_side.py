"""Several targets of make at a time, the output of each in one piece: ``side_by_side.py test-mxnet test-pygloo``.

A target's output is printed when it has ended, then its time; at the end comes a table of all. A target whose last
line is ``<target>: skipped, <reason>`` is told as skipped. The exit status is 0 if none has failed. Nothing beside the
standard library is needed.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO


@dataclass
class Part:
    """One target: running, and after :meth:`end` what became of it.

    Attributes:
        wall_s: seconds that it took.
        processor_s: seconds of processor time, of all processes that it has waited for.
    """

    target: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0
    skipped: str = ""

    def end(self, status: int, processor_s: float) -> None:
        self.process.returncode = self.status = status  # waited for by os.wait4, of which Popen does not know
        self.wall_s = time.monotonic() - self.started
        self.processor_s = processor_s
        last = self.text().strip().rpartition("\n")[2]
        if status == 0 and last.startswith(f"{self.target}: skipped"):
            self.skipped = last.removeprefix(f"{self.target}: ")

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode("utf-8", "replace")

    @property
    def outcome(self) -> str:
        return f"FAILED with status {self.status}" if self.status else self.skipped or "passed"

    def line(self) -> str:
        return f"{self.target:20} {self.wall_s:6.0f} s {self.processor_s:6.0f} s of processor time  {self.outcome}"


def run(targets: Sequence[str], jobs: int, make: Sequence[str]) -> int:
    """Run all targets, at most ``jobs`` at a time, in this order.

    Args:
        make: the command that each target is added to.

    Returns:
        0, or 1 if one of them failed; the others are run all the same.
    """
    started = time.monotonic()
    waiting = list(targets)
    running: dict[int, Part] = {}
    ended: list[Part] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                part = _start(waiting.pop(0), make)
                running[part.process.pid] = part
                print(f"{part.target}: started", flush=True)
            ended.append(_wait(running))
            _show(ended[-1])
    finally:
        # Ctrl-C reaches all of them, and they end; what they have said is not lost.
        while running:
            try:
                part = _wait(running)
            except ChildProcessError:  # the interrupt came just after it was collected, so how it ended is not known
                _, part = running.popitem()
                part.end(-signal.SIGINT, 0.0)
            _show(part)
    print(f"{'=' * 20} {time.monotonic() - started:.0f} s")
    for part in sorted(ended, key=lambda part: targets.index(part.target)):
        print(part.line(), flush=True)
    return 1 if any(part.status for part in ended) else 0


def _start(target: str, make: Sequence[str]) -> Part:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - _show closes it
    process = subprocess.Popen([*make, target], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    return Part(target, process, output)


def _wait(running: dict[int, Part]) -> Part:
    """The next part that ends, which is then no longer among those that run."""
    pid, status, usage = os.wait4(-1, 0)
    part = running.pop(pid)
    part.end(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
    return part


def _show(part: Part) -> None:
    text = part.text()
    part.output.close()
    print(f"{'=' * 20} {part.target}", text.rstrip("\n"), part.line(), sep="\n", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time (default: cores)")
    parser.add_argument("--make", default=shutil.which("make") or "make", help="the program that is given each target")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    chosen = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # tests print what a terminal may not know
    return run(chosen.targets, chosen.jobs, [chosen.make, "--no-print-directory"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
