"""``horovod`` in the place of Horovod: every module of it that hvdgloo has is hvdgloo's own, the same object.

``import horovod.torch as hvd`` gives ``hvdgloo.torch``; classes and exceptions are the same under both names, and so
``except`` clauses and pickles work whichever a program uses.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import hvdgloo

__all__ = ["__version__"]

__version__ = "0.28.1"
"""The last version of Horovod: programs look at it to see which functions exist. Ours is hvdgloo.__version__."""

stands_in_for = "Horovod"
"""The name that ``hvdgloo.errors`` uses where programs compare texts; Horovod's own package has no such attribute."""


_COMMANDS = {"hvdgloo.runner.launch": "hvdgloo.runner.__main__"}
"""Modules that are a command in Horovod (``python -m horovod.runner.launch``), and ours."""


class _Alias(importlib.abc.InspectLoader):
    """Gives a module of hvdgloo a second name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec, self._loader = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import machinery has just written the new name's into it.
        module.__spec__, module.__loader__ = self._spec, self._loader

    def get_source(self, fullname: str) -> str | None:
        return _loader(self._target).get_source(self._target)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for ``python -m horovod.x``, which runs a module instead of importing it."""
        name = _COMMANDS.get(self._target, self._target)
        return _loader(name).get_code(name)


def _loader(name: str) -> importlib.abc.InspectLoader:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert isinstance(spec.loader, importlib.abc.InspectLoader)
    return spec.loader


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``horovod.x.y`` wherever there is ``hvdgloo.x.y``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        name = "hvdgloo" + fullname[len("horovod") :]
        found = importlib.util.find_spec(name)
        if found is None:
            raise ModuleNotFoundError(f"hvdgloo, which replaces Horovod here, has no {name}", name=fullname)
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _Alias(name), is_package=is_package)


# First, or the ordinary finder would look for files beside this one.
sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(hvdgloo, name)
