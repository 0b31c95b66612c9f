"""``--max-restarts``: all workers of a job of a fixed size are started again after a failure."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import hvdgloo.run
from hvdgloo.errors import JobFailedError
from tests.support.launching import Launcher, wait_for

FAILS = """
import os, sys, time
restart, rank = int(os.environ["HVDGLOO_RESTART"]), os.environ["RANK"]
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(restart) <= os.environ["TORCHELASTIC_MAX_RESTARTS"]
print("start", restart, flush=True)
open(f"up.{{restart}}.{{rank}}", "w").close()
if rank == "1" and restart < {times}:
    while not os.path.exists(f"up.{{restart}}.0"):  # the failure ends rank 0, which may not have said anything yet
        time.sleep(0.01)
    sys.exit(17 + restart)
if restart < {times}:
    time.sleep(60)
"""


def told(text: str) -> list[str]:
    """The launcher's own lines without what workers have said last, and with all times as one."""
    lines = [line.removeprefix("hvdgloo-run: ") for line in text.splitlines() if line.startswith("hvdgloo-run: ")]
    said = ("Its last lines were:", "  start ")
    return [re.sub(r"\d+\.\d s", "T", line) for line in lines if not line.startswith(said)]


def test_it_is_started_again_and_succeeds(launcher: Launcher) -> None:
    script = launcher.script(FAILS.format(times=2))
    done = launcher.run("-np", "2", "--max-restarts", "3", "--output-filename", "out", script)
    assert done.returncode == 0, done.stderr
    assert told(done.stderr) == [
        "rank 1 on host localhost exited with status 17",
        "restart 1 of 3: all workers are started again",
        "rank 1 on host localhost exited with status 18",
        "restart 2 of 3: all workers are started again",
        "the job succeeded",
        "it was started again 2 times:",
        "  after T: rank 1 on host localhost exited with status 17",
        "  after T: rank 1 on host localhost exited with status 18",
    ]
    for rank in range(2):
        assert (launcher.folder / f"out/rank.{rank}/stdout").read_text() == "start 0\nstart 1\nstart 2\n"


def test_the_last_failure_ends_it(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--max-restarts", "1", launcher.script(FAILS.format(times=9)))
    assert done.returncode == 18
    assert told(done.stderr)[2:] == [
        "the job failed: rank 1 on host localhost exited with status 18",
        "it was started again once:",
        "  after T: rank 1 on host localhost exited with status 17",
    ]


def test_not_after_ctrl_c(launcher: Launcher) -> None:
    process = launcher.start(
        "-np", "1", "--max-restarts", "3", launcher.script("import time\nopen('ready', 'w').write('!')\ntime.sleep(60)")
    )
    launcher.file("ready")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told(stderr.decode())[-1] == "stopped by SIGINT"


def test_not_if_ctrl_c_comes_while_a_failed_start_ends(launcher: Launcher) -> None:
    """One worker has failed and another takes its time to end: a user who interrupts that wants no further start."""
    script = """
    import os, signal, sys, time
    if os.environ["RANK"] == "1":
        while not os.path.exists("deaf"): time.sleep(0.01)
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").write("!"))
    open("deaf", "w")
    while True: time.sleep(1)
    """
    process = launcher.start("-np", "2", "--max-restarts", "3", "--grace-period", "60", launcher.script(script))
    launcher.file("asked")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 3
    assert told(stderr.decode())[-1] == "the job failed: rank 1 on host localhost exited with status 3"
    assert "restart" not in stderr.decode()


def test_an_agent_that_was_lost_is_started_again(launcher: Launcher) -> None:
    script = """
    import os, time
    if os.environ["HVDGLOO_RESTART"] == "0":
        open("agent", "w").write(str(os.getppid()))
        time.sleep(60)
    """
    process = launcher.start("-np", "1", "--max-restarts", "1", launcher.script(script))
    agent = wait_for(lambda: launcher.file("agent").read_text(), what="the agent's number")
    os.kill(int(agent), signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert told(stderr.decode())[-1].startswith(
        "  after T: the agent on host localhost was killed by signal 9 (SIGKILL)"
    )


def test_a_job_that_cannot_be_started_is_not_tried_again(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", "-H", "no-such-host.invalid", "--max-restarts", "5", "true")
    assert done.returncode == 1
    assert "restart" not in done.stderr


def test_in_the_file(launcher: Launcher) -> None:
    (launcher.folder / "job.yaml").write_text("max_restarts: 1\nnum_proc: 2\n")
    done = launcher.run("--config-file", "job.yaml", launcher.script(FAILS.format(times=1)))
    assert done.returncode == 0
    assert "restart 1 of 1: all workers are started again" in told(done.stderr)


def test_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results are the last start's."""

    def work(folder: str) -> tuple[str, str]:
        import os

        restart, rank = os.environ["HVDGLOO_RESTART"], os.environ["RANK"]
        if restart == "0":
            if rank == "0":
                open(f"{folder}/left", "w").close()
            else:
                while not os.path.exists(f"{folder}/left"):
                    pass
                raise ValueError("the first time")
        return restart, rank

    assert hvdgloo.run.run(work, (str(tmp_path),), np=2, max_restarts=1) == [("1", "0"), ("1", "1")]
    assert "restart 1 of 1: all workers are started again" in capsys.readouterr().err


def test_a_function_that_always_fails() -> None:
    def work() -> None:
        import os

        os._exit(5)

    with pytest.raises(JobFailedError, match=r"(?s)status 5.*it was started again once:\n  after .*status 5"):
        hvdgloo.run.run(work, np=1, max_restarts=1)
