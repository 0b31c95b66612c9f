"""The documentation as tests need it: pages that scripts write, and programs that pages show."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def generated(page: str) -> str:
    """Return the text that ``docs/generate_<page>.py`` would write now."""
    text: str = generator(page).text()
    return text


def outdated(front_end: str) -> list[str]:
    """Return the pages of the API that ``docs/generate_<front_end>.py`` would change."""
    texts: dict[str, str] = generator(front_end).texts()
    return [name for name, text in texts.items() if (ROOT / "docs" / name).read_text(encoding="utf-8") != text]


def generator(page: str) -> ModuleType:
    """``docs/generate_<page>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(f"generate_{page}", ROOT / f"docs/generate_{page}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "docs"))  # as if it were run as a program
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def program(page: str, containing: str) -> str:
    """The one program of a page that has a text in it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def run_program(page: str, containing: str) -> None:
    """Run it as a job of one process, in this one, which has the framework loaded."""
    module: dict[str, Any] = {"__name__": "page"}
    try:
        exec(compile(program(page, containing), page, "exec"), module)
    finally:
        module["hvd"].shutdown()
