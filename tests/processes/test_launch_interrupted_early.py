"""Ctrl-C while a command still imports what it needs: no traceback, exit status 130, and nothing is left.

Moments are those at which it imports a module: between any two of them little happens. How many there are is
found out by a run that is not interrupted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.launching import Launcher, clean_environment, run_command

MOMENTS = 6
PATIENCE = 60.0

INTERRUPTED = """
    import os, runpy, signal, sys

    moment, first, last = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    count, command, begun = 0, os.getpid(), False

    def look(event, arguments):
        global begun, count
        if os.getpid() != command:
            return
        if event == "import":
            begun = begun or arguments[0] == first
            count += begun
            if count == moment:
                os.kill(command, signal.SIGINT)
        elif event == last and not os.path.exists("imports"):
            with open("imports", "w") as file:
                file.write(str(count))  # later there are threads, which import in any order

    sys.addaudithook(look)
    module, sys.argv = sys.argv[6], sys.argv[6:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("flags", [[], ["--page", "--report", "job.html"]], ids=["alone", "with a page"])
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing_and_says_little(launcher: Launcher, flags: list[str]) -> None:
    script = launcher.script(INTERRUPTED, "interrupted.py")

    def run(moment: int, *command: str) -> tuple[int, str, str]:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            # Until the agent starts.
            wrapper = (sys.executable, script, str(moment), "hvdgloo.runner.cli.main", "subprocess.Popen")
            environ = {"XDG_RUNTIME_DIR": folder}
            done = launcher.run("-np", "1", *flags, *command, env=environ, timeout=PATIENCE, wrapper=wrapper)
            own = Path(folder) / "hvdgloo"
            assert not own.exists() or list(own.iterdir()) == []
        return done.returncode, done.stdout, done.stderr

    assert run(-1, "true")[0] == 0
    imports = int((launcher.folder / "imports").read_text())
    assert imports > 50
    for moment in range(1, imports + 1, -(-imports // MOMENTS)):
        status, out, err = run(moment, "sleep", "1000")
        assert (status, out) == (130, ""), (moment, err)
        said = [line for line in err.splitlines() if not line.startswith("hvdgloo-run: ")]
        assert said == [], moment
        launcher.assert_nothing_left()


def test_ctrl_c_at_any_moment_of_a_rendezvous_servers_start(launcher: Launcher) -> None:
    script = launcher.script(INTERRUPTED, "interrupted.py")
    temporary = launcher.folder / "temporary"
    temporary.mkdir()

    def run(moment: int, *flags: str) -> subprocess.CompletedProcess[str]:
        wrapper = [sys.executable, script, str(moment), "hvdgloo.rendezvous._cli", "socket.bind"]
        return run_command(
            [*wrapper, sys.executable, "-m", "hvdgloo.rendezvous", *flags],
            cwd=launcher.folder,
            env={**clean_environment(), "TMPDIR": str(temporary)},
            timeout=PATIENCE,
            check=False,
        )

    # Without workers it ends by itself only after a start that has failed.
    done = run(-1, "-np", "1", "--page", "--bind", "203.0.113.1:1")
    assert done.returncode == 2, done.stderr
    imports = int((launcher.folder / "imports").read_text())
    assert imports > 50
    for moment in range(1, imports, -(-imports // MOMENTS)):
        done = run(moment, "-np", "1", "--page")
        assert done.returncode in (0, 130), (moment, done.stderr)
        said = done.stdout + done.stderr
        assert said == ("" if done.returncode else "stopped by a signal\n"), moment
        assert os.listdir(temporary) == []
