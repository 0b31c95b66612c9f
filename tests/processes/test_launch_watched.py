"""Pain 20: a start that can be watched, on real terminals, with hosts that get on only when the test lets them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.architecture.source import ROOT
from tests.support.gated_job import Gates, shell_line
from tests.support.hosts import Bed
from tests.support.launching import clean_environment, run_command
from tests.support.terminal import Terminal, terminal


def environment(**more: str) -> dict[str, str]:
    return {**clean_environment(), "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **more}


@pytest.fixture
def show(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """``show(*hosts, ...)``: a gated job on a terminal."""
    with ExitStack() as stack:

        def start(*hosts: str, env: dict[str, str] | None = None, columns: int = 100, rows: int = 30, **how: object):  # type: ignore[no-untyped-def]
            arguments = Gates.arguments(*hosts, **how)  # type: ignore[arg-type]
            made = terminal(*arguments, env=environment(**(env or {})), cwd=tmp_path, columns=columns, rows=rows)
            return stack.enter_context(made)

        yield start


def test_a_quick_start_shows_nothing(show: Callable[..., Terminal]) -> None:
    screen = show("a", "b")
    assert screen.end() == 0
    assert b"starting on" not in screen.raw
    assert b"\x1b" not in screen.raw
    assert sorted(line for line in screen.lines if "OMP_NUM" not in line) == ["[0]<stdout>:done", "[1]<stdout>:done"]


def test_each_host_and_its_step_until_all_is_well(show: Callable[..., Terminal], tmp_path: Path) -> None:
    gates = Gates(tmp_path, "a.connecting", "b.python")
    screen = show("a", "b", "c")
    screen.wait_for(
        r"(?m)^starting on 3 hosts, 2\.\d s\n"
        r"  a  connecting +\d\.\d s\n  b  python +\d\.\d s\n  c  up .*process \d+$"
    )
    gates.open("a.connecting")
    screen.wait_for(r"(?m)^  a  up ")
    before = screen.wait_for(r"starting on 3 hosts, (\S+) s")[1]
    screen.until(lambda: float(screen.wait_for(r"starting on 3 hosts, (\S+) s")[1]) > float(before), 10, "its clock")
    gates.open("b.python")
    assert screen.end() == 0
    # Nothing of it is left, nor a hole where it was.
    assert sorted(line for line in screen.lines if "OMP_NUM" not in line) == [f"[{r}]<stdout>:done" for r in range(3)]


def test_what_is_printed_meanwhile_stands_above_the_list(show: Callable[..., Terminal], tmp_path: Path) -> None:
    gates = Gates(tmp_path, "a.connecting", "b.words", "b.connecting")
    screen = show("a", "b")
    screen.wait_for("starting on 2 hosts")
    gates.open("b.words", "Welcome to b\nHave a good day")
    gates.open("b.connecting")
    screen.wait_for(
        r"^hvdgloo-run: \[b\] Welcome to b\nhvdgloo-run: \[b\] Have a good day\n"
        r"starting on 2 hosts.*\n  a  connecting.*\n  b  up"
    )
    gates.open("a.connecting")
    assert screen.end() == 0
    assert screen.lines[:2] == ["hvdgloo-run: [b] Welcome to b", "hvdgloo-run: [b] Have a good day"]
    assert "starting on" not in screen.text


def test_more_hosts_than_lines_are_counted(show: Callable[..., Terminal], tmp_path: Path) -> None:
    hosts = [f"h{number}" for number in range(24)]
    gates = Gates(tmp_path, *(f"{host}.connecting" for host in hosts))
    screen = show(*hosts)
    screen.wait_for("starting on 24 hosts, .* s: 24 connecting")
    gates.open("h0.connecting")
    screen.wait_for("starting on 24 hosts, .* s: 23 connecting, 1 up")
    assert [line.split()[0] for line in screen.lines[1:]] == ["h1", "h2", "h3", "h4", "h5"]
    screen.type("\x03")
    assert screen.end() == 130
    assert len(screen.lines) == 1
    assert screen.lines[0].startswith("hvdgloo-run: interrupted ")


def test_the_terminals_size_is_respected_also_when_it_changes(show: Callable[..., Terminal], tmp_path: Path) -> None:
    name = "a-host-whose-name-is-longer-than-most-of-them.example.org"
    Gates(tmp_path, f"{name}.connecting", "b.python")
    screen = show(name, "b", columns=100)
    screen.wait_for(rf"  {re.escape(name)}  connecting")
    screen.resize(50, 30)
    screen.wait_for(r"(?m)^  a-host-who\S*\.\.\.  connecting +\d+\S* s$")
    assert len([line for line in screen.lines if "starting on" in line]) == 1
    assert max(map(len, screen.lines)) < 50
    screen.resize(50, 2)
    screen.wait_for(r"^starting on 2 hosts[^\n]*$")
    screen.resize(120, 10)
    screen.wait_for(rf"  {re.escape(name)}  connecting")


def test_colours_unless_they_are_not_wanted(show: Callable[..., Terminal], tmp_path: Path) -> None:
    Gates(tmp_path, "a.connecting")
    coloured, plain = show("a", env={"NO_COLOR": ""}), show("a")
    for screen in (coloured, plain):
        screen.wait_for("  a  connecting")
    assert b"\x1b[33mconnecting\x1b[0m" in coloured.raw
    assert re.search(rb"\x1b\[\d*m", plain.raw) is None


def test_a_terminal_that_can_do_nothing_gets_lines(show: Callable[..., Terminal], tmp_path: Path) -> None:
    gates = Gates(tmp_path, "a.connecting")
    screen = show("a", env={"TERM": "dumb"}, verbose=True)
    screen.wait_for(r"0 of 1 host ready after 1\.\d s; still waiting for a \(connecting for 1\.\d s\)")
    gates.open("a.connecting")
    assert screen.end() == 0
    assert b"\x1b" not in screen.raw


def test_ctrl_z_leaves_the_terminal_to_the_shell(tmp_path: Path) -> None:
    gates = Gates(tmp_path, "a.connecting", "b.connecting")
    shell = Terminal(
        ["bash", "--norc", "--noprofile", "-i"], env=environment(PS1="shell> ", HISTFILE="/dev/null"), cwd=tmp_path
    )
    try:
        shell.wait_for("shell>$")
        shell.type("clear; " + shell_line(*Gates.arguments("a", "b")) + "\n")
        shell.wait_for(r"(?m)^starting on 2 hosts.*\n  a  connecting.*\n  b  connecting")
        shell.type("\x1a")
        shell.wait_for(r"(?m)Stopped[^\n]*\n(.*\n)*shell>$")
        assert "starting on" not in shell.text
        shell.type("fg\n")
        shell.wait_for(r"(?m)^starting on 2 hosts.*\n  a  connecting.*\n  b  connecting")
        assert "Stopped" in shell.text, "the list was drawn over what the shell had written"
        shell.type("\x1a")
        shell.wait_for(r"(?s)Stopped.*Stopped[^\n]*\n(.*\n)*shell>$")
        shell.type("bg\n")
        over = time.monotonic() + 1.5  # in the foreground the list would be drawn once a second
        shell.until(lambda: time.monotonic() > over, 10, "the time")
        assert "starting on" not in shell.text
        gates.open("a.connecting")
        gates.open("b.connecting")
        shell.wait_for(r"\[0\]<stdout>:done")
        shell.type("wait; exit\n")
        shell.end()
        assert "starting on" not in shell.text, "a job in the background draws on the shell's terminal"
    finally:
        shell.close()


def test_a_host_that_is_cut_off_and_comes_back(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    """With real ssh."""
    bed = make_bed(["h1", "h2", "h3"])
    bed["h3"].cut()
    argv = [sys.executable, "-m", "hvdgloo.runner", "-H", "h1:1,h2:1,h3:1", "--wait-for-hosts", "hostname"]
    env = {**bed["h1"].environment, "NO_COLOR": "1"}
    screen = Terminal(bed["h1"].enter(argv, cwd=tmp_path), env=env, cwd=tmp_path)
    try:
        screen.wait_for(
            r"(?m)^starting on 3 hosts, .*\n  h1  up .* h1, agent is process \d+\n"
            r"  h2  up .* h2, agent is process \d+\n  h3  connecting "
        )
        bed["h3"].reconnect()
        assert screen.end(40) == 0
        assert sorted(line for line in screen.lines if "OMP_NUM" not in line) == [
            f"[{rank}]<stdout>:h{rank + 1}" for rank in range(3)
        ]
    finally:
        screen.close()


def test_after_the_start_timeout_who_is_missing_at_which_step(tmp_path: Path) -> None:
    Gates(tmp_path, "a.connecting", "b.python", "d.connecting")
    done = run_command(
        [sys.executable, *Gates.arguments("a", "b", "c", "d", timeout=1.5)], env=environment(), cwd=tmp_path, timeout=40
    )
    assert done.returncode == 1
    assert "hvdgloo-run: 3 hosts not ready within 1.5 s " in done.stderr
    assert re.search(r"(?m)^  connecting: a, d: .*; run the same command by hand$", done.stderr)
    assert re.search(r"(?m)^  python: b: Python runs there, but hvdgloo's agent is not up yet: .*", done.stderr)


def test_a_worker_that_ends_without_init_is_the_failure(tmp_path: Path) -> None:
    """Not after the start timeout, but at once; and it is named, not those that waited for it."""
    program = (
        "import os, sys, hvdgloo.numpy as hvd\n"
        "if os.environ['RANK'] == '1': sys.exit(0)\n"
        "hvd.init()"
    )  # fmt: skip
    done = run_command(
        [sys.executable, *Gates.arguments("a", "b", "c", program=program)], env=environment(), cwd=tmp_path, timeout=40
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdgloo-run: the job failed")]
    assert len(lines) == 1
    assert re.search(r": rank 1 on host b ended without .*, in which [12] other ranks? waited for it$", lines[0])


def test_a_worker_that_does_not_call_init_in_time_is_the_failure(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "if os.environ['RANK'] != '0':\n"
        "    print('loading data', flush=True)\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "import hvdgloo.numpy as hvd\n"
        "hvd.init()"
    )
    done = run_command(
        [sys.executable, *Gates.arguments("a", "b", "c", program=program, timeout=4)],
        env=environment(),
        cwd=tmp_path,
        timeout=50,
    )
    assert done.returncode == 1
    assert re.search(
        r"the job failed: rank 1 on host b had not .* within 4 s .*, nor had rank 2 \(c, process \d+\)\n"
        "hvdgloo-run: Its last lines were:\nhvdgloo-run:   loading data",
        done.stderr,
    ), done.stderr


def test_a_log_gets_no_escapes(tmp_path: Path) -> None:
    gates = Gates(tmp_path, "a.connecting")
    with subprocess.Popen(
        [sys.executable, *Gates.arguments("a", verbose=True)],
        env=environment(TERM="xterm"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        seen = b""
        while b"still waiting for a" not in seen:
            seen += os.read(process.stdout.fileno(), 4096)
        gates.open("a.connecting")
        seen += process.stdout.read()
        assert process.wait(20) == 0
    assert b"\x1b" not in seen
    steps = re.findall(rb"hvdgloo-run: a: (\w+) after", seen)
    assert steps == [b"connecting", b"python", b"up"]


def test_two_signals_at_once_leave_nothing_behind(show: Callable[..., Terminal], tmp_path: Path) -> None:
    """The second comes while the launcher already cleans up: commands that wait for a host must still be ended."""
    Gates(tmp_path, "a.connecting")
    screen = show("a")
    screen.wait_for("  a  connecting")
    waiting = psutil.Process(screen.process.pid).children(recursive=True)
    assert waiting
    screen.process.send_signal(signal.SIGTERM)
    screen.process.send_signal(signal.SIGHUP)
    assert screen.end() in (128 + signal.SIGTERM, 128 + signal.SIGHUP)
    _, alive = psutil.wait_procs(waiting, timeout=10)
    assert not alive


def test_workers_that_import_are_counted_until_all_are_in_init(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "deadline = time.monotonic() + 40\n"
        "while not os.path.exists('go.' + os.environ['RANK']) and time.monotonic() < deadline: time.sleep(0.01)\n"
        "import hvdgloo.numpy as hvd\n"
        "hvd.init()\n"
        "print('trained', flush=True)"
    )
    arguments = Gates.arguments("a", "b", program=program)
    with terminal(*arguments, env=environment(), cwd=tmp_path) as screen:
        screen.wait_for(r"2 workers started, loading, \S+ s")
        (tmp_path / "go.0").touch()
        screen.wait_for(r"2 workers started, 1 of 2 in hvd\.init\(\), \S+ s")
        (tmp_path / "go.1").touch()
        assert screen.end() == 0
        assert sorted(screen.lines) == ["[0]<stdout>:trained", "[1]<stdout>:trained"]
