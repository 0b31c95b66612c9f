"""A job on "hosts" of this machine that get on only when the test says so: ``python -m tests.support.gated_job``.

Each step of each host has a gate, a named pipe ``<host>.<step>`` in the working directory; where there is none, it is
open. What goes into the pipe ``<host>.words`` is printed before, like a login's greeting. The real launcher runs, on
whatever this program's standard streams are.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from hvdgloo.errors import HvdglooError
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Output, Reach, Times
from hvdgloo.runner.launch import launch
from hvdgloo.runner.protocol.frames import PREAMBLE
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.base import AgentStream
from hvdgloo.runner.transport.local import LocalSpawner, LocalStream

_PYTHON = (
    f"import os; os.write(1, {PREAMBLE!r}); "
    "gate = {gate!r}; os.path.exists(gate) and open(gate).read(); "
    "from hvdgloo.runner.agent import agent; os._exit(agent.main(b''))"
)
_SHELL = """
cd "$1"
if [ -p "$2.words" ]; then cat "$2.words" >&2; fi
if [ -p "$2.connecting" ]; then read answer < "$2.connecting"; fi
exec "$3" -c "$4"
"""


class GatedSpawner(LocalSpawner):
    """Agents that wait at gates."""

    def start(self, host: HostEntry) -> AgentStream:
        program = _PYTHON.format(gate=f"{host.name}.python")
        return LocalStream(["sh", "-c", _SHELL, "sh", os.getcwd(), host.name, sys.executable, program])


class Gates:
    """The test's side: which hosts wait at which step."""

    def __init__(self, folder: Path, *places: str) -> None:
        self.folder = folder
        for place in places:
            os.mkfifo(folder / place)

    def open(self, place: str, words: str = "") -> None:
        """Let a host get on, as soon as it is there."""
        with open(self.folder / place, "w") as gate:
            gate.write(words + "\n")

    @staticmethod
    def arguments(*hosts: str, program: str = "print('done')", verbose: bool = False, timeout: float = 60) -> list[str]:
        """For Python, to run the job."""
        return ["-m", "tests.support.gated_job", *(["--verbose"] if verbose else []), f"--timeout={timeout}",
                f"--program={program}", *hosts]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("hosts", nargs="+")
    options = parser.parse_args()
    spec = LaunchSpec(
        command=(sys.executable, "-c", options.program),
        hosts=tuple(HostEntry(name, 1) for name in options.hosts),
        np=len(options.hosts),
        cwd=os.getcwd(),
        environ=dict(os.environ),
        secret=b"s" * 32,
        times=Times(start_timeout=options.timeout),
        output=Output(verbose=options.verbose),
        reach=Reach(agent_command=("gates", "{host}")),  # which may lead to one machine several times
    )
    try:
        report = launch(spec, Surroundings(sys.stdout, sys.stderr, spawner=GatedSpawner()))
    except HvdglooError as error:
        sys.stderr.write(f"hvdgloo-run: {error}\n")
        return getattr(error, "exit_code", 1)
    sys.stderr.write("".join(f"hvdgloo-run: {line}\n" for line in report.summary().splitlines()))
    return report.outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())


def shell_line(*arguments: str) -> str:
    """The same as a person would type it."""
    return shlex.join([sys.executable, *arguments])
