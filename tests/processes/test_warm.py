"""Warm interpreters (tests/support/warm) are what tests take them for: as good as fresh ones."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.hosts import Bed
from tests.support.launching import run_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")

SHOW = """
import json, os, socket, sys, threading
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("MARK"), os.getpid() == os.getsid(0), sys.stdin.read(),
                  __name__, threading.active_count(), "numpy" in sys.modules]))
"""


def run(*arguments: str, text: str = "", cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), *arguments]
    env = {"MARK": "set", "PATH": os.defpath, **more}
    return run_command(command, input=text, cwd=cwd, env=env, timeout=20)


@pytest.mark.parametrize("way", ["code", "script", "module"])
def test_a_program_gets_what_it_was_given(tmp_path: Path, way: str) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    start = {"code": ["-c", SHOW], "script": ["shown.py"], "module": ["-m", "shown"]}[way]
    done = run("-u", *start, "a", "b c", text="typed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (name, *rest), *others = json.loads(done.stdout)
    assert name == {"code": "-c", "script": "shown.py", "module": str(tmp_path / "shown.py")}[way]
    assert rest == ["a", "b c"]
    assert others == [str(tmp_path), "set", True, "typed", "__main__", 1, True]


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_it_ends_as_an_interpreter_does(code: str, status: int, error: str) -> None:
    done = run("-c", f"import atexit; atexit.register(print, 'at exit')\n{code}")
    assert done.returncode == status
    assert done.stderr.endswith(error)
    assert "server.py" not in done.stderr
    assert done.stdout == ("at exit\n" if status >= 0 else "")


def test_it_inherits_descriptors() -> None:
    pipes = [os.pipe() for _ in range(3)]
    numbers = [writer for _, writer in pipes]
    code = "import os, sys\nfor number in sys.argv[1:]:\n    os.write(int(number), number.encode())"
    command = [warm.python(), "-c", code, *map(str, numbers)]
    subprocess.run(command, pass_fds=numbers, timeout=20, check=True)
    for reader, writer in pipes:
        os.close(writer)
        assert os.read(reader, 9) == str(writer).encode()
        assert os.read(reader, 1) == b"", "no process has it open any more"
        os.close(reader)


def test_signals_reach_it_and_it_ends_with_who_stands_in() -> None:
    code = (
        # A pause would not end for a signal that came just before it.
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'told\\n'))\nos.write(1, b'up\\n')\n"
    )
    with subprocess.Popen(
        [warm.python(), "-c", f"{code}import time\nwhile True:\n    time.sleep(0.05)"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.stdout.readline() == "told\n"
        process.kill()
        assert process.stdout.read() == ""  # no process holds the pipe open any more


def test_a_process_of_the_test_s_own() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        process = warm.Process(["-c", "import signal; signal.pause()"], env={}, stdin=null, stdout=null, stderr=null)
    finally:
        os.close(null)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert os.getsid(process.pid) == process.pid
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL


def test_others_see_its_environment_too() -> None:
    """The search for the processes of a job, or of a test, reads it in /proc."""
    code = "import os\nprint(open(f'/proc/{os.getpid()}/environ').read().rstrip('\\0').split('\\0'))"
    fork = "import os\nif os.fork():\n    os.wait()\nelse:\n    "
    for program in (code, fork + code.replace("\n", "\n    ")):
        done = run("-c", program)
        assert done.returncode == 0, done.stderr
        shown = ast.literal_eval(done.stdout)
        assert [each for each in shown if not each.startswith("LC_CTYPE=")] == ["MARK=set", f"PATH={os.defpath}"]
    assert run("-c", "import os; print(len(open('/proc/self/environ').read()))", MORE="x" * 90_000).returncode == 0


def test_it_is_on_the_host_that_asked_for_it(bed: Bed) -> None:
    code = "import os, socket; print(socket.gethostname(), os.path.exists(f'/proc/{os.getpid()}/stat'))"
    assert bed["h2"].run([warm.python(), "-c", code], check=True).stdout == "h2 True\n"
    assert not bed["h2"].processes()
