"""A real job and its page in Chromium: while a rank is slow, when another one is killed, and in the report."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

from tests.page.support import PATIENCE_S, Chromium, until, words
from tests.support.launching import Launcher

SLOW = 3
WORKER = f"""
    import time

    import numpy as np

    import hvdgloo.numpy as hvd

    hvd.init()
    gradient = np.ones(256, dtype=np.float32)
    for step in range(100_000):
        time.sleep(0.1 if hvd.rank() == {SLOW} else 0.01)
        hvd.allreduce(gradient, name="gradient")
        if step % 100 == 0:
            print(f"step {{step}} of rank {{hvd.rank()}}", flush=True)
"""


class Job:
    """A job of four ranks, of which one is slow. Its output is read all the time."""

    def __init__(self, launcher: Launcher, *flags: str) -> None:
        self.process = launcher.start(*flags, "-np", "4", "python", launcher.script(WORKER))
        self._said = b""
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def said(self, pattern: str) -> str:
        """Return the first group of the pattern, once it has been printed."""
        found = until(lambda: re.search(pattern, self._said.decode(errors="replace")), f"{pattern}: {self._said!r}")
        return str(found.group(1))

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    def _read(self, stream: object) -> None:
        while data := os.read(stream.fileno(), 65536):  # type: ignore[attr-defined]
            self._said += data


def test_a_real_job_shows_its_slow_rank_and_then_the_killed_one(
    launcher: Launcher, browser: Chromium, tmp_path: Path
) -> None:
    job = Job(launcher, "--page", "--report", "report.html")
    link = job.said(r"page is at (http://\S+)")
    browser.driver.get(link)
    sentence = rf"Rank {SLOW} \(.*\) was last in \d+ % of the last [\d,]+ operations"
    until(lambda: re.search(sentence, words([browser.text("#verdict")])), sentence)
    assert browser.texts(".cell .number") == ["0", "1", "2", "3"]
    until(lambda: browser.attribute(f'[data-rank="{SLOW}"]', "class") == "cell computing", "the slow one computes")
    until(lambda: "waiting" in str(browser.attribute('[data-rank="0"]', "class")), "another one waits for it")
    browser.wait_for("#plane-list tbody", "shared memory")
    browser.wait_for("#lines", "step 0 of rank 2")
    assert browser.text("#command").endswith("worker.py")

    browser.click('[data-rank="1"]')
    browser.wait_for("#rank h3", "Rank 1 on ")
    browser.expect("ERR_", "Failed to load resource")  # the launcher ends, and its server with it
    pid = int(browser.run("return /process(\\d+)/.exec(document.querySelector('#rank dl').textContent)[1]"))
    os.kill(pid, signal.SIGKILL)
    browser.wait_for("#state", "Failed")
    browser.wait_for("#verdict", "SIGKILL")
    assert "failed" in str(browser.attribute('[data-rank="1"]', "class"))
    assert job.end() != 0
    browser.wait_for("#connection", "the job is over")

    report = Path(job.said(r"report is in (\S+)"))
    browser.driver.get((tmp_path / report).as_uri())
    browser.wait_for("#state", "Failed")
    browser.wait_for("#verdict", "SIGKILL")
    recorded = json.loads((tmp_path / report).with_suffix(".json").read_text())
    assert SLOW in [straggler["rank"] for straggler in recorded["snapshot"]["stragglers"]]
