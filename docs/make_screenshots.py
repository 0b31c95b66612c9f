"""Make the pictures of docs/observing.md, from a real job of four ranks, one of which is slow.

    python docs/make_screenshots.py

It runs the page's program ``slow.py`` under ``hvdgloo-run --page --report``, looks at the job with Chromium (Debian's
packages chromium and chromium-driver, and selenium), and kills a worker at the end. What ``hvdgloo-run top`` shows is
printed, to be put into the page.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.page.support import PATIENCE_S, Chromium, until  # noqa: E402 (it has just become reachable)
from tests.support.pages import program  # noqa: E402

WIDTH, MARGIN = 1240, 6
"""Width of the pictures, and margin above and below, in CSS pixels."""

_LAUNCHER = [sys.executable, "-m", "hvdgloo.runner"]
_LINK = re.compile(r"https?://\S+\?token=\S+")


class Job:
    """``hvdgloo-run`` with a page and a report.

    Args:
        folder: its working directory, for ``slow.py``.
        python: the interpreter of its workers; None for the launcher's.
    """

    def __init__(self, folder: Path, python: str | None) -> None:
        (folder / "slow.py").write_text(program("docs/observing.md", "time.sleep(0.03)"), encoding="utf-8")
        self.report = folder / "job.html"
        self._environ = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)}
        self._said: list[str] = []
        self._launcher = subprocess.Popen(
            [*_LAUNCHER, "-np", "4", "--page", "--report", "job.html", *([python] if python else []), "slow.py"],
            cwd=folder,
            env={**os.environ, **self._environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._launcher.stderr is not None
        for line in self._launcher.stderr:
            self._said.append(line)

    def link(self) -> str:
        """Return the address of the page, once it is printed."""
        found = until(lambda: _LINK.search("".join(self._said)) or self._failed(), "the address of the page")
        assert isinstance(found, re.Match)
        return found[0]

    def _failed(self) -> None:
        if self._launcher.poll() is not None:
            raise SystemExit(f"hvdgloo-run has ended:\n{''.join(self._said)}")

    def top(self, *flags: str) -> str:
        """Return the output of ``hvdgloo-run top --once``."""
        command = [*_LAUNCHER, "top", "--once", *flags]
        environ = {**os.environ, **self._environ, "COLUMNS": "110"}
        return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout

    def kill(self, rank: int) -> None:
        """Kill a worker, and wait for the end of the job and its report."""
        ranks = json.loads(self.top("--json"))["ranks"]
        os.kill(ranks["pid"][ranks["rank"].index(rank)], signal.SIGKILL)
        self._launcher.wait(PATIENCE_S)

    def close(self) -> None:
        """End the job, if it has not ended yet."""
        if self._launcher.poll() is None:
            self._launcher.terminate()
        self._launcher.wait(PATIENCE_S)
        self._reader.join()
        assert self._launcher.stderr is not None
        self._launcher.stderr.close()


def shot(browser: Chromium, path: Path, first: str, last: str) -> None:
    """Save a picture of a page from the top of element ``first`` to the bottom of element ``last``."""
    top, bottom = browser.run(
        "return [document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY,"
        "        document.querySelector(arguments[1]).getBoundingClientRect().bottom + scrollY]",
        first,
        last,
    )
    clip = {"x": 0, "y": max(0, top - MARGIN), "width": WIDTH, "height": bottom - top + 2 * MARGIN, "scale": 1}
    taken = browser.command("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    path.write_bytes(base64.b64decode(taken["data"]))


def make(folder: Path, seconds: float, python: str | None = None) -> str:
    """Make all pictures in a directory, and return the output of ``top``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="job-") as place, Chromium() as browser:
        with closing(Job(Path(place), python)) as job:
            browser.resize(WIDTH)
            browser.theme("light")
            browser.driver.get(job.link())
            until(lambda: browser.text("#steps") not in ("", "0"), "the first steps")
            until(lambda: "Rank 3 on " in browser.text("#straggler-list"), "that rank 3 is called a straggler")
            time.sleep(seconds)  # of curves to be seen
            shot(browser, folder / "page.png", "header", "#charts")
            browser.theme("dark")
            shot(browser, folder / "stragglers.png", "#stragglers", "#stragglers")
            shown = job.top()
            job.kill(1)
        browser.theme("light")
        browser.driver.get(job.report.as_uri())
        until(lambda: browser.text("#straggler-list"), "the report")
        shot(browser, folder / "report.png", "header", "#ranks")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="where pictures go")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the job are shown (default: 60)")
    given = parser.parse_args()
    sys.stdout.write(make(given.folder, given.seconds))


if __name__ == "__main__":
    main()
