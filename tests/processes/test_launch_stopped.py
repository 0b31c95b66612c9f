"""A launcher that did not run for a while (Ctrl-Z, a debugger, a frozen machine): what came meanwhile counts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.launching import Launcher, wait_for

# Like a shell with job control: Ctrl-Z stops only processes that another one in the session waits for.
SHELL = """
import os, sys
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.setpgid(0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

# The launcher with less patience: what takes 15 s otherwise.
HASTY = """
import sys
from dataclasses import replace
from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.cli.main import command_line, split_all
from hvdgloo.runner.launch import launch
from hvdgloo.runner.surroundings import Surroundings
parser = build_parser()
flags, command, doctor = split_all(sys.argv[4:], parser.values)
spec = command_line(parser, parser.given(flags), command, doctor=doctor).spec
report = launch(replace(spec, times=replace(spec.times, end_timeout=1.0)), Surroundings(sys.stdout, sys.stderr))
print(report.summary(), file=sys.stderr)
sys.exit(report.outcome.exit_code)
"""

SAVES = """
import os, signal, sys, time
def save(*_):
    while not os.path.exists("stopped"):
        time.sleep(0.01)
    print("checkpoint saved", flush=True)
    sys.exit()
signal.signal(signal.SIGINT, save)
open("ready", "w").write(str(os.getpid()))
while True:
    time.sleep(0.01)
"""


def has_ended(process: psutil.Process) -> bool:
    """Collected by its parent or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start(launcher: Launcher, *arguments: str) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A job, and its launcher."""
    hasty = (sys.executable, "-S", "-c", SHELL, sys.executable, "-c", HASTY)
    process = launcher.start(*arguments, wrapper=hasty)
    return process, wait_for(lambda: psutil.Process(process.pid).children(), what="the launcher")[0]


@pytest.mark.parametrize("way", [signal.SIGTSTP, signal.SIGSTOP])
def test_what_workers_print_at_ctrl_c_is_there_after_ctrl_z_too(launcher: Launcher, way: signal.Signals) -> None:
    process, stopped = start(launcher, "-np", "1", "--grace-period", "3", launcher.script(SAVES))
    worker = psutil.Process(int(launcher.file("ready").read_text()))
    stopped.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert b"SIGINT is passed on" in process.stderr.readline()
    told = time.monotonic()
    stopped.send_signal(way)
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, what="a stopped launcher")
    (launcher.folder / "stopped").touch()
    wait_for(lambda: has_ended(worker), what="the worker's end")
    wait_for(lambda: time.monotonic() > told + 3)  # it was told after 1 s, and grace and patience together are 4 s
    stopped.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=20)
    assert b"checkpoint saved" in out, err
    assert b"did not end" not in err
    assert process.returncode == 128 + signal.SIGINT


def test_the_start_timeout_stands_still_while_the_launcher_does(launcher: Launcher) -> None:
    folder = launcher.folder
    late = launcher.script(
        f"""
        import os, sys, time
        open("{folder}/asked", "w").write("1")
        while not os.path.exists("{folder}/go"):
            time.sleep(0.01)
        os.execv(sys.argv[1], sys.argv[1:])
        """,
        "late.py",
    )
    template = f"{sys.executable} {folder}/{late} {{command}}"
    process, stopped = start(
        launcher, "-H", "h1:1", "--agent-command", template, "--start-timeout", "6", sys.executable, "-c", "print(7)"
    )
    launcher.file("asked")
    stopped.send_signal(signal.SIGTSTP)
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, what="a stopped launcher")
    until = time.monotonic() + 7
    wait_for(lambda: time.monotonic() > until)
    stopped.send_signal(signal.SIGCONT)
    (folder / "go").touch()
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, b"[0]<stdout>:7\n"), err
