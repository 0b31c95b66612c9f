"""A newcomer's mistakes and their messages: each is named at once, before anything is started."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import hvdgloo
import hvdgloo.numpy
from hvdgloo._platform.writable import why_not_writable
from hvdgloo.rendezvous import _cli as rendezvous_cli
from hvdgloo.runner.agent.preflight import lacking
from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.cli.main import main
from hvdgloo.runner.job.command import resolve_command
from hvdgloo.runner.protocol.frames import Require
from hvdgloo.runner.transport.failures import Cause, preflight_failure


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the refusal that ``hvdgloo-run`` prints for these arguments, each line without the program's name."""
    assert main(list(argv)) == 2
    return capsys.readouterr().err.replace("hvdgloo-run: ", "").rstrip("\n")


class TestHelp:
    def test_sizes_are_readable(self) -> None:
        text = " ".join(build_parser().format_help().split())
        assert not re.search(r"\d\.\d+e[+-]\d+", text)
        assert "allgather or reducescatter (default: 1 MiB)" in text
        assert re.search(r"--hierarchical-threshold BYTES .*?\(default: 128 KiB\)", text)
        assert re.search(r"--fusion-threshold-mb MB .*?\(default: 32\)", text)


class TestNamesThatAreNotHere:
    @pytest.mark.parametrize("name", ["init", "rank", "allreduce", "DistributedOptimizer"])
    def test_a_front_end_s_name_leads_to_the_front_ends(self, name: str) -> None:
        assert hasattr(hvdgloo.numpy, name) or name == "DistributedOptimizer"
        assert not hasattr(hvdgloo, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; import .*import hvdgloo.torch as hvd "):
            getattr(hvdgloo, name)

    def test_any_other_name(self) -> None:
        with pytest.raises(AttributeError, match=r"no attribute 'innit'$"):
            hvdgloo.innit  # type: ignore[attr-defined]  # noqa: B018


class TestFlags:
    @pytest.mark.parametrize(
        ("argv", "text"),
        [
            (["-np", "0", "true"], "-np/--num-proc: expected a whole number, at least 1, not '0'"),
            (["-np", "two", "true"], "-np/--num-proc: expected a whole number, at least 1, not 'two'"),
            (["-np"], "-np/--num-proc: a value is missing"),
            (["--verbose=1", "true"], "--verbose: takes no value, but was given '1'"),
            (["-np", "2", "-c", "print(1)"], "there is no option -c; did you mean -np or python -c as the command?"),
            (["--export", "some", "true"], "--export: invalid choice: 'some' (choose from "),
        ],
    )
    def test_a_value_that_cannot_be_used(self, argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert complaint(capsys, *argv).startswith(text)


class TestPrograms:
    @pytest.mark.parametrize(
        "argv",
        [
            ["--output-filename", "train.py"],
            ["--output-filename=train.py"],
            ["--output-filename", "train.py", "--lr", "0.1"],
        ],
    )
    def test_a_program_that_was_taken_for_a_flag_s_value(
        self, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert not complaint(capsys, *argv).startswith("there is no command to run: "), "so it may be a directory"
        (tmp_path / "train.py").touch()
        assert complaint(capsys, "-np", "2", *argv).startswith(
            "there is no command to run: --output-filename took train.py as its value; write "
            "hvdgloo-run --output-filename VALUE train.py"
        )

    def resolve(self, *command: str, cwd: Path) -> tuple[str, ...]:
        return resolve_command(command, python="python", cwd=str(cwd), search_path="/usr/bin:/bin", module_path=())

    @pytest.mark.parametrize("name", [".", "src", "./src"])
    def test_a_folder_is_no_program(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        with pytest.raises(hvdgloo.errors.ConfigError, match=f"^{re.escape(name)} is a directory; name the program"):
            self.resolve(name, cwd=tmp_path)

    def test_a_program_may_be_called_like_a_folder_here(self, tmp_path: Path) -> None:
        (tmp_path / "sh").mkdir()
        assert self.resolve("sh", cwd=tmp_path) in (("/usr/bin/sh",), ("/bin/sh",))

    def test_a_script_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "train.py").write_text("")
        assert self.resolve("train.py", cwd=tmp_path) == ("python", "train.py")
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root may read everything
        for command in (["train.py"], ["python", "train.py"]):
            with pytest.raises(hvdgloo.errors.ConfigError, match=r"^train\.py cannot be read: you have no permission"):
                self.resolve(*command, cwd=tmp_path)


class TestFilesToBeWritten:
    def test_why_not(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert why_not_writable(str(tmp_path / "new/folders/trace.json")) == ""
        assert why_not_writable(str(tmp_path / "file")) == ""
        assert why_not_writable(str(tmp_path)) == "it is a directory"
        assert why_not_writable(str(tmp_path / "file/x/y.json")) == f"{tmp_path}/file is not a directory"

    def test_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
        (tmp_path / "file").write_text("")
        assert why_not_writable(str(tmp_path / "file")) == "permission denied"
        assert why_not_writable(str(tmp_path / "new/trace.json")) == f"permission denied in {tmp_path}"

    @pytest.mark.parametrize("given", ["flag", "variable", "{rank}"])
    def test_a_trace(
        self, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        path = str(tmp_path / "file" / ("{rank}.json" if given == "{rank}" else "trace.json"))
        if given == "variable":
            monkeypatch.setenv("HOROVOD_TIMELINE", path)
        flags = [] if given == "variable" else ["--timeline-filename", path]
        text = complaint(capsys, "-np", "2", *flags, "true")
        reason = f"{path} cannot be written: {tmp_path}/file is not a directory"
        assert text == f"--timeline-filename (HVDGLOO_TIMELINE): {reason}"

    def test_a_trace_on_another_host(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert lacking(Require(str(tmp_path), outputs=["new/trace.json"]), {}).unwritable == ()
        found = lacking(Require(str(tmp_path), outputs=["file/trace.json"]), {})
        diagnosis = preflight_failure(found, str(tmp_path))
        assert diagnosis is not None
        assert diagnosis.cause is Cause.OUTPUT
        assert diagnosis.text == f"file/trace.json cannot be written: {tmp_path}/file is not a directory"

    def test_output(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").write_text("")
        text = complaint(capsys, "-np", "2", "--output-filename", str(tmp_path / "file/logs"), "true")
        assert text == f"--output-filename {tmp_path}/file/logs: {tmp_path}/file is not a directory"

    def test_output_to_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").write_text("")
        text = complaint(capsys, "-np", "2", "--output-filename", str(tmp_path / "file"), "true")
        assert text == f"--output-filename {tmp_path}/file: it is not a directory"

    def test_output_where_there_can_be_no_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = complaint(capsys, "-np", "2", "--output-filename", "/proc/nothing/logs", "true")
        assert text.startswith("--output-filename /proc/nothing/logs: /proc/nothing cannot be written: ")

    def test_output_over_an_earlier_job_s(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "logs/rank.1/stderr").mkdir(parents=True)
        text = complaint(capsys, "-np", "2", "--output-filename", str(tmp_path / "logs"), "true")
        logs = f"{tmp_path}/logs"
        assert text == f"--output-filename {logs}: {logs}/rank.1/stderr cannot be written: it is a directory"


class TestBind:
    def test_an_address_of_another_host(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert rendezvous_cli.main(["-np", "2", "--bind", "198.51.100.7:29400"]) == 2
        text = capsys.readouterr().err
        assert text.startswith(
            "hvdgloo-rendezvous: error: cannot listen on port 29400 of 198.51.100.7: this host has no such address; "
            "--bind takes one of "
        )
        assert text.endswith(", or 0.0.0.0 for all\n")
        assert "127.0.0.1" in text

    def test_a_name_that_is_unknown(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert rendezvous_cli.main(["-np", "2", "--bind", "no-such-host.invalid:29400"]) == 2
        assert "--bind takes" not in capsys.readouterr().err
