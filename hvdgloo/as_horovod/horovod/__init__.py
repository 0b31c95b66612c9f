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
from types import ModuleType
from typing import Any

import hvdgloo

__all__ = ["__version__"]

__version__ = "0.28.1"
"""The last version of Horovod: programs look at it to see which functions exist. Ours is hvdgloo.__version__."""

stands_in_for = "Horovod"
"""The name that ``hvdgloo.errors`` uses where programs compare texts; Horovod's own package has no such attribute."""


class _Alias(importlib.abc.Loader):
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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``horovod.x.y`` wherever there is ``hvdgloo.x.y``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        name = "hvdgloo" + fullname[len("horovod") :]
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"hvdgloo, which stands in for Horovod here (--as-horovod), has no {name}", name=fullname
            )
        return importlib.machinery.ModuleSpec(fullname, _Alias(name), is_package=True)


# First, or the ordinary finder would look for files beside this one.
sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(hvdgloo, name)
