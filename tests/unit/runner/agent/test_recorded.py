"""Directories in which workers record errors, and those that killed agents have left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hvdgloo.runner.agent.recorded import RecordedErrors, folder_of


def test_the_end_of_an_agent_removes_what_killed_ones_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = RecordedErrors(), RecordedErrors()
    one.attend("1")
    other.attend("2")
    abandoned, elsewhere = Path(folder_of("3")), tmp_path / "mine"
    for folder in (abandoned, elsewhere):
        folder.mkdir()
        (folder / "0.json").write_text("{}")
    (tmp_path / folder_of("4")).symlink_to(elsewhere)
    one.close()
    left = {Path(folder_of(agent)) for agent in "24"}
    assert set(tmp_path.iterdir()) == {elsewhere, *left}, "other agents live, and a link leads to anything"
    assert list(elsewhere.iterdir())
    other.close()
    assert not left & {path for path in tmp_path.iterdir() if not path.is_symlink()}
