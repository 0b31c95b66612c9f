"""Make a release: the version in its files, the date in the changelog, distributions that could be uploaded, a commit
and a tag. Nothing is uploaded or pushed, and if a step fails, the files are as they were.

    make release VERSION=0.2.0
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ROOT / "build/release"
CHANGELOG = ROOT / "CHANGELOG.md"

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?")
_PLACES = {
    ROOT / "hvdgloo/version.py": r'(?m)^(__version__ = ")[^"]+(")$',
    ROOT / "packaging/horovod/setup.cfg": r"(?m)^(version = |    hvdgloo == )\S+()$",
}
"""The files that have the version, each with a pattern for what is around it."""

_SECTION = re.compile(r"^## (\S+) \(([^)]*)\)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_UNRELEASED = "not released yet"


def refuse(reason: str) -> NoReturn:
    """End with a sentence; nothing has been changed."""
    raise SystemExit(f"release: {reason}")


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Run a command and return what it prints; end with that if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    if done.returncode:
        refuse(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def order(version: str) -> tuple[int, ...]:
    """Return a version's place among others: candidates (rc) come before what they are for."""
    matched = _VERSION.fullmatch(version)
    if matched is None:
        refuse(
            f"{version!r} is no version; give one like 0.2.0, or 0.2.0rc1 for a candidate: make release VERSION=0.2.0"
        )
    *parts, candidate = matched.groups()
    return (*map(int, parts), int(candidate) if candidate else sys.maxsize)


def check(version: str) -> None:
    """Refuse what would have to be undone after it was published."""
    place = order(version)
    changed = run("git", "status", "--porcelain")
    if changed:
        refuse(f"commit or remove what has changed since the last commit first:\n{changed}")
    tags = [tag[1:] for tag in run("git", "tag", "--list", "v*").split()]
    if version in tags:
        refuse(f"there is a tag v{version} already; a version is released once")
    newer = [tag for tag in tags if _VERSION.fullmatch(tag) and order(tag) > place]
    if newer:
        refuse(f"{version} is older than v{max(newer, key=order)}, which has a tag")
    section = _SECTION.search(CHANGELOG.read_text(encoding="utf-8"))
    wanted = f"## {version.partition('rc')[0]} ({_UNRELEASED})"
    if section is None or f"## {section[1]} ({section[2]})" != wanted:
        refuse(f"CHANGELOG.md must begin with a section {wanted!r}")
    if not section[3].strip():
        refuse(f"CHANGELOG.md does not tell users what changed in {version}")


def write(version: str, date: str) -> list[Path]:
    """Put the version into its files, and for a final one the date into the changelog; return what was changed."""
    changed = []
    for path, pattern in _PLACES.items():
        text = path.read_text(encoding="utf-8")
        text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", text)
        if not count:
            refuse(f"{path.relative_to(ROOT)} has no version")
        path.write_text(text, encoding="utf-8")
        changed.append(path)
    text = CHANGELOG.read_text(encoding="utf-8")
    CHANGELOG.write_text(text.replace(f"## {version} ({_UNRELEASED})", f"## {version} ({date})", 1), encoding="utf-8")
    return [*changed, CHANGELOG]


def build(seconds: int) -> list[Path]:
    """Build both distributions, each as source and as wheel, and have twine check them.

    Args:
        seconds: time of the release since 1970, for the files' dates: a second build makes the same bytes.
    """
    for old in DISTRIBUTIONS.glob("*"):
        old.unlink()
    DISTRIBUTIONS.mkdir(parents=True, exist_ok=True)
    for source in (ROOT, ROOT / "packaging/horovod"):
        command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation"]
        command += ["--outdir", DISTRIBUTIONS, source]
        run(*command, folder=DISTRIBUTIONS, SOURCE_DATE_EPOCH=str(seconds))  # build/ would be taken for the tool
    made = sorted(DISTRIBUTIONS.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    return made


def release(version: str, now: datetime.datetime) -> None:
    """Make a release of what is committed."""
    check(version)
    try:
        changed = write(version, now.date().isoformat())
        made = build(int(now.timestamp()))
        run("git", "commit", "--quiet", "--message", f"Release {version}", "--", *changed)
    except BaseException:
        run("git", "checkout", "--quiet", "--", *_PLACES, CHANGELOG)
        raise
    run("git", "tag", "--annotate", f"v{version}", "--message", f"hvdgloo {version}")
    print(f"release: {version} is committed and has the tag v{version}. These can be uploaded:")
    print("".join(f"  {path.relative_to(ROOT)}\n" for path in made))
    print("Nothing was pushed or uploaded. What is left to do:")
    print(f"  git push origin HEAD v{version}")
    print(f"  twine upload {DISTRIBUTIONS.relative_to(ROOT)}/*")
    print(f"To take it back: git tag --delete v{version}, git reset --hard HEAD~1")


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the version, such as 0.2.0, or 0.2.0rc1 for a candidate")
    release(parser.parse_args(arguments).version, datetime.datetime.now(datetime.timezone.utc))


if __name__ == "__main__":
    main()
