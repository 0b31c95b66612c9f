"""The pictures of docs/observing.md can be made, and show what they shall: each waits until the page says so."""

from __future__ import annotations

import importlib.util
import re
import struct
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import warm
from tests.support.pages import ROOT


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_screenshots", ROOT / "docs/make_screenshots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def size(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the job trains with torch")
@pytest.mark.timeout(240)  # mostly a tenth of it
def test_pictures_are_made_from_a_real_job(script: ModuleType, tmp_path: Path) -> None:
    shown = script.make(tmp_path, 0.0, warm.python())
    made = list(tmp_path.iterdir())
    page = (ROOT / "docs/observing.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in made) == sorted(set(re.findall(r"images/(\w+\.png)", page)) - {"grafana.png"})
    for path in made:
        width, height = size(path)
        assert width == script.WIDTH
        assert height > 100
    assert "Rank 3 (" in shown
