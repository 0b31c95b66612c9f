"""The program by which the Makefile runs several targets at a time."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support import side_by_side
from tests.support.launching import wait_for
from tests.support.pages import ROOT


def program(path: Path, runs: str = sys.executable) -> Path:
    """A program that passes all of its arguments on to another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(runs)} "$@"\n')
    path.chmod(0o755)
    return path


MAKE = """
import pathlib, signal, sys, time

option, target = sys.argv[1:]
assert option == "--no-print-directory"
here = pathlib.Path(__file__).parent
print(target, "begins", flush=True)
if target == "bad":
    sys.exit(3)
elif target == "absent":
    print("absent: skipped, for lack of a reason")
    sys.exit()
elif target in ("left", "right"):
    (here / target).touch()
    other = here / {"left": "right", "right": "left"}[target]
    deadline = time.monotonic() + 20
    while not other.exists():
        assert time.monotonic() < deadline, "it is alone"
        time.sleep(0.01)
elif target == "long":
    (here / target).touch()
    signal.alarm(30)
    signal.pause()
print(target, "ends")
"""
"""A make whose targets are known to the tests; ``left`` and ``right`` end only if they run at the same time."""


class TestSideBySide:
    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        (tmp_path / "make.py").write_text(MAKE)
        make = tmp_path / "make"
        make.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path))}/make.py "$@"\n')
        make.chmod(0o755)
        started = []

        def run(*arguments: str) -> subprocess.Popen[str]:
            program = [sys.executable, ROOT / "tests/support/side_by_side.py", "--make", make, *arguments]
            started.append(
                subprocess.Popen(
                    program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
                )
            )
            return started[-1]

        yield run
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def test_targets_run_at_the_same_time_and_each_ones_output_is_in_one_piece(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        process = start("--jobs", "2", "left", "right")
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 0, output
        assert "left begins\nleft ends\nleft " in output
        assert "right begins\nright ends\nright " in output

    def test_one_after_the_other_if_only_one_may_run(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        process = start("--jobs", "1", "one", "two")
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 0, output
        assert output.index("one ends") < output.index("two: started")

    def test_a_failure_is_the_exit_status_and_stops_no_other(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        process = start("--jobs", "1", "bad", "good", "absent")
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 1
        assert "good ends" in output
        table = output.splitlines()[-3:]
        assert [line.split()[0] for line in table] == ["bad", "good", "absent"]
        assert [re.split(r" of processor time +", line)[1] for line in table] == [
            "FAILED with status 3",
            "passed",
            "skipped, for lack of a reason",
        ]

    def test_ctrl_c_ends_all_and_shows_what_they_have_said(
        self, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
    ) -> None:
        process = start("--jobs", "1", "long", "never")
        wait_for((tmp_path / "long").exists)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=40)
        assert process.returncode != 0
        assert "long begins" in output
        assert "never" not in output

    def test_ctrl_c_in_the_moment_in_which_a_target_is_collected(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wait4 = os.wait4

        def interrupted(*args: int) -> NoReturn:
            monkeypatch.setattr(os, "wait4", wait4)
            wait4(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "wait4", interrupted)
        with pytest.raises(KeyboardInterrupt):
            side_by_side.run(["said", "never"], 1, ["/bin/echo"])
        output = capsys.readouterr().out
        assert f"{'=' * 20} said\nsaid\nsaid " in output
        assert "never" not in output
