"""The environment of ``make test-gpu``, made where there is neither a GPU nor a network."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.architecture.source import ROOT
from tests.packaging.building import run


def test_it_sees_what_a_virtual_environment_has_and_the_checkout_and_fetches_nothing(tmp_path: Path) -> None:
    """This test runs in a virtual environment itself, with torch in it."""
    assert sys.prefix != sys.base_prefix
    (tmp_path / "wheels").mkdir()
    venv = tmp_path / "venv"
    variables = [f"PYTHON={sys.executable}", f"VENV_GPU={venv}", f"WHEELS={tmp_path / 'wheels'}"]
    run(["make", "-C", ROOT, *variables, f"{venv}/.ready"], tmp_path)
    found = "import torch, hvdgloo, pytest_timeout, flask; print(torch.__file__, hvdgloo.__path__[0])"
    torch, hvdgloo = run([venv / "bin/python", "-c", found], tmp_path).split()
    assert not torch.startswith(str(venv))
    assert Path(hvdgloo) == ROOT / "hvdgloo"
