"""The discovery of running jobs: files that are locked while their launchers live."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hvdgloo._observe.jobs import JobFile, jobs, published, socket_path
from hvdgloo.errors import ConfigError

JOB = JobFile("0123456789abcdef", 17, "hvdgloo-run -np 4 train.py", 1e9, "/s", "token", "http://h:1/")

LAUNCHER = """if True:
    import sys
    from hvdgloo._observe.jobs import JobFile, published
    folder, id, started = sys.argv[1:]
    with published(JobFile(id, 17, "train.py", float(started), f"{folder}/{id}.sock", "token"), folder):
        print("published", flush=True)
        sys.stdin.read()
"""


def launcher(folder: Path, id: str, started: float) -> subprocess.Popen[str]:
    """A process that has published a job, and ends when its standard input does."""
    command = [sys.executable, "-c", LAUNCHER, str(folder), id, str(started)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"
    return process


def test_running_jobs_are_found_the_last_one_first(tmp_path: Path) -> None:
    with launcher(tmp_path, "a" * 32, 1.0) as one, launcher(tmp_path, "b" * 32, 2.0) as other:
        assert [job.id for job in jobs(str(tmp_path))] == ["b" * 32, "a" * 32]
        other.communicate("", timeout=50)
        assert [job.id for job in jobs(str(tmp_path))] == ["a" * 32]
        one.communicate("", timeout=50)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_has_left_behind_is_removed(tmp_path: Path) -> None:
    with launcher(tmp_path, "a" * 32, 1.0) as process:
        (tmp_path / ("a" * 32 + ".sock")).touch()
        process.kill()
    assert len(list(tmp_path.iterdir())) == 2
    assert jobs(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_found_in_its_own_process_and_stays_locked(tmp_path: Path) -> None:
    with published(JOB, str(tmp_path)):
        assert jobs(str(tmp_path)) == [JOB]
        look = "import sys; from hvdgloo._observe.jobs import jobs; print(len(jobs(sys.argv[1])))"
        seen = subprocess.run(
            [sys.executable, "-c", look, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
        )
        assert seen.stdout == "1\n"


def test_two_who_look_at_once_do_not_take_each_other_for_a_launcher(tmp_path: Path) -> None:
    with launcher(tmp_path, "a" * 32, 1.0) as process:
        process.kill()
    (left,) = tmp_path.iterdir()
    with open(left, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert jobs(str(tmp_path)) == []


def test_the_next_launcher_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    with launcher(tmp_path, "a" * 32, 1.0) as process:
        process.kill()
    with published(JOB, str(tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == ["0123456789ab.job"]


def test_the_file_is_for_this_user_alone_and_goes_away(tmp_path: Path) -> None:
    with published(JOB, str(tmp_path)):
        (file,) = tmp_path.iterdir()
        assert file.name == "0123456789ab.job"
        assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_path_and_command_are_any_bytes_is_found(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(JOB, command="train.py \udcff", unix="/\udcfe/s")
    with published(odd, str(tmp_path)):
        assert jobs(str(tmp_path)) == [odd]


def test_what_is_no_job_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x.job").write_text("{}")
    (tmp_path / "y.job").write_bytes(b"\xff")
    (tmp_path / "z.sock").touch()
    (tmp_path / "d.job").mkdir()
    assert jobs(str(tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_files_of_other_users_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with published(JOB, str(tmp_path)):
        another = os.geteuid() + 1
        monkeypatch.setattr("os.geteuid", lambda: another)
        assert jobs(str(tmp_path)) == []
        monkeypatch.undo()
        assert jobs(str(tmp_path)) == [JOB]


@pytest.mark.timeout(10)
def test_neither_a_named_pipe_nor_a_link_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.job")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with published(JOB, str(elsewhere)):
        (tmp_path / "b.job").symlink_to(elsewhere / "0123456789ab.job")
        assert jobs(str(tmp_path)) == []


def test_where_there_is_no_folder_there_are_no_jobs(tmp_path: Path) -> None:
    assert jobs(str(tmp_path / "nowhere")) == []
    with pytest.raises(ConfigError, match="cannot be written"), published(JOB, str(tmp_path / "nowhere")):
        pass


def test_names_are_short_because_sockets_paths_must_be(tmp_path: Path) -> None:
    assert socket_path("/run/user/1000/hvdgloo", "0" * 32) == "/run/user/1000/hvdgloo/000000000000.sock"
