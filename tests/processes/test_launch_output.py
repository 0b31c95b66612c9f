"""The treatment of workers' output: pain 25 (logs buffered, torn, progress bars broken)."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from hvdgloo.topology import ranges
from tests.support.launching import Launcher, wait_for


def read_terminal(master: int, process: subprocess.Popen[bytes], timeout: float = 20.0) -> bytes:
    """Everything that appears on a terminal until the process ends."""
    data = b""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.05)[0]:
            try:
                data += os.read(master, 65536)
            except OSError:
                return data
        elif process.poll() is not None:
            return data
    raise AssertionError(f"the launcher did not end; so far: {data[-2000:]!r}")


def test_pain_25_four_ranks_write_at_once_and_every_line_stays_whole(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(3000):
            # In pieces, so that lines arrive torn.
            os.write(1, f"{rank} line ".encode()); os.write(1, f"{i} {'x' * (i % 200)}\\n".encode())
            if i % 3 == 0:
                os.write(2, f"{rank} error {i}\\n".encode())
        """
    )
    done = launcher.run("-np", "4", script)
    assert done.returncode == 0
    lines = re.compile(r"\[(\d)\]<stdout>:(\d) line (\d+) (x*)")
    seen: dict[str, list[int]] = {}
    for text in done.stdout.splitlines():
        match = lines.fullmatch(text)
        assert match, text
        assert match[1] == match[2]
        assert len(match[4]) == int(match[3]) % 200
        seen.setdefault(match[1], []).append(int(match[3]))
    assert seen == {str(rank): list(range(3000)) for rank in range(4)}
    errors = [text for text in done.stderr.splitlines() if not text.startswith("hvdgloo-run:")]
    assert len(errors) == 4000
    assert all(re.fullmatch(r"\[(\d)\]<stderr>:\1 error \d+", text) for text in errors)


def test_pain_25_files_hold_what_each_rank_wrote_byte_for_byte(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os
        rank = int(os.environ["RANK"])
        os.write(1, bytes(range(256)) * 300 + b"\\r50%\\r100%\\xff\\xfe no newline " + str(rank).encode())
        os.write(2, b"\\r\\n\\n\\0" + str(rank).encode())
        """
    )
    done = subprocess.run(
        [sys.executable, "-m", "hvdgloo.runner", "-np", "11", "--output-filename", "logs/deep", script],
        cwd=launcher.folder,
        capture_output=True,
        timeout=40,
        check=True,
    )
    assert b"[10]<stdout>:" in done.stdout
    for rank in range(11):
        folder = launcher.folder / "logs" / "deep" / f"rank.{rank:02d}"
        expected = bytes(range(256)) * 300 + b"\r50%\r100%\xff\xfe no newline " + str(rank).encode()
        assert (folder / "stdout").read_bytes() == expected
        assert (folder / "stderr").read_bytes() == b"\r\n\n\0" + str(rank).encode()


def test_an_unterminated_last_line_is_shown_and_ended(launcher: Launcher) -> None:
    script = launcher.script("import sys; sys.stdout.write('no end')")
    done = launcher.run("-np", "2", script)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:no end", "[1]<stdout>:no end"]


def test_lines_come_while_the_worker_runs_and_are_not_kept_in_a_buffer(launcher: Launcher) -> None:
    script = launcher.script("print('early'); import time; time.sleep(60)")
    process = launcher.start("-np", "1", script)
    assert process.stdout is not None
    started = time.monotonic()
    assert process.stdout.readline() == b"[0]<stdout>:early\n"
    assert time.monotonic() - started < 10
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 128 + signal.SIGTERM


def test_timestamps_precede_the_rank(launcher: Launcher) -> None:
    script = launcher.script("print('hello')")
    done = launcher.run("-np", "2", "--prefix-output-with-timestamp", script)
    for line in done.stdout.splitlines():
        assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[[01]\]<stdout>:hello", line), line


def test_pain_25_carriage_returns_pass_through_a_pipe(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import sys
        for i in range(3):
            sys.stderr.write(f"\\r{i * 50}%|{'#' * i}"); sys.stderr.flush()
        sys.stderr.write("\\n")
        sys.stdout.write("windows\\r\\n")
        """
    )
    done = launcher.run("-np", "1", script)
    assert done.stderr.endswith("[0]<stderr>:0%|\r[0]<stderr>:50%|#\r[0]<stderr>:100%|##\n")
    assert done.stdout == "[0]<stdout>:windows\r\n"


def test_pain_25_a_progress_bar_on_a_terminal_is_redrawn_and_never_mixed_with_other_lines(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            for i in range(11):
                sys.stderr.write(f"\\r{i * 10:3d}%|{'#' * i:<10}|"); sys.stderr.flush()
                time.sleep(0.05)
            time.sleep(0.3)  # longer than an unfinished bar waits to be drawn
            sys.stderr.write("\\n")
        else:
            for i in range(4):
                time.sleep(0.1); print("epoch", i)
        """
    )
    master, slave = pty.openpty()
    process = launcher.start("-np", "2", script, env={"OMP_NUM_THREADS": "1"}, stdout=slave, stderr=slave)
    os.close(slave)
    screen = _Screen()
    screen.feed(read_terminal(master, process))
    os.close(master)
    assert process.wait(5) == 0
    shown = [line.rstrip() for line in screen.lines if line.strip()]
    assert sorted(shown) == sorted([*(f"[1]<stdout>:epoch {i}" for i in range(4)), "[0]<stderr>:100%|##########|"]), (
        screen.raw
    )


class _Screen:
    """Just enough of a terminal: newline, carriage return, erase to the end of the line."""

    def __init__(self) -> None:
        self.lines = [""]
        self.column = 0
        self.raw = b""

    def feed(self, data: bytes) -> None:
        self.raw += data
        for token in re.findall(r"\x1b\[K|[\s\S]", data.decode()):
            if token == "\n":
                self.lines.append("")
                self.column = 0
            elif token == "\r":
                self.column = 0
            elif token == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self.column]
            else:
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[: self.column] + token + line[self.column + 1 :]
                self.column += 1


def test_pain_25_a_blocked_terminal_stops_neither_workers_nor_heartbeats(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        line = b"y" * 999 + b"\\n"
        for i in range(20000):  # 20 MB, far more than pipes, credit and memory hold
            os.write(1, line)
        open(f"done{os.environ['RANK']}", "w").write("1")
        """
    )
    # A pipe that no process reads; and heartbeats that would fail within a second.
    process = launcher.start("-np", "2", "--heartbeat-timeout", "1", script)
    launcher.file("done0")
    launcher.file("done1")
    assert process.stdout is not None
    assert process.poll() is None, "the launcher waits for its reader, like any program"
    started = time.monotonic()
    while time.monotonic() - started < 2.5:
        time.sleep(0.1)
    assert process.poll() is None
    assert psutil_memory(process.pid) < 200e6
    data = process.stdout.read()
    assert process.wait(15) == 0
    assert len(data) == 2 * 20000 * (1000 + len("[0]<stdout>:"))


def psutil_memory(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).memory_info().rss)


def test_blocked_standard_output_does_not_hide_standard_error(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        for i in range(1000):
            os.write(1, b"y" * 999 + b"\\n")
        os.write(2, b"something is wrong\\n")
        time.sleep(60)
        """
    )
    process = launcher.start("-np", "1", script)
    assert process.stderr is not None
    assert process.stderr.readline() == b"[0]<stderr>:something is wrong\n"


def test_when_the_reader_goes_away_the_job_ends_like_any_program(launcher: Launcher) -> None:
    script = launcher.script("import itertools, time\nfor i in itertools.count(): print(i); time.sleep(0.01)")
    process = launcher.start("-np", "2", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(15) == 128 + signal.SIGPIPE
    process.stdout = None
    launcher.assert_nothing_left()


def test_stdin_goes_to_the_rank_that_is_named_and_to_no_other(launcher: Launcher) -> None:
    script = launcher.script("import os, sys; print(os.environ['RANK'], len(sys.stdin.read()))")
    done = launcher.run("-np", "3", "--stdin", "1", script, input=b"z" * 1_000_000)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:0 0", "[1]<stdout>:1 1000000", "[2]<stdout>:2 0"]


def test_a_debugger_prompt_appears_before_its_line_is_complete(launcher: Launcher) -> None:
    # Only there: the other rank has no input, its debugger would give up at once, and that would end the job.
    script = launcher.script("import os\nif os.environ['RANK'] == '0':\n    breakpoint()\nprint('after')")
    process = launcher.start("-np", "2", "--stdin", "0", script, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    seen = b""

    def prompt() -> bool:
        nonlocal seen
        seen += process.stdout.read() or b""  # type: ignore[union-attr]
        return seen.count(b"(Pdb) ") >= 1

    wait_for(prompt, what="the prompt")
    process.stdin.write(b"p 6 * 7\n")
    process.stdin.flush()
    wait_for(lambda: prompt() and b"42\n" in seen, what="the answer")
    process.stdin.write(b"c\n")
    process.stdin.flush()
    assert process.wait(15) == 0


def test_very_long_lines_do_not_exhaust_memory(launcher: Launcher) -> None:
    script = launcher.script("import os\nfor _ in range(5000): os.write(1, b'q' * 1000)")
    done = launcher.run("-np", "1", "--output-filename", "logs", script)
    assert done.stdout.replace("[0]<stdout>:", "").replace("\n", "") == "q" * 5_000_000
    assert max(len(line) for line in done.stdout.splitlines()) < 1_500_000
    assert (launcher.folder / "logs" / "rank.0" / "stdout").read_bytes() == b"q" * 5_000_000


def test_files_of_output_are_for_their_owner_alone(launcher: Launcher) -> None:
    """Whatever the umask; a folder that was there keeps its mode, and so may be shared."""
    script = launcher.script("print('secret')")
    shared = launcher.folder / "shared"
    (shared / "rank.0").mkdir(parents=True)
    (shared / "rank.0" / "stdout").write_text("of another run")
    for folder in (shared, shared / "rank.0"):
        folder.chmod(0o755)
    for directory in ("new/deep", "shared"):
        done = launcher.run("-np", "1", "--output-filename", directory, script)
        assert done.returncode == 0, done.stderr

    def mode(path: str) -> int:
        return (launcher.folder / path).stat().st_mode & 0o777

    assert [mode(path) for path in ("new", "new/deep", "new/deep/rank.0")] == [0o700] * 3
    assert [mode(path) for path in ("shared", "shared/rank.0")] == [0o755] * 2
    for directory in ("new/deep", "shared"):
        assert [mode(f"{directory}/rank.0/{name}") for name in ("stdout", "stderr")] == [0o600] * 2
        assert (launcher.folder / directory / "rank.0" / "stdout").read_text() == "secret\n"


def test_a_directory_that_cannot_be_written_is_an_error_before_anything_starts(launcher: Launcher) -> None:
    (launcher.folder / "taken").write_text("a file")
    script = launcher.script("open('started', 'w').write('1')")
    done = launcher.run("--output-filename", "taken", "-np", "1", script)
    assert done.returncode == 2
    assert "--output-filename" in done.stderr
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize("what", ["stdout", "stderr", "both"])
def test_output_that_cannot_be_written_is_a_failure_of_the_launcher(launcher: Launcher, what: str) -> None:
    """A full disk: the training goes on to its end, but status 0 must not say that all of its log is there."""
    script = launcher.script(
        """
        import pathlib, sys
        print("out", flush=True); print("err", file=sys.stderr, flush=True)
        pathlib.Path("done").write_text("")
        """
    )
    with open("/dev/full", "wb") as full:
        given = {name: full for name in ("stdout", "stderr") if what in (name, "both")}
        process = launcher.start("-np", "1", script, **given)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert (launcher.folder / "done").exists(), "the workers are not stopped"
    if what == "stdout":
        said = "all workers succeeded, but not all could be written: standard output: No space left on device"
        assert err.decode().splitlines()[-1] == f"hvdgloo-run: {said}"
    if what == "stderr":
        assert out == b"[0]<stdout>:out\n"


def test_a_job_that_has_failed_keeps_its_status_on_a_full_disk(launcher: Launcher) -> None:
    script = launcher.script("print('out', flush=True); raise SystemExit(3)")
    with open("/dev/full", "wb") as full:
        process = launcher.start("-np", "1", script, stdout=full)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "not all could be written: standard output: No space left on device" in err.decode()


def test_files_of_output_on_a_full_disk_are_a_failure_of_the_launcher(launcher: Launcher) -> None:
    script = launcher.script("print('x' * 100_000)")
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "-"]
    done = launcher.run("-np", "1", "--output-filename", "logs", script, wrapper=limited)
    assert done.returncode == 1
    assert "rank 0's stdout is no longer written to its file: [Errno 27] File too large" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "all workers succeeded, but not all could be written: the file of rank 0's stdout: File too large"
    )
    assert done.stdout.count("x") == 100_000


def test_the_summary_of_a_failure_says_where_all_of_the_output_is(launcher: Launcher) -> None:
    script = launcher.script(
        "import os; print('x'); os.environ['RANK'] == '1' and exit(3); import time; time.sleep(60)"
    )
    done = launcher.run("-np", "2", "--output-filename", "logs", script)
    assert done.returncode == 3
    folder = launcher.folder / "logs/rank.1"
    assert done.stderr.splitlines()[-1] == f"hvdgloo-run: the output of rank 1 is in {folder}"
    assert (folder / "stdout").read_text() == "x\n"
    assert "the output of" not in launcher.run("-np", "2", script).stderr, "there is none without files"


def test_ranks_that_raise_the_same_error_are_shown_once_and_counted(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time
        # All are in the middle of raising it when the first one has ended.
        os.mkfifo(f"here.{os.environ['RANK']}")
        while sum(name.startswith("here.") for name in os.listdir()) < 4:
            time.sleep(0.01)
        def load():
            raise ValueError("no data")
        load()
        """
    )
    # Workers that are stopped print nothing, so none is.
    done = launcher.run("-np", "4", "--grace-period", "20", "sh", "-c", f"trap '' TERM; {sys.executable} {script}")
    assert done.returncode == 1
    said = done.stderr.splitlines()
    begin = next(number for number, line in enumerate(said) if "Traceback" in line)
    first = said[begin][: len("[0]<stderr>:")]
    assert [line.removeprefix(first) for line in said[begin : begin + 6] if line.startswith(first)][-1] == (
        "ValueError: no data"
    )
    assert [line for line in said if "<stderr>:Traceback" in line] == [said[begin]]
    others = [rank for rank in range(4) if f"[{rank}]" not in first]
    assert f"hvdgloo-run: the same error on ranks {ranges(others)}: ValueError: no data" in said, done.stderr
    assert said[-1].startswith(f"hvdgloo-run: the job failed: rank {first[1]} on host "), "whose traceback that was"


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_the_rank_that_is_blamed_is_the_one_whose_traceback_was_shown(launcher: Launcher, elastic: bool) -> None:
    """Not another one that has failed alike, and only ended earlier."""
    script = launcher.script(
        """
        import os, signal, sys, time, traceback
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        import hvdgloo.numpy as hvd
        hvd.init()
        rank = hvd.rank()
        while rank == 0 and not os.path.exists("shown"):
            time.sleep(0.01)
        try:
            raise ValueError("no data")
        except ValueError:
            traceback.print_exc()
        while rank == 1 and not os.path.exists("told"):
            time.sleep(0.01)
        sys.exit(1)
        """
    )
    options = ("--min-np", "2", "--failures-per-host", "1") if elastic else ()
    started = launcher.start("-np", "2", "--grace-period", "20", *options, script)
    assert started.stderr is not None
    said: list[str] = []
    for awaited, file in (("ValueError", "shown"), ("the same error on rank 0", "told")):
        while not said or awaited not in said[-1]:
            said.append(started.stderr.readline().decode().rstrip())
            assert said[-1], f"it ends before it has shown {awaited}"
        launcher.script("", file)
    said += started.stderr.read().decode().splitlines()
    assert [line[:11] for line in said if "Traceback" in line] == ["[1]<stderr>"]
    assert said[-1].startswith("hvdgloo-run: the job failed: rank 1 on host localhost exited with status 1: ValueError")
