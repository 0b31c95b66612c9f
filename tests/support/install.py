"""``pip install`` that says what it does, for make: ``install.py .venv/bin/python "for the demo" torch==2.13.0``.

Each download is announced with its size. In a long silence (a large download, files that are unpacked) there is a line
every few seconds with the time and the size of the environment so far, and at the end the total. pip's own words are
shown only if it fails. Nothing beside the standard library is needed, since make asks before there is anything.
"""

from __future__ import annotations

import argparse
import configparser
import http.client
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

SILENCE_S = 5.0
"""After so long without news there is a line."""
PROBE_S = 5.0

_FETCHED = re.compile(r"\s*(Downloading|Using cached|Processing) (\S+?)(?: \(([\d.]+) ?(kB|MB|GB|bytes)\))?$")
_UNIT = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_SMALL_MB = 5.0


class Story:
    """A translation of pip's lines for a waiting reader.

    Attributes:
        megabytes: how much arrived over the network.
        doing: what takes its time just now.
    """

    def __init__(self) -> None:
        self.megabytes = 0.0
        self.doing = "asking which packages there are"

    def hear(self, line: str) -> str | None:
        """A line of pip's; returns what to say about it, if anything."""
        if line.startswith("Installing collected packages: "):
            count = line.count(",") + 1
            self.doing = f"unpacking {count} package{'s' if count > 1 else ''}"
            return f"{self.doing}; {self.megabytes:.0f} MB fetched so far"
        found = _FETCHED.match(line)
        if found is None or found[2].endswith(".metadata"):
            return None
        how, place, number, unit = found.groups()
        megabytes = float(number) * _UNIT[unit] if number else 0.0
        if not place.endswith((".whl", ".tar.gz", ".zip")):
            return None  # a source tree
        name = "-".join(place.rpartition("/")[2].split("-")[:2])
        self.doing = f"fetching {name}"
        if how != "Downloading":
            where = "a file on this machine" if how == "Processing" else "pip's cache"
            return f"{name}, from {where}" if megabytes >= _SMALL_MB or how == "Processing" else None
        self.megabytes += megabytes
        return f"{name}, {megabytes:.0f} MB" if megabytes >= _SMALL_MB else None


def requirements(extra: str, metadata: Path = Path("setup.cfg")) -> list[str]:
    """List what hvdgloo and one of its extras need, without hvdgloo itself.

    Args:
        extra: the extra's name in the metadata.
        metadata: the project's setup.cfg.

    Raises:
        KeyError: there is no such extra.
    """
    parser = configparser.ConfigParser()
    parser.read(metadata, encoding="utf-8")
    extras = parser["options.extras_require"]
    needed, wanted = _lines(parser["options"]["install_requires"]), [extra]
    while wanted:
        for line in _lines(extras[wanted.pop()]):
            if own := re.fullmatch(r"hvdgloo\[(.*)\]", line):
                wanted += own[1].replace(" ", "").split(",")
            else:
                needed.append(line)
    return needed


def _lines(value: str) -> list[str]:
    return [line for line in value.splitlines() if line and not line.startswith("#")]


def size_mb(folder: Path) -> float:
    """Of all files in a folder, in 10^6 bytes; files that vanish meanwhile do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                pass
    return total / 1e6


def answers(index: str, timeout: float = PROBE_S) -> bool:
    """Tell whether there is a package index at an address; pip itself would try for minutes."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=timeout):
            return True
    except urllib.error.HTTPError as error:  # which is also the answer, and open
        error.close()
        return False
    except (OSError, ValueError, http.client.HTTPException):  # urllib's own errors are OSErrors
        return False


def install(python: Path, arguments: Sequence[str], out: TextIO, silence_s: float = SILENCE_S) -> int:
    """Run pip and tell its story; returns its exit status.

    Args:
        python: of the environment.
        arguments: of ``pip install``.
    """
    folder = python.parent.parent
    story, began = Story(), time.monotonic()
    # What is being fetched lies in the environment, too, so that its size says how far that is.
    with tempfile.TemporaryDirectory(prefix="fetched-", dir=folder) as temporary:
        before = size_mb(folder)
        process = subprocess.Popen(
            [python, "-m", "pip", "install", "--progress-bar", "off", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": temporary, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        heard: list[str] = []
        told = began
        while True:
            news: str | None
            try:
                line = lines.get(timeout=max(0.0, told + silence_s - time.monotonic()))
            except queue.Empty:
                grown = size_mb(folder) - before
                news = f"still {story.doing}: {grown:.0f} MB so far, {time.monotonic() - began:.0f} s"
            else:
                if line is None:
                    break
                heard.append(line)
                news = story.hear(line)
            if news:
                _say(out, news)
                told = time.monotonic()
        status = process.wait()
    if status:
        out.write("\n".join([*heard, ""]))
    took = f"{size_mb(folder) - before:.0f} MB on disk, {time.monotonic() - began:.0f} s"
    _say(out, f"failed with status {status}" if status else f"done: {story.megabytes:.0f} MB fetched, {took}")
    return status


def _read(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _say(out: TextIO, text: str) -> None:
    out.write(f"    {text}\n")
    out.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("python", type=Path, help="the environment's interpreter")
    parser.add_argument("what", help="what it is for")
    parser.add_argument("--index", help="take packages from here, if it answers; otherwise from where pip takes them")
    parser.add_argument("--extra", help="install what hvdgloo with this extra needs, without hvdgloo itself")
    known, arguments = parser.parse_known_args()
    if known.extra:
        arguments += requirements(known.extra)
    print(f"{known.python.parent.parent}: installing {known.what}", flush=True)
    if known.index and not answers(known.index):
        usual = "pip takes torch from its usual index, where it may be the large build with CUDA"
        _say(sys.stdout, f"{known.index} cannot be reached; {usual}")
    elif known.index:
        arguments += ["--index-url", known.index]
    return install(known.python, arguments, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
