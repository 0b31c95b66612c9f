"""``hvdgloo-run doctor``: what a job would meet on its hosts, without starting one.

Agents are started in the same way as for a job, look round (``examine``) and end. What they found is judged by
``diagnosis`` and shown by ``doctor_report``.
"""

from __future__ import annotations

import secrets
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from typing import TextIO

from hvdgloo.runner.console import Console
from hvdgloo.runner.diagnosis import Visit, compare_clocks, diagnose
from hvdgloo.runner.display import StartDisplay
from hvdgloo.runner.doctor_report import all_well, as_json, as_text
from hvdgloo.runner.examine import Facts, examine
from hvdgloo.runner.frames import Examine
from hvdgloo.runner.launch import COMMAND_LINE_SIGNALS, passed_on
from hvdgloo.runner.spawners import Spawner
from hvdgloo.runner.spec import Host, LaunchSpec
from hvdgloo.runner.supervisor import CheckUp, Supervisor
from hvdgloo.runner.ways import choose_spawner

_WIDEST = 120


def run(
    spec: LaunchSpec, *, python: str, stdout: TextIO, stderr: TextIO, json: bool = False, spawner: Spawner | None = None
) -> int:
    """Look at all hosts of a job and print what was found.

    Args:
        spec: the job; its command may be empty.
        python: the launcher's interpreter, which hosts replace by their own.
        json: print JSON.
        spawner: how agents are started; by default chosen from the hosts.

    Returns:
        the exit status: 0 unless something was found that will stop a job.

    Raises:
        JobFailedError: a signal came first.
    """
    question = Examine(spec.cwd, *needs(spec.command, python))
    done = _check_up(spec, spawner or choose_spawner(spec.hosts, spec.reach), question, stderr)
    launcher = examine(spec.environ, spec.cwd)
    visits = [_visit(host, done) for host in spec.hosts]
    findings = diagnose(visits, launcher, spec.cwd)
    if json:
        stdout.write(as_json(visits, findings))
    else:
        stdout.write(as_text(visits, findings, _width(stdout)))
    stdout.flush()
    return 0 if all_well(findings) else 1


def needs(command: Sequence[str], python: str) -> tuple[Sequence[str], Sequence[str]]:
    """The files and programs that a command needs on every host, as far as its words show it."""
    if not command:
        return (), ()
    scripts = [word for word in command[1:2] if word.endswith(".py")] if command[0] == python else []
    return scripts, [] if command[0] == python else [command[0]]


def _check_up(spec: LaunchSpec, spawner: Spawner, question: Examine, stderr: TextIO) -> CheckUp:
    job_id = secrets.token_hex(16)
    console = Console(0, stdout=stderr, stderr=stderr)
    try:
        display = StartDisplay([host.name for host in spec.hosts], console, environ=spec.environ, verbose=spec.verbose)
        with Supervisor(spec, spawner, spec.hosts, job_id, _Observer(console, display)) as supervisor:
            console.on_broken = partial(supervisor.interrupt, signal.SIGPIPE)
            with passed_on(COMMAND_LINE_SIGNALS, supervisor.interrupt), display:
                return supervisor.check_up(question)
    finally:
        console.close()


class _Observer:
    """Shows how far hosts have come. There are no workers."""

    congested = False

    def __init__(self, console: Console, display: StartDisplay) -> None:
        self.output = console.output
        self.notice = console.notice
        self.culprit = console.culprit
        self.step = display.step
        self.suspend = display.suspend
        self.tick = display.tick

    def result(self, rank: int, data: bytes) -> None:
        raise AssertionError("no task was started")


def _visit(host: Host, done: CheckUp) -> Visit:
    answer = done.answers.get(host)
    if answer is None:
        problem, _, mend = done.problems[host].partition("; ")
        return Visit(host.name, host.slots, problem=problem, mend=mend)
    examined = answer.examined
    return Visit(
        host.name,
        host.slots,
        facts=Facts.from_json(examined.facts),
        clock=compare_clocks(answer.sent, examined.asked, examined.answered, answer.received),
        identity=answer.hello.identity,
    )


def _width(stdout: TextIO) -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST) if stdout.isatty() else 100
