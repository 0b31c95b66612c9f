"""The launcher with several agents, and with agents that do not do what they should. Pains 15, 20, 22.

Agents are started by a Spawner of the test, so "hosts" are agents of this machine.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest

from hvdgloo.errors import LaunchError
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Output, Times
from hvdgloo.runner.launch import launch
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.processes.worker_process import WINDOW
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.base import AgentStream
from hvdgloo.runner.transport.local import LocalSpawner, LocalStream
from tests.support.launching import clean_environment, wait_for
from tests.support.threads import Task

AGENT = f"exec {sys.executable} -m hvdgloo.runner.agent"


class ScriptSpawner(LocalSpawner):
    """Starts a shell script for each host instead of its agent."""

    def __init__(self, scripts: Mapping[str, str]) -> None:
        self.scripts = scripts

    def start(self, host: HostEntry) -> AgentStream:
        return LocalStream(["sh", "-c", self.scripts.get(host.name, AGENT)])


def job(
    program: str,
    folder: Path,
    scripts: Mapping[str, str] | None = None,
    *,
    out: TextIO | None = None,
    err: io.StringIO | None = None,
    **options: Any,
) -> tuple[LaunchResult, str, str]:
    """Run a program on hosts a (2 slots) and b (1 slot)."""
    settings: dict[str, Any] = {
        "command": (sys.executable, "-c", program),
        "hosts": (HostEntry("a", 2), HostEntry("b", 1)),
        "np": 3,
        "cwd": str(folder),
        "environ": clean_environment(),
        "secret": b"s" * 32,
        "times": Times(start_timeout=20.0),
    }
    out, err = out or io.StringIO(), err or io.StringIO()
    try:
        around = Surroundings(out, err, spawner=ScriptSpawner(scripts or {}))
        report = launch(LaunchSpec(**{**settings, **options}), around)
    except LaunchError as error:
        error.args = (f"{error}\n--- {err.getvalue()}",)
        raise
    return report, out.getvalue() if isinstance(out, io.StringIO) else "", err.getvalue()


def test_ranks_are_spread_over_hosts(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    program = f"import os; print(*(os.environ['HVDGLOO_' + n] for n in {names}), os.environ['MASTER_PORT'])"
    report, out, _ = job(program, tmp_path)
    assert report.outcome.exit_code == 0
    rows = sorted(line.partition(">:")[2].split() for line in out.splitlines())
    assert [row[:-1] for row in rows] == [
        ["0", "0", "2", "0", "2", "a"],
        ["1", "1", "2", "0", "1", "a"],
        ["2", "0", "1", "1", "2", "b"],
    ]
    assert len({row[-1] for row in rows}) == 1


def test_pain_22_a_failure_on_one_host_stops_the_others(tmp_path: Path) -> None:
    program = "import os, sys, time; os.environ['RANK'] == '2' and sys.exit(9); time.sleep(60)"
    started = time.monotonic()
    report, _, _ = job(program, tmp_path)
    assert time.monotonic() - started < 10
    assert report.outcome.first is not None
    assert (report.outcome.first.rank, report.outcome.first.host, report.outcome.exit_code) == (2, "b", 9)
    assert report.outcome.statuses == {0: -15, 1: -15, 2: 9}


def test_pain_20_a_host_that_never_answers_is_named_while_waiting_and_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"1 host not ready within 2 s \(--start-timeout\)") as caught:
        job("pass", tmp_path, {"b": "exec sleep 100"}, times=Times(start_timeout=2.0), output=Output(verbose=True))
    text, _, said = str(caught.value).partition("\n--- ")
    assert "  connecting: b: the command that connects to it runs, but nothing has answered yet" in text
    assert re.search(r"1 of 2 hosts ready after 1\.\d s; still waiting for b \(connecting for 1", said)
    assert re.search(r"a: up after .* \(\S+, agent is process \d+\)", said)


def test_an_agent_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match="b: its agent ended with status 1: no such module hvdgloo"):
        job("pass", tmp_path, {"b": "echo no such module hvdgloo >&2; exit 1"})
    assert time.monotonic() - started < 10


def test_what_a_login_shell_prints_is_shown_and_not_parsed(tmp_path: Path) -> None:
    report, out, err = job("print('fine')", tmp_path, {"a": f"echo Welcome to a; {AGENT}"})
    assert report.outcome.exit_code == 0
    assert "[a] Welcome to a" in err
    assert out.count("fine") == 3


def test_another_version_is_refused(tmp_path: Path) -> None:
    program = "import os, hvdgloo.runner.agent.agent as agent; agent.__version__ = '0.0.1'; os._exit(agent.main())"
    with pytest.raises(LaunchError, match=r"b: it has hvdgloo 0\.0\.1, the launcher has"):
        job("pass", tmp_path, {"b": f'exec {sys.executable} -c "{program}"'})


def test_garbage_in_the_stream_is_a_lost_agent(tmp_path: Path) -> None:
    preamble = "printf '\\000hvdgloo agent: frames follow\\nthis is no frame at all'; exec sleep 100"
    with pytest.raises(LaunchError, match="the agent on host b cannot be understood"):
        job("pass", tmp_path, {"b": preamble})


def test_a_host_that_is_lost_in_the_middle_fails_the_job(tmp_path: Path) -> None:
    agent = f"echo $$ > {tmp_path}/agent; {AGENT}"
    program = f"import os, time; open('{tmp_path}/ready' + os.environ['RANK'], 'w').write('1'); time.sleep(60)"
    running = Task(lambda: job(program, tmp_path, {"b": agent})[0])
    for rank in range(3):
        wait_for((tmp_path / f"ready{rank}").exists)
    os.kill(int((tmp_path / "agent").read_text()), 9)
    outcome = running.result(30).outcome
    first = outcome.first
    assert first is not None
    assert (first.rank, first.host) == (None, "b")
    assert outcome.exit_code == 1


def test_a_host_that_is_lost_while_another_one_still_connects_is_the_one_that_is_blamed(tmp_path: Path) -> None:
    """And not the one that had not come yet, with a time that has not passed."""
    err = io.StringIO()

    def kill() -> None:
        wait_for(lambda: "a: up after" in err.getvalue(), what="host a")
        os.kill(int((tmp_path / "agent").read_text()), 9)

    thread = Task(kill)
    scripts = {"a": f"echo $$ > {tmp_path}/agent; {AGENT}", "b": "exec sleep 100"}
    with pytest.raises(LaunchError) as caught:
        job("pass", tmp_path, scripts, err=err, times=Times(start_timeout=60.0), output=Output(verbose=True))
    thread.result()
    text = str(caught.value).partition("\n--- ")[0]
    assert text.startswith("the job could not be started: the agent on host a "), text
    assert "not ready within" not in text


def test_forty_workers_on_one_machine(tmp_path: Path) -> None:
    program = "import os; print(os.environ['RANK'] * 100)"
    report, out, _ = job(program, tmp_path, hosts=(HostEntry("a", 20), HostEntry("b", 20)), np=40)
    assert report.outcome.exit_code == 0
    assert sorted(int(line[1 : line.index("]")]) for line in out.splitlines()) == list(range(40))


SWEEPS_FOR_LONG = f"""exec {sys.executable} -c '
import os
from hvdgloo.runner.agent import agent; from hvdgloo.runner.processes import reaper as sweep
def end_abandoned(agent_id, grace, rest):
    rest(9.0)
    return {{4242}}
sweep.end_abandoned = end_abandoned
os._exit(agent.main())'"""


def test_pain_24_a_sweep_that_takes_long_shows_life_and_tells_what_is_left(tmp_path: Path) -> None:
    """Longer than the silence that an agent or its launcher bears."""
    again = f"if test -e {tmp_path}/agent; then {SWEEPS_FOR_LONG}\nelse echo $$ > {tmp_path}/agent; {AGENT}; fi"
    program = (
        "import os, signal\n"
        "agent, watchdog = os.getppid(), int(open('agent').read())\n"
        "if os.environ['HVDGLOO_HOSTNAME'] == 'b':\n"
        "    for victim, signum in ((agent, 19), (watchdog, 9), (agent, 9)): os.kill(victim, signum)\n"
        "signal.pause()"
    )
    report, _, err = job(program, tmp_path, {"b": again})
    assert report.outcome.exit_code == 1
    assert "processes 4242 on b cannot be killed" in err
    assert "a second time" not in err


BREAKS_AT_ITS_END = f"""exec {sys.executable} -c '
import os
from hvdgloo.runner.agent import agent; from hvdgloo.runner.processes import reaper as sweep
sweep.end_all = lambda *_, **__: os._exit(7)
os._exit(agent.main())'"""


TWO_GPUS = f"""exec {sys.executable} -c '
import os
from hvdgloo._platform import machine
from hvdgloo.runner.agent import agent
machine.visible_gpus = lambda _: 2
os._exit(agent.main())'"""


def test_an_agent_that_is_not_needed_may_break_at_its_good_bye(tmp_path: Path) -> None:
    """A host's number of slots is known once its agent is there, and then the first host may be enough."""
    scripts = {"a": TWO_GPUS, "b": BREAKS_AT_ITS_END}
    report, out, err = job("print('ran')", tmp_path, scripts, hosts=(HostEntry("a"), HostEntry("b")), np=2)
    assert report.outcome.exit_code == 0, err
    assert {slot.hostname for slot in report.slots} == {"a"}
    assert ":ran" in out


def test_an_agent_that_is_needed_may_not(tmp_path: Path) -> None:
    report, *_ = job("print('ran')", tmp_path, {"b": BREAKS_AT_ITS_END})
    assert report.summary() == "the job failed: the agent on host b exited with status 7"


LOSES_ITS_AGENT = """
import os, pathlib, signal, sys
if os.environ["HVDGLOO_HOSTNAME"] == "b":
    signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("saved").touch(), os._exit(5)))
    pathlib.Path("ready").touch()
    signal.pause()
while not os.path.exists("ready"):
    signal.sigtimedwait([], 0.01)
agent, watchdog = os.getppid(), int(open("watchdog").read())
if os.environ["RANK"] == "0":
    for victim, signum in VICTIMS:
        os.kill(victim, signum)
signal.pause()
"""


@pytest.mark.parametrize("victims", ["[(agent, 9)]", "[(agent, 19), (watchdog, 9), (agent, 9)]"], ids=["agent", "host"])
def test_agents_that_share_process_ids_leave_each_other_s_workers_alone(tmp_path: Path, victims: str) -> None:
    """Containers may (hostPID), and so do hosts that lead to one machine. A sweep ended the workers of both at once,
    and the job's failure was blamed on a rank of the healthy host."""
    scripts = {"a": f"echo $$ > {tmp_path}/watchdog; {AGENT}"}
    report, *_ = job(LOSES_ITS_AGENT.replace("VICTIMS", victims), tmp_path, scripts)
    assert report.outcome.first is not None
    assert (report.outcome.first.rank, report.outcome.first.host) == (None, "a"), report.summary()
    assert (tmp_path / "saved").exists(), "the worker of b had time to end"
    assert report.outcome.statuses[2] == 5


class KeptBySystem(LocalStream):
    """As the system keeps a process that waits for a device: kill does nothing."""

    def kill(self) -> None:
        pass


def test_a_command_that_cannot_be_killed_keeps_no_launcher_from_ending() -> None:
    stream = KeptBySystem(["sleep", "100"])
    try:
        AgentLink(HostState(HostEntry("a"), 0.0, 3.0), stream, patience=0.1).close()
        assert stream.poll() is None
        assert stream.stdin.closed
        assert stream.stdout.closed
        assert stream.stderr.closed
    finally:
        LocalStream.kill(stream)
        stream.wait(5)


SPINS = """
import time
from hvdgloo.runner.agent import agent

keep_time = agent.Agent._keep_time

def busy(self):
    if self._workers and not hasattr(self, "was_busy"):
        self.was_busy = True
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            pass
    keep_time(self)

agent.Agent._keep_time = busy
raise SystemExit(agent.main())
"""


def test_an_agent_here_that_says_nothing_because_it_gets_no_core_is_not_lost(tmp_path: Path) -> None:
    """To the launcher, one that waits for a core looks like one that uses it for something else."""
    (tmp_path / "spins.py").write_text(SPINS)
    scripts = {"a": f"exec {sys.executable} {tmp_path}/spins.py"}
    report, *_ = job("print(1)", tmp_path, scripts, times=Times(start_timeout=20.0, heartbeat_timeout=1.0))
    assert report.outcome.exit_code == 0, report.summary()


@pytest.mark.parametrize(
    ("command", "excused"), [("while :; do :; done", True), ("kill -STOP $$", False), ("sleep 60", False)]
)
def test_only_an_agent_that_would_run_if_it_could_is_excused(command: str, excused: bool) -> None:
    stream = LocalStream(["sh", "-c", f"sh -c '{command}' & wait"])
    try:
        wait_for(lambda: psutil.Process(stream.pid).children(), what="the child")
        # While it starts, the child itself may wait for a core.
        wait_for(lambda: all(stream.starved() is excused for _ in range(20)), what="the same answer 20 times")
    finally:
        stream.kill()
        AgentLink(HostState(HostEntry("a"), 0.0, 3.0), stream).close()


FLOOD = """
import os, select
rank, waits, written = os.environ["RANK"], False, 0
line = b"y" * 999 + b"\\n"
os.set_blocking(1, False)
while written < TOTAL:
    if not waits and not select.select([], [1], [], 1)[1]:  # nothing was read for a second
        with open(f"{rank}.new", "w") as file:
            file.write(str(written))
        os.rename(f"{rank}.new", f"full{rank}")
        os.set_blocking(1, True)
        waits = True
    written += os.write(1, line[written % len(line):])
"""


def test_pain_25_what_is_not_read_stays_with_the_workers(tmp_path: Path) -> None:
    """Beyond the backlog neither the launcher nor the agents take in more; and nothing is lost once it is read."""
    total, backlog, pipe = 8_000_000, 1_000_000, 65536
    reading, writing = os.pipe()
    options: dict[str, Any] = {"output": Output(backlog=backlog), "hosts": (HostEntry("a", 2),), "np": 2}
    with os.fdopen(writing, "w") as out:
        ending = Task(lambda: job(FLOOD.replace("TOTAL", str(total)), tmp_path, out=out, **options))
        full = [tmp_path / f"full{rank}" for rank in range(2)]
        try:
            wait_for(lambda: all(file.exists() for file in full), 20, "workers that have to wait")
            # Both stop when the two together have filled it; what is on its way in the meantime comes on top.
            assert sum(int(file.read_text()) for file in full) < backlog + 2 * (2 * WINDOW + 2 * pipe)
        finally:
            expected, count = 2 * total // 1000 * len(f"[0]<stdout>:{'y' * 999}\n"), 0
            while count < expected and select.select([reading], [], [], 20)[0]:
                count += len(os.read(reading, 1 << 20))
        report, *_ = ending.result()
    os.close(reading)
    assert (report.outcome.exit_code, count) == (0, expected)
