"""The end of jobs: pains 22 (a crashed rank leaves others running), 23 (failure reported as success), 24 (orphans)."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launching import Launcher, run_command, wait_for

STAY = """
import os, signal, sys, time
with open(f"ready{os.environ['RANK']}", "w") as file:  # a handler's SystemExit is lost where the file is not closed
    file.write(str(os.getpid()))
time.sleep(120)
"""

# A worker with every kind of offspring: a child, a child in a session of its own, and a daemon that forked twice and
# has forgotten its environment.
FERTILE = """
import os, subprocess, sys, time
rank = os.environ["RANK"]
sleep = ["sh", "-c", "trap '' TERM; exec sleep 120"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        mark = {k: v for k, v in os.environ.items() if k == "HVDGLOO_TEST_MARK"}
        os.execvpe(sleep[0], sleep, mark)
    os._exit(0)
os.wait()
open(f"ready{rank}", "w").write("1")
time.sleep(120)
"""


@pytest.mark.parametrize(
    ("module", "advice"),
    [("horovod", "add --as-horovod before it"), ("no_such_module", f"the workers run with {sys.executable}: install ")],
)
def test_a_missing_module_ends_with_what_to_do(launcher: Launcher, module: str, advice: str) -> None:
    done = launcher.run("-np", "1", "python", launcher.script(f"import {module}"))
    assert done.returncode == 1
    error, failed, said = done.stderr.splitlines()[-3:]
    assert error == f"[0]<stderr>:ModuleNotFoundError: No module named '{module}'"
    assert failed == (
        "hvdgloo-run: the job failed: rank 0 on host localhost exited with status 1: "
        f"ModuleNotFoundError: No module named '{module}'"
    )
    assert advice in said


def start_fertile(launcher: Launcher, *arguments: str) -> subprocess.Popen[bytes]:
    process = launcher.start("-np", "2", *arguments, launcher.script(FERTILE))
    launcher.file("ready0")
    launcher.file("ready1")
    # Launcher, watchdog, agent, and for each worker itself and three more.
    wait_for(lambda: len(launcher.living()) == 3 + 2 * 4, what="all offspring")
    return process


def test_pain_22_the_first_failure_stops_the_rest_and_is_summed_up(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "2":
            print("I am about to fail")
            sys.stderr.write("because of this\\n")
            sys.exit(17)
        time.sleep(120)
        """
    )
    started = time.monotonic()
    done = launcher.run("-np", "4", script)
    assert time.monotonic() - started < 5
    assert done.returncode == 17
    last = done.stderr.splitlines()[-4:]
    assert last[0] == "hvdgloo-run: the job failed: rank 2 on host localhost exited with status 17"
    assert sorted(last[2:]) == ["hvdgloo-run:   I am about to fail", "hvdgloo-run:   because of this"]
    launcher.assert_nothing_left()


def test_pain_22_the_summary_names_the_culprit_and_not_who_noticed_first(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import numpy as np, hvdgloo.numpy as hvd
        hvd.init()
        hvd.allreduce(np.ones(3), name="a")
        if hvd.rank() == 2:
            raise ValueError("the culprit")
        hvd.allreduce(np.ones(3), name="b")
        """
    )
    done = launcher.run("-np", "3", script, timeout=50)
    assert done.returncode == 1
    failed = "hvdgloo-run: the job failed: rank 2 on host localhost exited with status 1: ValueError: the culprit"
    assert done.stderr.splitlines()[-1] == failed
    assert done.stderr.count("ValueError: the culprit\n") == 2, "its traceback is not repeated"
    notices = [line for line in done.stderr.splitlines() if line.startswith("hvdgloo-run: ")]
    assert [line for line in notices if "the same error on rank" not in line] == [failed], (
        "what its peers say is told once"
    )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_that_a_signal_ended_gives_128_plus_its_number(launcher: Launcher, signum: signal.Signals) -> None:
    script = launcher.script(
        f"""
        import os, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), {int(signum)})
        time.sleep(120)
        """
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 128 + signum
    assert f"rank 1 on host localhost was killed by signal {int(signum)} ({signum.name})" in done.stderr


def test_pain_23_success_needs_status_0_of_every_worker(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, sys, time
        signal.alarm(60)
        size = os.environ["WORLD_SIZE"]
        if os.environ["RANK"] == "0":
            open("new" + size, "w").write(str(os.getpid()))
            os.rename("new" + size, "first" + size)
            sys.exit(0)
        while not os.path.exists("first" + size): time.sleep(0.01)
        while os.path.exists("/proc/" + open("first" + size).read()): time.sleep(0.01)
        sys.exit(5 if os.environ["RANK"] == "2" else 0)
        """
    )
    assert launcher.run("-np", "3", script).returncode == 5
    assert launcher.run("-np", "2", script).returncode == 0


@pytest.mark.parametrize("flags", [[], ["--min-np", "3", "--failures-per-host", "1"]], ids=["fixed", "elastic"])
def test_workers_get_the_grace_period_after_a_failure_and_no_more(launcher: Launcher, flags: list[str]) -> None:
    script = launcher.script(
        """
        import os, signal, sys, time
        signal.alarm(60)
        rank = os.environ["RANK"]
        def save(*_):
            time.sleep(0.5); open(f"saved{rank}", "w").write("1"); sys.exit(0)
        signal.signal(signal.SIGTERM, save if rank == "1" else signal.SIG_IGN)
        with open(f"ready{rank}", "w") as file:
            file.write("1")
        if rank == "0":
            while not (os.path.exists("ready1") and os.path.exists("ready2")): time.sleep(0.01)
            sys.exit(3)
        time.sleep(120)
        """
    )
    started = time.monotonic()
    done = launcher.run("-np", "3", *flags, "--grace-period", "1.5", script)
    assert done.returncode == 3
    assert (launcher.folder / "saved1").exists()
    assert 1.4 < time.monotonic() - started < 6
    late = "rank 2 did not end within 1.5 s of being told to, so it was killed (--grace-period sets that time)"
    assert late in done.stderr


CHECKPOINT = """
import os, signal, sys, time
rank = os.environ["RANK"]
try:
    with open(f"ready{rank}", "w") as file:
        file.write("1")
    while True: time.sleep(0.1)
except KeyboardInterrupt:
    with open(f"interrupts{rank}", "a") as f: f.write("i")
    try:
        time.sleep(1.0)
    except KeyboardInterrupt:
        with open(f"interrupts{rank}", "a") as f: f.write("i")
    open(f"checkpoint{rank}", "w").write("weights")
"""


def test_ctrl_c_at_a_terminal_arrives_once_and_leaves_time_for_a_checkpoint(launcher: Launcher) -> None:
    script = launcher.script(CHECKPOINT)
    master, slave = pty.openpty()
    # The launcher as the foreground job of a terminal of its own.
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execv(sys.executable, [sys.executable, '-m', 'hvdgloo.runner', *sys.argv[1:]])",
            "-np",
            "2",
            script,
        ],
        cwd=launcher.folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    launcher.processes.append(process)
    os.close(slave)
    launcher.file("ready0")
    launcher.file("ready1")
    os.write(master, b"\x03")
    seen = b""
    while process.poll() is None or b"stopped by" not in seen:
        try:
            seen += os.read(master, 4096)
        except OSError:
            break
    os.close(master)
    assert process.wait(20) == 130
    for rank in range(2):
        assert (launcher.folder / f"checkpoint{rank}").read_text() == "weights"
        assert (launcher.folder / f"interrupts{rank}").read_text() == "i"
    assert b"SIGINT is passed on to the workers, which have 30 s to end; Ctrl-C again kills them at once" in seen
    assert b"hvdgloo-run: stopped by SIGINT" in seen


def test_a_second_ctrl_c_kills_at_once(launcher: Launcher) -> None:
    script = launcher.script("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)" + STAY)
    process = launcher.start("-np", "2", script)
    launcher.file("ready0")
    launcher.file("ready1")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while b"Ctrl-C again" not in process.stderr.readline():
        pass
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert time.monotonic() - started < 3
    assert b"did not end" not in process.stderr.read()
    launcher.assert_nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_deadly_signals_are_passed_on_too(launcher: Launcher, signum: signal.Signals) -> None:
    script = launcher.script(
        f"""
        import os, signal, sys, time
        def save(*_):
            time.sleep(0.3); open(f"saved{{os.environ['RANK']}}", "w").write("1"); sys.exit(0)
        signal.signal({int(signum)}, save)
        """
        + STAY.replace("\n", "\n        ")
    )
    process = launcher.start("-np", "2", script)
    launcher.file("ready0")
    launcher.file("ready1")
    process.send_signal(signum)
    assert process.wait(10) == 128 + signum
    assert (launcher.folder / "saved0").exists()
    assert (launcher.folder / "saved1").exists()


def test_signals_that_mean_something_to_the_program_reach_it_and_end_nothing(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, sys, time
        def note(*_):
            open(f"noted{os.environ['RANK']}", "w").write("1"); sys.exit(0)
        signal.signal(signal.SIGUSR1, note)
        """
        + STAY.replace("\n", "\n        ")
    )
    process = launcher.start("-np", "2", script)
    launcher.file("ready0")
    launcher.file("ready1")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 0
    assert (launcher.folder / "noted1").exists()


def test_a_shell_script_s_child_gets_its_grace_period_too(launcher: Launcher) -> None:
    launcher.script(
        """
        import signal, sys, time
        def save(*_):
            time.sleep(0.7); open("saved", "w").write("1"); sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        """
        + STAY.replace("\n", "\n        "),
        "train.py",
    )
    process = launcher.start("-np", "1", "--", "sh", "-c", f"{sys.executable} train.py; true")
    launcher.file("ready0")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert (launcher.folder / "saved").exists()


@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_pain_24_kill_9_of_the_launcher_leaves_nothing(launcher: Launcher, flags: list[str]) -> None:
    process = start_fertile(launcher, "--grace-period", "0.5", *flags)
    process.kill()
    launcher.assert_nothing_left()


@pytest.mark.parametrize("which", ["watchdog", "agent", "both"])
def test_pain_24_kill_9_of_an_agent_leaves_nothing_and_fails_the_job(launcher: Launcher, which: str) -> None:
    process = start_fertile(launcher, "--grace-period", "0.5")
    watchdog, agent = launcher.agents(process)
    if which == "both":
        agent.suspend()  # so that it cannot notice the end of the watchdog first
        watchdog.suspend()
    for victim in {"watchdog": [watchdog], "agent": [agent], "both": [watchdog, agent]}[which]:
        victim.kill()
    assert process.wait(20) == 1
    assert process.stderr is not None
    said = {
        "watchdog": b"the agent on host localhost ended its workers, because its watchdog was killed",
        "agent": b"the agent on host localhost was killed by signal 9 (SIGKILL): "
        b"the kernel reports no lack of memory, so a user or another program did it\n",
        "both": b"the agent on host localhost or the command that leads to it was killed by signal 9 (SIGKILL)",
    }
    text = process.stderr.read()
    assert said[which] in text
    assert b"[localhost]" not in text
    if which == "both":
        # Nothing but the environment tells what belongs to the job: a daemon that cleared it and left its session is
        # out of reach when both of its watchers were killed at one instant.
        wait_for(lambda: len(launcher.living()) == 2, what="the two daemons that forgot their environment")
    else:
        launcher.assert_nothing_left()


def test_pain_24_kill_9_of_launcher_and_agent_together_leaves_nothing(launcher: Launcher) -> None:
    process = start_fertile(launcher, "--grace-period", "0.5")
    _, agent = launcher.agents(process)
    process.kill()
    agent.kill()
    launcher.assert_nothing_left()


def test_an_agent_that_falls_silent_counts_as_lost(launcher: Launcher) -> None:
    process = start_fertile(launcher, "--grace-period", "0.2", "--heartbeat-timeout", "1")
    _, agent = launcher.agents(process)
    started = time.monotonic()
    agent.suspend()
    assert process.wait(20) == 1
    assert time.monotonic() - started < 8
    assert process.stderr is not None
    assert b"the agent on host localhost has been silent for 1 s" in process.stderr.read()
    launcher.assert_nothing_left()


ELSEWHERE = ("-H", "h1:2", "--agent-command", "env {command}")
"""A host that the launcher does not know to be its own."""


def test_a_launcher_that_falls_silent_is_an_order_to_die_on_other_hosts(launcher: Launcher) -> None:
    process = start_fertile(launcher, "--grace-period", "0.2", "--heartbeat-timeout", "1", *ELSEWHERE)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: [p.pid for p in launcher.living()] == [process.pid], what="only the stopped launcher")
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 1


def test_a_silence_that_is_short_enough_changes_nothing(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, time
        signal.alarm(60)
        open("ready0", "w").write("1")
        while not os.path.exists("stopped"): time.sleep(0.01)
        print("meanwhile", flush=True)
        open("printed", "w").write("1")
        while not os.path.exists("enough"): time.sleep(0.01)
        """
    )
    process = launcher.start("-np", "1", "--heartbeat-timeout", "9", *ELSEWHERE, script)
    launcher.file("ready0")
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, what="a stopped launcher")
    (launcher.folder / "stopped").write_text("1")
    launcher.file("printed")
    until = time.monotonic() + 2.0  # at least: a sign of life is due every 1.5 s
    wait_for(lambda: time.monotonic() > until)
    process.send_signal(signal.SIGCONT)
    assert process.stdout is not None
    assert process.stdout.readline().endswith(b":meanwhile\n")
    (launcher.folder / "enough").write_text("1")
    assert process.wait(20) == 0


def test_on_one_host_a_launcher_s_silence_ends_nothing(launcher: Launcher) -> None:
    """It may be any other process that keeps it from running. If it had died, its streams would have ended."""
    script = launcher.script(
        """
        import os, signal, time
        signal.alarm(60)
        open("ready0", "w").write("1")
        while not os.path.exists("enough"): time.sleep(0.01)
        """
    )
    process = launcher.start("-np", "1", "--heartbeat-timeout", "0.2", script)
    launcher.file("ready0")
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, what="a stopped launcher")
    until = time.monotonic() + 1.0  # five times the silence that means death elsewhere
    wait_for(lambda: time.monotonic() > until)
    (launcher.folder / "enough").touch()
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err


def test_ctrl_z_in_a_shell_stops_the_launcher_alone_and_fg_goes_on(launcher: Launcher) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = launcher.script(
        """
        import os, signal, time
        signal.alarm(60)
        open(f"ready{os.environ['RANK']}", "w").write("1")
        while not os.path.exists("enough"): time.sleep(0.01)
        print("the end")
        """
    )
    master, slave = pty.openpty()
    setup = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    shell = subprocess.Popen(
        [sys.executable, "-c", setup + "os.execv(sys.argv[1], sys.argv[1:])", bash, "--norc", "-i"],
        cwd=launcher.folder,
        env={**os.environ, "HVDGLOO_TEST_MARK": launcher.mark, "PS1": "$ "},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    launcher.processes.append(shell)
    os.close(slave)
    elsewhere = " ".join(map(shlex.quote, ELSEWHERE))
    command = f"{sys.executable} -m hvdgloo.runner -np 2 --heartbeat-timeout 0.5 {elsewhere} {script}\n"
    os.write(master, command.encode())
    launcher.file("ready0")
    launcher.file("ready1")
    job = next(p for p in launcher.living() if "hvdgloo.runner" in p.cmdline())
    os.write(master, b"\x1a")
    wait_for(lambda: job.status() == psutil.STATUS_STOPPED, what="the launcher to be stopped")
    until = time.monotonic() + 1.5  # three times the silence that means death
    wait_for(lambda: time.monotonic() > until)
    others = [p.status() for p in launcher.living() if p.pid not in (job.pid, shell.pid)]
    assert len(others) == 4, "watchdog, agent and two workers"
    assert psutil.STATUS_STOPPED not in others
    (launcher.folder / "enough").write_text("1")
    os.write(master, b"fg; echo status $?\n")
    seen = b""
    while b"status 0" not in seen:
        assert select.select([master], [], [], 15)[0], seen
        seen += os.read(master, 4096)
    assert seen.count(b":the end") == 2
    os.write(master, b"exit\n")
    wait_for(lambda: shell.poll() is not None, what="the end of the shell")
    os.close(master)


def test_pain_24_a_background_process_neither_delays_the_end_nor_outlives_it(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, subprocess, sys
        # It holds the worker's pipes open, in a session of its own, and writes for ever.
        noise = "import time\\nwhile True: print('noise', flush=True); time.sleep(0.01)"
        subprocess.Popen([sys.executable, "-c", noise], start_new_session=True)
        print("done")
        """
    )
    started = time.monotonic()
    done = launcher.run("-np", "2", script)
    assert done.returncode == 0
    assert time.monotonic() - started < 5
    assert "[0]<stdout>:done" in done.stdout
    launcher.assert_nothing_left(timeout=0.5)


def test_a_background_process_may_tidy_up_for_a_moment(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import subprocess, sys
        program = '''
        import signal, sys, time
        def tidy(*_): open("tidy", "w").write("1"); print("last words", flush=True); sys.exit(0)
        signal.signal(signal.SIGTERM, tidy)
        print("up", flush=True)
        time.sleep(120)
        '''.replace("\\n        ", "\\n")
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        child.stdout.readline()
        """
    )
    assert launcher.run("-np", "1", script).returncode == 0
    assert (launcher.folder / "tidy").exists()


def test_nested_launches_are_jobs_of_their_own(launcher: Launcher) -> None:
    launcher.script("import os; print(os.environ['HVDGLOO_JOB_ID'], os.environ['WORLD_SIZE'])", "inner.py")
    done = launcher.run("-np", "2", "--", sys.executable, "-m", "hvdgloo.runner", "-np", "3", "inner.py")
    assert done.returncode == 0
    jobs = {line.rpartition(":")[2] for line in done.stdout.splitlines()}
    assert len(jobs) == 2
    assert all(job.endswith(" 3") for job in jobs)


def test_killing_an_outer_launcher_ends_inner_jobs(launcher: Launcher) -> None:
    launcher.script(FERTILE, "inner.py")
    inner = [sys.executable, "-m", "hvdgloo.runner", "-np", "1", "inner.py"]
    process = launcher.start("-np", "1", "--grace-period", "0.5", "--", *inner)
    launcher.file("ready0")
    process.kill()
    launcher.assert_nothing_left()


def test_a_program_that_cannot_be_executed_is_named_with_the_shell_s_status(launcher: Launcher) -> None:
    script = launcher.folder / "broken"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = launcher.run("-np", "2", "./broken")
    assert done.returncode == 127
    assert "could not be started" in done.stderr
    launcher.assert_nothing_left()


def test_pain_24_nothing_is_left_in_the_temporary_folder(launcher: Launcher) -> None:
    temporary = launcher.folder / "tmp"
    temporary.mkdir()
    script = launcher.script("print('x' * 100)")
    assert launcher.run("-np", "2", script, env={"TMPDIR": str(temporary)}).returncode == 0
    assert not list(temporary.iterdir())


def test_an_out_of_memory_kill_is_recognised(launcher: Launcher) -> None:
    group = Path("/sys/fs/cgroup/memory/hvdgloo-test")
    limit = group / "memory.limit_in_bytes"
    try:
        group.mkdir(exist_ok=True)
        limit.write_text(str(300 * 1024 * 1024))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    script = launcher.script(
        """
        import os, time
        if os.environ["RANK"] == "1":
            data = bytearray(600 * 1024 * 1024)
            for i in range(0, len(data), 4096): data[i] = 1
        time.sleep(120)
        """
    )
    try:
        enter = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m hvdgloo.runner -np 2 {script}"
        done = run_command(["sh", "-c", enter], cwd=launcher.folder, timeout=40)
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), what="an empty control group")
        group.rmdir()
    assert done.returncode == 137
    assert re.search(
        r"rank 1 on host localhost was killed by signal 9 \(SIGKILL\); "
        r"the kernel ended (a process|it) for lack of memory.*\n"
        r"hvdgloo-run: run fewer workers on that host",
        done.stderr,
    )


def test_killed_without_lack_of_memory_is_not_called_so(launcher: Launcher) -> None:
    script = launcher.script("import os; os.kill(os.getpid(), 9)")
    assert "lack of memory" not in launcher.run("-np", "1", script).stderr


def test_the_launcher_leaves_no_trace_when_interrupted_before_the_workers(launcher: Launcher) -> None:
    script = launcher.script(STAY)
    for delay in (0.0, 0.05, 0.15, 0.25, 0.35):
        process = launcher.start("-np", "2", script)
        until = time.monotonic() + delay
        wait_for(lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (-signal.SIGTERM, 143)
        launcher.assert_nothing_left()


def test_status_of_workers_is_known_even_if_they_end_at_once(launcher: Launcher) -> None:
    script = launcher.script("import os, json; print(json.dumps(sorted(os.environ)))")
    done = launcher.run("-np", "8", script)
    assert done.returncode == 0
    assert len([json.loads(line.partition(":")[2]) for line in done.stdout.splitlines()]) == 8


def test_ctrl_c_while_workers_import_is_one_line(launcher: Launcher) -> None:
    launcher.script(
        """
        import os, time
        open(f"importing.{os.environ['RANK']}", "w").write("x")
        time.sleep(120)
        """,
        name="slow_to_import.py",
    )
    process = launcher.start("-np", "2", "--output-filename", "logs", launcher.script("import slow_to_import"))
    for rank in range(2):
        launcher.file(f"importing.{rank}")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"hvdgloo-run: stopped by SIGINT\n")
    logs = [(launcher.folder / f"logs/rank.{rank}/stderr").read_text() for rank in range(2)]
    assert all("KeyboardInterrupt" in log for log in logs), "the files have all"
    launcher.assert_nothing_left()


def test_where_the_program_itself_was_at_ctrl_c_is_shown(launcher: Launcher) -> None:
    program = """
    import time
    open("ready", "w").write("x")
    time.sleep(120)
    """
    process = launcher.start("-np", "1", launcher.script(program))
    launcher.file("ready")
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=20)[1].decode()
    assert "[0]<stderr>:    time.sleep(120)\n[0]<stderr>:KeyboardInterrupt\n" in re.sub(r".*[\^~]+\n", "", err)
    assert process.returncode == 130


@pytest.mark.parametrize("signum", [signal.SIGINT, None])
def test_a_job_that_takes_its_time_to_end_says_why(launcher: Launcher, signum: signal.Signals | None) -> None:
    program = """
    import os, signal, sys, time
    signal.alarm(60)
    if os.environ["RANK"] == "1" and len(sys.argv) > 1:
        while not os.path.exists("ready.0"):
            time.sleep(0.01)
        sys.exit(3)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    open(f"ready.{os.environ['RANK']}", "w").write("x")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not os.path.exists("end"):
        time.sleep(0.01)
    """
    process = launcher.start("-np", "2", "--grace-period", "20", launcher.script(program), *([] if signum else ["x"]))
    launcher.file("ready.0")
    if signum:
        launcher.file("ready.1")
        process.send_signal(signum)
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    said = "SIGINT is passed on to the workers, which have 20 s to end; Ctrl-C again kills them at once"
    failed = "rank 1 on host localhost exited with status 3; stopping the other workers"
    assert line == f"hvdgloo-run: {said if signum else failed}\n"
    (launcher.folder / "end").touch()
    process.communicate(timeout=20)
    assert process.returncode == (130 if signum else 3)


def test_log_ranks_shows_only_these_and_the_failure_of_any(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        print("hello from", os.environ["RANK"], flush=True)
        if os.environ["RANK"] == "0":
            open("said", "w").close()
        if os.environ["RANK"] == "1" and len(sys.argv) > 1:
            while not os.path.exists("said"):
                time.sleep(0.01)
            sys.exit("something is wrong")
        """
    )
    done = launcher.run("-np", "3", "--log-ranks", "0", "--no-prefix", "--output-filename", "logs", script)
    assert (done.stdout, done.stderr, done.returncode) == ("hello from 0\n", "", 0)
    assert (launcher.folder / "logs/rank.2/stdout").read_text() == "hello from 2\n"
    (launcher.folder / "said").unlink()
    done = launcher.run("-np", "3", "--log-ranks", "0", script, "fail")
    assert done.stdout == "[0]<stdout>:hello from 0\n"
    assert done.stderr.splitlines() == [
        "hvdgloo-run: the job failed: rank 1 on host localhost exited with status 1",
        "hvdgloo-run: Its last lines were:",
        "hvdgloo-run:   hello from 1",
        "hvdgloo-run:   something is wrong",
    ]
