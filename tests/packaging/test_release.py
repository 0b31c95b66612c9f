"""``make release`` in a clone: the commit, the tag and the distributions that it makes, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.building import checkout, environment, metadata, run
from tests.support.launching import run_command

CHANGELOG = (
    "# Changelog\n\n## 7.1.0 (not released yet)\n\n- Something is better.\n\n## 7.0.0 (2026-01-02)\n\n- First.\n"
)


def git(folder: Path, *arguments: str) -> str:
    return run(["git", "-c", "user.name=A", "-c", "user.email=a@b.example", *arguments], folder)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkout(tmp_path_factory.mktemp("original"))
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All")
    git(folder, "tag", "v7.0.0")
    return folder


@pytest.fixture
def clone(original: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "--quiet", str(original), "clone")
    for name, value in (("user.name", "A"), ("user.email", "a@b.example")):
        git(tmp_path / "clone", "config", name, value)
    return tmp_path / "clone"


def release(clone: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "packaging/release.py", version]
    return run_command(command, cwd=clone, env=environment(), timeout=55)


def test_a_release_is_a_commit_a_tag_and_distributions_that_can_be_uploaded(clone: Path) -> None:
    done = release(clone, "7.1.0")
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.name for path in (clone / "build/release").iterdir()}
    assert made == {
        f"{name}-7.1.0{end}" for name in ("hvdgloo", "hvdgloo_horovod") for end in (".tar.gz", "-py3-none-any.whl")
    }
    (wheel,) = (clone / "build/release").glob("hvdgloo_horovod*.whl")
    assert "hvdgloo==7.1.0" in metadata(wheel).get_all("Requires-Dist", [])
    assert git(clone, "show", "--format=%s", "--name-only", "v7.1.0^{commit}").split("\n")[:1] == ["Release 7.1.0"]
    assert '__version__ = "7.1.0"' in git(clone, "show", "v7.1.0:hvdgloo/version.py")
    assert re.search(r"^## 7\.1\.0 \(20\d\d-\d\d-\d\d\)$", git(clone, "show", "v7.1.0:CHANGELOG.md"), re.MULTILINE)
    assert git(clone, "status", "--porcelain") == ""
    assert all(name in done.stdout for name in made)
    assert "Nothing was pushed or uploaded" in done.stdout

    again = release(clone, "7.1.0")
    assert again.returncode == 1
    assert "there is a tag v7.1.0 already" in again.stderr


def test_a_release_that_cannot_be_built_changes_nothing(clone: Path) -> None:
    (clone / "setup.py").write_text("raise SystemExit('the build is broken')\n")
    git(clone, "commit", "--quiet", "--all", "--message", "Break it")
    before = git(clone, "rev-parse", "HEAD")
    done = release(clone, "7.1.0")
    assert done.returncode == 1
    assert "the build is broken" in done.stderr
    assert git(clone, "rev-parse", "HEAD") == before
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "tag", "--list") == "v7.0.0\n"


@pytest.mark.parametrize(
    ("version", "changelog", "reason"),
    [
        ("7.1", CHANGELOG, "'7.1' is no version; give one like 0.2.0"),
        ("7.0.0", CHANGELOG, "there is a tag v7.0.0 already"),
        ("6.9.0", CHANGELOG, "6.9.0 is older than v7.0.0, which has a tag"),
        ("7.0.0rc1", CHANGELOG, "7.0.0rc1 is older than v7.0.0, which has a tag"),
        ("7.2.0", CHANGELOG, "must begin with a section '## 7.2.0 (not released yet)'"),
        ("7.1.0", CHANGELOG.replace("- Something is better.\n", ""), "does not tell users what changed in 7.1.0"),
    ],
)
def test_a_release_that_would_have_to_be_undone_is_refused(
    clone: Path, version: str, changelog: str, reason: str
) -> None:
    if changelog != CHANGELOG:
        (clone / "CHANGELOG.md").write_text(changelog)
        git(clone, "commit", "--quiet", "--all", "--message", "Say less")
    done = release(clone, version)
    assert done.returncode == 1
    assert reason in done.stderr
    assert git(clone, "status", "--porcelain") == ""


def test_a_release_is_of_what_is_committed(clone: Path) -> None:
    (clone / "hvdgloo/more.py").write_text("")
    done = release(clone, "7.1.0")
    assert done.returncode == 1
    assert "hvdgloo/more.py" in done.stderr
