"""The private folder for what belongs to running jobs: nobody else's, whatever was there before."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdgloo._platform.runtime import LONGEST_SOCKET, ROOM, agent_folder, runtime_folder
from hvdgloo.errors import ConfigError


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_it_is_in_the_logins_own_folder_and_private(temporary: Path) -> None:
    own = temporary / "run"
    own.mkdir(mode=0o700)
    folder = runtime_folder({"XDG_RUNTIME_DIR": str(own)})
    assert folder == str(own / "hvdgloo")
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert runtime_folder({"XDG_RUNTIME_DIR": str(own)}) == folder, "a second job has the same"


@pytest.mark.parametrize("given", ["", "run", "missing", "open"])
def test_without_such_a_folder_it_is_among_temporary_files(temporary: Path, given: str) -> None:
    (temporary / "open").mkdir(mode=0o755)
    environ = {"XDG_RUNTIME_DIR": given if given in ("", "run") else str(temporary / given)}
    assert runtime_folder(environ) == str(temporary / f"hvdgloo-{os.geteuid()}")


@pytest.mark.parametrize("how", ["link", "open", "file"])
def test_what_somebody_else_may_have_put_there_is_refused(
    temporary: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = temporary / f"hvdgloo-{os.geteuid()}"
    if how == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(temporary / "elsewhere")
    elif how == "open":
        taken.mkdir()
        taken.chmod(0o750)
    else:
        taken.write_text("")
    monkeypatch.setattr("hvdgloo._platform.runtime.SHORT", str(temporary))
    with pytest.raises(ConfigError, match="is not a folder that this user alone may enter"):
        runtime_folder({})


def test_sockets_have_room_in_it(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * LONGEST_SOCKET)
    long.mkdir(mode=0o700)
    monkeypatch.setattr("hvdgloo._platform.runtime.SHORT", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = runtime_folder({"XDG_RUNTIME_DIR": str(long)})
    assert folder == str(temporary / f"hvdgloo-{os.geteuid()}")
    assert len(folder) + ROOM <= LONGEST_SOCKET


def test_agents_of_one_machine_have_folders_of_their_own(temporary: Path) -> None:
    job = "0123456789abcdef" * 2
    first, second = agent_folder(f"{job}.0", {}), agent_folder(f"{job}.1234", {})
    assert first != second
    assert os.path.basename(second) == "0123456789ab.1234"
    assert len(os.path.basename(second)) + len("/4194304") <= ROOM
    assert not os.path.exists(first)
