"""The private directory for what belongs to running jobs: no other user's, whatever was there before."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdgloo._platform.runtime import LONGEST_SOCKET, ROOM, agent_folder, remove_stale, runtime_folder
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
def test_what_another_user_may_have_put_there_is_refused(
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
    with pytest.raises(ConfigError, match="is not a directory that this user alone may enter"):
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


def test_what_killed_processes_have_left_is_removed_and_nothing_else(temporary: Path) -> None:
    hour_ago = time.time() - 3600
    sockets = []

    def listener(path: Path, kind: socket.SocketKind) -> None:
        sockets.append(socket.socket(socket.AF_UNIX, kind))
        sockets[-1].bind(str(path))
        if kind == socket.SOCK_STREAM:
            sockets[-1].listen(1)

    def agent(name: str) -> Path:
        (temporary / name).mkdir()
        return temporary / name

    # Of the living: an agent, a launcher that publishes nothing, agents and files that have just been begun.
    listener(agent("aa.0") / "agent", socket.SOCK_DGRAM)
    listener(temporary / "bb.sock", socket.SOCK_STREAM)
    agent("cc.1")
    (temporary / "dd.job.new").touch()
    # What a launcher that died has published belongs to every process that can read its lock.
    listener(temporary / "ee.sock", socket.SOCK_STREAM)
    sockets.pop().close()
    (temporary / "ee.job").touch()
    # Not ours.
    (temporary / "notes.txt").touch()
    os.utime(temporary / "notes.txt", (hour_ago, hour_ago))
    living = sorted(path.name for path in temporary.iterdir())

    dead = agent("a1.0")
    listener(dead / "agent", socket.SOCK_DGRAM)
    (dead / "trace.1.0.part").touch()
    listener(temporary / "b1.sock", socket.SOCK_STREAM)
    for gone in sockets[-2:]:
        gone.close()
    for old in (agent("c1.1"), temporary / "d1.job.new"):
        if old.suffix == ".new":
            old.touch()
        os.utime(old, (hour_ago, hour_ago))
    assert len(list(temporary.iterdir())) == len(living) + 4

    remove_stale(str(temporary))
    assert sorted(path.name for path in temporary.iterdir()) == living
    sockets[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        sockets[1].accept()  # no client has connected
    for each in sockets:
        each.close()


def test_where_there_is_no_folder_nothing_is_stale(temporary: Path) -> None:
    remove_stale(str(temporary / "nowhere"))
