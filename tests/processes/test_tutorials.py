"""The tutorials for torch and numpy do what they say, and so do other pages with programs for them."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launching import Launcher
from tests.support.pages import ROOT
from tests.support.tutorials import File, follow, steps

DISTRIBUTED = "docs/tutorial-torch-distributed.md"
SECTIONS = (ROOT / "docs/recipes.md").read_text(encoding="utf-8").split("\n## ")


def commanded(page: str) -> list[str]:
    """Return the titles of a page's sections that have commands."""
    parts = (ROOT / page).read_text(encoding="utf-8").split("\n## ")
    return [part.partition("\n")[0] for part in parts if "\n$ " in part]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about torch")
@pytest.mark.timeout(300)  # five commands, one after the other; mostly a tenth of it
def test_the_tutorial_of_torch(tmp_path: Path) -> None:
    follow("docs/tutorial-torch.md", tmp_path, warm.python())


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about torch")
@pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
@pytest.mark.extended
@pytest.mark.timeout(300)  # mostly a fiftieth of it
@pytest.mark.parametrize("section", commanded(DISTRIBUTED))
def test_the_tutorial_of_torch_distributed(section: str, tmp_path: Path) -> None:
    for step in steps((ROOT / DISTRIBUTED).read_text(encoding="utf-8")):
        if isinstance(step, File):  # sections run the programs of earlier ones, too
            (tmp_path / step.name).write_text(step.text)
    follow("docs/tutorial-torch-distributed.md", tmp_path, warm.python(), section=section)


@pytest.mark.timeout(300)
def test_the_tutorial_of_numpy(tmp_path: Path) -> None:
    follow("docs/tutorial-numpy.md", tmp_path, warm.python(*warm.NUMPY))


@pytest.mark.timeout(300)
def test_counters_of_the_page_about_observing(tmp_path: Path) -> None:
    """tests/page/test_screenshots.py runs the first program; the second one needs the report of a job."""
    follow("docs/observing.md", tmp_path, warm.python(*warm.NUMPY), elsewhere=frozenset({"slow.py", "read_report.py"}))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="they are for torch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", commanded("docs/recipes.md"))
def test_recipes_do_what_they_say(recipe: str, tmp_path: Path) -> None:
    follow("docs/recipes.md", tmp_path, warm.python(), section=recipe)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is for torch")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_stopped_saves_a_checkpoint(number: signal.Signals, launcher: Launcher, tmp_path: Path) -> None:
    (text,) = [section for section in SECTIONS if section.startswith("A checkpoint before the job is stopped\n")]
    (program,) = [step for step in steps(text) if isinstance(step, File)]
    launcher.script(program.text, name=program.name)
    job = launcher.start("-np", "2", warm.python(), program.name)
    assert job.stdout is not None
    assert b"trains until it is stopped" in job.stdout.readline()
    job.send_signal(number)
    out, err = job.communicate(timeout=40)
    assert b"saved" in out, err
    assert job.returncode == 128 + number, err
    assert (tmp_path / "checkpoint.pt").exists()
