"""Requirements of a host that are checked before its workers start. Pain 19."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdgloo.runner.agent.preflight import lacking
from hvdgloo.runner.job.command import needs, resolve_elsewhere
from hvdgloo.runner.protocol.frames import Lacking, Require
from hvdgloo.runner.transport.failures import Cause, Retry, preflight_failure


class TestRequirements:
    def test_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        (tmp_path / "tool").touch(mode=0o755)
        required = Require(str(tmp_path), ["train.py"], ["./tool", "sh"], "")
        assert lacking(required, {"PATH": "/bin"}) == Lacking()
        assert preflight_failure(lacking(required, {"PATH": "/bin"}), str(tmp_path)) is None

    def test_what_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "plain").touch(mode=0o644)
        found = lacking(Require(str(tmp_path), ["train.py"], ["./plain", "no-such-tool"], "/bin"), {})
        assert found.things == ("file train.py", "program ./plain", "program no-such-tool")
        diagnosis = preflight_failure(found, "/data")
        assert diagnosis is not None
        assert diagnosis.cause is Cause.PROGRAM
        assert diagnosis.text.startswith("there is no file train.py and no program ./plain and no program no-such-tool")

    def test_pain_19_no_working_directory(self, tmp_path: Path) -> None:
        gone = str(tmp_path / "gone")
        diagnosis = preflight_failure(lacking(Require(gone, ["train.py"]), {}), gone)
        assert diagnosis is not None
        assert (diagnosis.cause, diagnosis.retry) == (Cause.DIRECTORY, Retry.NEVER)
        assert f"there is no working directory {gone}; hvdgloo-run copies no files" in diagnosis.text

    @pytest.mark.parametrize(
        ("command", "argv", "files", "programs"),
        [
            (["train.py", "-v"], ("/opt/py", "train.py", "-v"), ["train.py"], ()),
            (["-m", "a.b"], ("/opt/py", "-m", "a.b"), [], ()),
            (["python", "-c", "1"], ("/opt/py", "-c", "1"), [], ()),
            (["python3", "x.py"], ("/opt/py", "x.py"), ["x.py"], ()),
            (["nvidia-smi"], ("nvidia-smi",), (), ["nvidia-smi"]),
            (["./run.sh", "a"], ("./run.sh", "a"), (), ["./run.sh"]),
        ],
    )
    def test_a_command_s_meaning_elsewhere(
        self, command: list[str], argv: tuple[str, ...], files: list[str], programs: list[str]
    ) -> None:
        assert resolve_elsewhere(command, python="/opt/py") == argv
        assert needs(argv, "/opt/py") == (files, programs)
