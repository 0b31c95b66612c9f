"""Files that are made where others may write, too: nothing is written through a link of theirs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdgloo._engine.timeline import Timeline
from hvdgloo._engine.tuning import _Log
from hvdgloo._observe.merging import merge
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.page import report
from hvdgloo._platform import files
from hvdgloo.errors import ConfigError
from hvdgloo.runner.console.console import make_directory
from hvdgloo.runner.console.writer import FileTarget
from tests.support.threads import Task

ANOTHER = 65534


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a link or file another user's; for that, root gives it away, and any other user becomes another."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
        else:
            monkeypatch.setattr(files.os, "geteuid", lambda: ANOTHER)

    return give


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of this user's, elsewhere."""
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that others can write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def timeline(path: Path) -> None:
    trace = Timeline(str(path), 0)
    trace.close()


def recording(path: Path) -> None:
    report.write(Observatory(job="j", command="c", started=1.0, versions={}), str(path))


def merged(path: Path) -> None:
    own = path.parent.parent / "own.json"
    timeline(own)
    merge([str(own)], str(path))


def log(path: Path) -> None:
    written = _Log(str(path))
    assert written._file is not None
    written._file.close()


def output(path: Path) -> None:
    FileTarget(str(path)).close()


WRITERS = [timeline, recording, merged, log, output]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_of_another_user_is_replaced_and_what_it_leads_to_is_left_alone(
    write: Callable[[Path], None], shared: Path, precious: Path, foreign: Callable[[Path], None]
) -> None:
    path = shared / "out.html"
    for name in (
        "out.html",
        "out.json",
        "out.html.part",
        f"out.html.{os.getpid()}.part",
        f"out.json.{os.getpid()}.part",
    ):
        (shared / name).symlink_to(precious)
        foreign(shared / name)
    write(path)
    assert precious.read_text() == "precious"
    assert not path.is_symlink()
    assert path.is_file()


@pytest.mark.parametrize("write", [log, lambda path: os.close(files.overwrite(str(path)))], ids=["log", "overwrite"])
def test_a_link_of_this_user_s_leads_on(write: Callable[[Path], None], shared: Path) -> None:
    target = shared / "runs" / "1.csv"
    target.parent.mkdir()
    target.write_text("earlier")
    (shared / "first").symlink_to("second")
    (shared / "second").symlink_to("runs/1.csv")
    write(shared / "first")
    assert (shared / "first").is_symlink()
    assert "earlier" not in target.read_text()


def test_links_that_lead_in_a_circle_are_an_error(shared: Path) -> None:
    (shared / "a").symlink_to("b")
    (shared / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        files.overwrite(str(shared / "a"))


def test_devices_and_pipes_are_written_to_as_they_are(shared: Path) -> None:
    os.close(files.overwrite(os.devnull, private=True))
    assert stat.S_IMODE(os.stat(os.devnull).st_mode) & 0o002
    os.mkfifo(shared / "pipe")
    reader = Task((shared / "pipe").read_bytes)
    with os.fdopen(files.overwrite(str(shared / "pipe"), private=True), "wb") as file:
        file.write(b"x")
    assert reader.result(30) == b"x"


def test_output_is_for_this_user_alone_even_where_another_had_made_the_file(
    shared: Path, foreign: Callable[[Path], None]
) -> None:
    path = shared / "stdout"
    path.write_text("")
    path.chmod(0o666)
    theirs = os.open(path, os.O_RDONLY)
    foreign(path)
    with os.fdopen(files.overwrite(str(path), private=True), "wb") as file:
        file.write(b"private")
    assert os.read(theirs, 10) == b""
    os.close(theirs)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with os.fdopen(files.overwrite(str(path), private=True, append=True), "ab") as file:
        file.write(b", too")
    assert path.read_text() == "private, too"


def test_no_output_goes_to_a_folder_that_another_user_s_link_leads_to(
    shared: Path, foreign: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (shared / "out").mkdir()
    link = shared / "out" / "rank.0"
    link.symlink_to(tmp_path / "mine")
    make_directory(str(shared / "out"))  # it is this user's own
    foreign(link)
    with pytest.raises(ConfigError, match=r"rank\.0 cannot be written: it is a link that belongs to another user"):
        make_directory(str(shared / "out"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_could_not_be_written_leaves_what_was_there_before_and_nothing_else(shared: Path) -> None:
    path = shared / "file"
    path.write_text("before")

    def fail() -> None:
        with files.replacing(str(path)) as file:
            file.write(b"after")
            file.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "before"
    assert list(shared.iterdir()) == [path]


def test_a_name_as_long_as_names_may_be_can_be_replaced(shared: Path) -> None:
    path = shared / ("n" * 255)
    with files.replacing(str(path), files.PRIVATE) as file:
        file.write(b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_timeline_goes_on_in_its_own_file_whatever_its_name_means_by_then(
    shared: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment in which it takes its name and the next, the name can become another user's link."""
    replace = os.replace

    def beaten(source: str, target: str) -> None:
        replace(source, target)
        os.unlink(target)
        os.symlink(precious, target)

    monkeypatch.setattr(files.os, "replace", beaten)
    timeline(shared / "tl.json")
    assert precious.read_text() == "precious"
