"""Write the stubs of modules that bind names (see ``hvdgloo._collectives.names``), for type checkers and editors.

python docs/generate_stubs.py

Stubs for frameworks that are not installed are left unchanged: run it in each environment. It also writes the stubs
that give modules a second name, ``horovod.torch`` and so on, in the distribution for that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import hvdgloo
from hvdgloo._collectives.frontend import Frontend
from hvdgloo.types import ReduceOp

MODULES = {
    "hvdgloo.numpy": "numpy",
    "hvdgloo.torch": "torch",
    "hvdgloo.torch.mpi_ops": "torch",
    "hvdgloo.tensorflow": "tensorflow",
    "hvdgloo.tensorflow.mpi_ops": "tensorflow",
    "hvdgloo.tensorflow.keras": "tensorflow",
    "hvdgloo.keras": "keras",
    "hvdgloo.jax": "jax",
    "hvdgloo.mxnet": "mxnet",
    "hvdgloo.mxnet.mpi_ops": "mxnet",
}
"""Modules that have a stub, and the package that each needs."""

SUBMODULES = {
    "hvdgloo.numpy": ("elastic",),
    "hvdgloo.torch": ("compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"),
    "hvdgloo.tensorflow": ("compression", "elastic", "functions", "mpi_ops", "sync_batch_norm"),
    "hvdgloo.tensorflow.keras": ("elastic",),
    "hvdgloo.jax": ("elastic",),
    "hvdgloo.keras": ("elastic",),
    "hvdgloo.mxnet": ("compression", "elastic", "functions", "mpi_ops"),
}
"""Modules that a package imports, so that programs do not have to; not in its ``__all__``."""

_NOT_HOROVOD_S = ("torch.distributed", "torch.ignite", "torch.lightning")
"""Public modules that Horovod has nothing like."""

_HAVE_RUN = ("", "runner")
"""Packages from which programs import ``run``, although it is not listed in ours."""

STAND_IN = Path(__file__).resolve().parents[1] / "packaging/horovod/horovod-stubs"
"""Directory of the stubs for ``horovod``, since type checkers do not see what ``hvdgloo.as_horovod`` does, either."""

HEAD = "# Written by docs/generate_stubs.py; do not edit."


def path(name: str) -> Path:
    """Return the path of a module's stub."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_suffix(".pyi")


def text(name: str) -> str:
    """Return a module's stub, which imports each name from its source, and so has its type and docstring.

    Args:
        name: the name of a module that can be imported here.
    """
    module = importlib.import_module(name)
    imported: dict[str, set[str]] = {}
    bound: list[str] = []
    for each in module.__all__:
        value = getattr(module, each)
        if isinstance(value, ReduceOp):
            imported.setdefault("hvdgloo.types", set()).add("ReduceOp")
            bound.append(f"{each} = ReduceOp.{value.name}")
        elif inspect.ismethod(value) and isinstance(value.__self__, Frontend):
            _, (home,) = value.__self__.__reduce__()  # methods travel by reference to where their Frontend is
            imported.setdefault(home, set()).add("FRONTEND")
            bound.append(f"{each} = FRONTEND.{value.__name__}")
        else:
            imported.setdefault(_home(value, each, name), set()).add(each)
    # What is not in ``__all__`` is only exported under a name that it is given.
    lines = [f"from {name} import {each} as {each}" for each in SUBMODULES.get(name, ())]
    lines += [f"from {home} import {_names(imported[home])}" for home in imported]
    lines.sort(key=lambda line: (line.split()[1], line))
    listed = "".join(f'    "{each}",\n' for each in module.__all__)
    return "\n".join([HEAD, "", *lines, "", f"__all__ = [\n{listed}]", "", *bound, ""])


def _names(names: set[str]) -> str:
    whole = ", ".join(sorted(names))
    return whole if len(whole) < 60 else "(\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"


def _home(value: Any, name: str, beside: str) -> str:
    """Return the module in which a value is defined under a name."""
    if inspect.ismodule(value):
        return value.__name__.rpartition(".")[0]
    # A closure's module is the one where it was written, not the one where it has this name.
    package = beside if hasattr(sys.modules[beside], "__path__") else beside.rpartition(".")[0]
    for home in (value.__module__, *(other for other in sorted(sys.modules) if other.startswith(f"{package}._"))):
        if vars(sys.modules[home]).get(name) is value:
            return home
    raise LookupError(f"{name} of {beside} is in no module that defines it")


def stand_in() -> dict[Path, str]:
    """Return the stubs of ``horovod`` and of the modules that Horovod has, by file."""
    root = Path(hvdgloo.__file__).parent
    modules: dict[str, bool] = {"": True}  # its name below the library's, and whether it is a package
    for folder in ("common", "data", "keras", "mxnet", "tensorflow", "torch"):
        for file in (root / folder).rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            if not any(part.startswith("_") and part != "__init__" for part in parts):
                is_package = parts[-1] == "__init__"
                modules[".".join(parts[:-1] if is_package else parts)] = is_package
    modules = {name: is_package for name, is_package in modules.items() if name not in _NOT_HOROVOD_S}
    modules |= {"run": False, "runner": True}
    found: dict[Path, str] = {}
    for name, is_package in modules.items():
        target = f"hvdgloo.{name}".rstrip(".")
        below = name.replace(".", "/")
        file = STAND_IN / below / "__init__.pyi" if is_package else STAND_IN / f"{below}.pyi"
        lines = [f"from {target} import *", *(f"from {target} import {e} as {e}" for e in SUBMODULES.get(target, ()))]
        if name in _HAVE_RUN:
            lines = sorted([*lines, "from hvdgloo import run as run"], key=lambda line: line.split()[1])
        version = ["", "__version__: str"] if not name else []
        found[file] = "\n".join([HEAD, "", *lines, *version, ""])
    return found


def main() -> None:
    """Write all stubs that can be written in this environment."""
    for file, content in stand_in().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    for name, needs in MODULES.items():
        if importlib.util.find_spec(needs) is not None:
            path(name).write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
