"""``hvdgloo-run report compare``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from hvdgloo._observe.page import report
from hvdgloo.runner.cli.main import main
from tests.support.observed import SimulatedJob


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of two jobs; the later one has no slow rank, and a better loss."""
    folder = tmp_path_factory.mktemp("reports")
    for name, job in (("before", SimulatedJob(lag=0.05, logs=True)), ("after", SimulatedJob(slow=None, logs=True))):
        job.advance(20)
        job.observatory.ended(0, "")
        report.write(job.observatory, str(folder / f"{name}.html"))
    return folder


def test_two_reports_are_printed_side_by_side(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "compare", str(reports / "before.json"), str(reports / "after.html")]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        f"earlier: {reports}/before.json: hvdgloo-run -np 4 python train.py, 4 ranks on 2 hosts, ended"
    )
    assert "\nThe later job is " in text
    assert "The later job is faster: a step takes " in text
    lines = text.splitlines()
    (step,) = [line for line in lines if line.startswith("time of a step ")]
    assert step.endswith(" % better")
    (loss,) = [line for line in lines if line.startswith("loss ")]
    assert len(loss.split()) >= 3
    assert not any(line != line.rstrip() for line in lines)


class OnTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_where_rich_is_installed(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdgloo.runner.cli import report_comparison

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    paths = [str(reports / "before.json"), str(reports / "after.json")]
    plain, coloured, without = io.StringIO(), OnTerminal(), OnTerminal()
    report_comparison.main(paths, plain)
    report_comparison.main(paths, coloured)
    assert "\x1b[32mtime of a step" in coloured.getvalue()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report_comparison.main(paths, without)
    assert without.getvalue() == plain.getvalue()
    assert "\x1b" not in plain.getvalue()


@pytest.mark.parametrize("arguments", [[], ["a.json"], ["a.json", "b.json", "c.json"], ["--help", "a.json"]])
def test_wrong_arguments_are_answered_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "compare", *arguments]) == 2
    assert "report: write hvdgloo-run report compare EARLIER LATER" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"snapshot": 3}', b"\xff", b"[" * 100_000])
def test_other_files_are_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert main(["report", "compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "x.json is not a report; hvdgloo-run --report " in capsys.readouterr().err


def test_a_report_that_is_missing_or_of_another_version_is_refused(
    reports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "compare", str(tmp_path / "x.html"), str(tmp_path / "x.html")]) == 2
    assert "x.json cannot be read: No such file or directory" in capsys.readouterr().err
    content = json.loads((reports / "before.json").read_text())
    content["snapshot"]["schema"] = 0
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert main(["report", "compare", str(tmp_path / "old.json"), str(reports / "after.json")]) == 2
    assert "old.json was written by another version of hvdgloo" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("words", [["report", "compare"], ["timeline", "merge"]], ids=" ".join)
def test_help(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, flag]) == 0
    assert capsys.readouterr().out.startswith(f"usage: hvdgloo-run {' '.join(words)} ")
