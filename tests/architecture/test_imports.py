"""Imports point one way. The table below is the rule; the import statements are read, not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import pytest

from tests.architecture.source import Import, Module, everything, imports, library, parse

# Which part a module belongs to: the longest prefix counts.
PARTS = {
    "hvdgloo": "top",  # what a framework's folder is made of: context, frontend, reducer, ...
    "hvdgloo.common": "top",
    "hvdgloo.errors": "bottom",
    "hvdgloo.types": "bottom",
    "hvdgloo.config": "bottom",
    "hvdgloo.topology": "bottom",
    "hvdgloo.machine": "bottom",
    "hvdgloo.spelling": "bottom",
    "hvdgloo.version": "bottom",
    "hvdgloo.data": "bottom",
    "hvdgloo.as_horovod": "bottom",
    "hvdgloo.rendezvous": "rendezvous",
    "hvdgloo.engine": "engine",
    "hvdgloo.backends": "engine",
    "hvdgloo.runner": "runner",
    "hvdgloo.numpy": "numpy",
    "hvdgloo.torch": "torch",
    "hvdgloo.mxnet": "mxnet",
    "hvdgloo.tensorflow": "tensorflow",
    "hvdgloo.tensorflow.data": "tensorflow.data",
    "hvdgloo.tensorflow.keras": "tensorflow.keras",
    "hvdgloo.keras": "keras",
    "hvdgloo.run": "run",
}

MAY_IMPORT = {
    "bottom": {"bottom"},
    "rendezvous": {"bottom", "rendezvous"},
    "engine": {"bottom", "rendezvous", "engine"},
    "runner": {"bottom", "rendezvous", "runner"},
    "top": {"bottom", "rendezvous", "engine", "top"},
    "numpy": {"bottom", "engine", "top", "numpy"},
    "torch": {"bottom", "engine", "top", "torch"},
    "mxnet": {"bottom", "engine", "top", "mxnet"},
    "tensorflow": {"bottom", "engine", "top", "tensorflow", "tensorflow.keras"},
    "tensorflow.data": {"bottom", "rendezvous", "top", "tensorflow", "tensorflow.data"},
    "tensorflow.keras": {"bottom", "top", "keras", "tensorflow.keras"},
    "keras": {"bottom", "engine", "top", "numpy", "torch", "tensorflow", "keras"},
    "run": {"bottom", "rendezvous", "runner", "run"},
    "package": {"bottom", "run"},
}
"""Part to the parts that it may import. ``package`` is ``hvdgloo/__init__.py``, which anybody may import: it offers the
version, and ``hvdgloo.run`` on first use."""

LEAVES = {"run"}
"""Parts that no module of ours imports, save for the package's own attribute."""

FRAMEWORKS = frozenset({"torch", "tensorflow", "mxnet", "keras", "jax"})

FRAMEWORK_EXCEPTIONS = {
    ("hvdgloo.keras.on_jax", "jax"): "Keras on JAX",
    ("hvdgloo.keras.on_torch", "torch"): "Keras on torch",
    ("hvdgloo.runner.check_build", "torch"): "--check-build asks torch whether it was built with NCCL",
}


def part_of(name: str) -> str:
    if name == "hvdgloo":
        return "package"
    best = max((prefix for prefix in PARTS if f"{name}.".startswith(f"{prefix}.")), key=len)
    return PARTS[best]


def _ours(module: Module, known: frozenset[str]) -> Iterable[Import]:
    return (i for i in imports(module, known) if i.target == "hvdgloo" or i.target.startswith("hvdgloo."))


def wrong_directions(modules: Mapping[str, Module]) -> list[str]:
    known = frozenset(modules)
    found = []
    for module in modules.values():
        part = part_of(module.name)
        for entry in _ours(module, known):
            target = part_of(entry.target)
            if target != "package" and target not in MAY_IMPORT[part]:
                found.append(f"{module.place}:{entry.line}: {part} imports {entry.target}, which is {target}")
    return found


def stray_frameworks(modules: Mapping[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        home = module.name.split(".")[1] if "." in module.name else ""
        for entry in imports(module):
            framework = entry.target.partition(".")[0]
            allowed = home in ("backends", framework) or (module.name, framework) in FRAMEWORK_EXCEPTIONS
            if framework in FRAMEWORKS and not allowed:
                found.append(f"{module.place}:{entry.line}: imports {entry.target}")
    return found


def top_level_names(modules: Iterable[Module]) -> list[str]:
    return [
        f"{module.place}:{entry.line}: imports {entry.target}; its name is hvdgloo.{entry.target}"
        for module in modules
        for entry in imports(module)
        if entry.target.partition(".")[0] in ("rendezvous", "runner")
    ]


def test_the_source_is_found() -> None:
    names = set(library())
    assert {"hvdgloo", "hvdgloo.errors", "hvdgloo.engine.engine", "hvdgloo.rendezvous.app"} <= names
    assert {"hvdgloo.runner.agent", "hvdgloo.torch.adapter", "hvdgloo.backends.gloo"} <= names


def test_imports_point_one_way() -> None:
    assert wrong_directions(library()) == []


def test_leaves_are_leaves() -> None:
    known = frozenset(library())
    importers = {
        module.name
        for module in library().values()
        for entry in _ours(module, known)
        if part_of(entry.target) in LEAVES and part_of(module.name) not in LEAVES
    }
    assert importers <= {"hvdgloo"}


def test_frameworks_stay_in_their_folders() -> None:
    assert stray_frameworks(library()) == []


def test_framework_exceptions_are_still_needed() -> None:
    used = {(module.name, entry.target.partition(".")[0]) for module in library().values() for entry in imports(module)}
    assert set(FRAMEWORK_EXCEPTIONS) <= used


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    # A user's own runner.py would be imported in their place.
    assert top_level_names(everything()) == []


def test_a_new_folder_must_be_given_a_part() -> None:
    """A package directly under hvdgloo that the table does not name would count as "top" by its prefix."""
    packages = {
        module.name
        for module in library().values()
        if module.path.name == "__init__.py" and module.name.count(".") == 1
    }
    assert packages <= set(PARTS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hvdgloo.errors", "from hvdgloo.context import current"),
        ("hvdgloo.config", "def f():\n    import hvdgloo.rendezvous.client"),
        ("hvdgloo.rendezvous.app", "from hvdgloo.engine import engine"),
        ("hvdgloo.rendezvous.app", "from hvdgloo.runner.spec import Host"),
        ("hvdgloo.engine.fusion", "from hvdgloo.frontend import Frontend"),
        ("hvdgloo.engine.fusion", "from ..frontend import Frontend"),
        ("hvdgloo.backends.gloo", "import hvdgloo.runner.spec"),
        ("hvdgloo.runner.agent", "from hvdgloo import context"),
        ("hvdgloo.runner.agent", "import importlib\nimportlib.import_module('hvdgloo.engine.engine')"),
        ("hvdgloo.context", "if TYPE_CHECKING:\n    from hvdgloo.torch import adapter"),
        ("hvdgloo.torch.adapter", "from hvdgloo.numpy.adapter import NumpyAdapter"),
        ("hvdgloo.tensorflow.adapter", "from hvdgloo.keras import distributed"),
        ("hvdgloo.tensorflow.tape", "from hvdgloo.torch import adapter"),
        ("hvdgloo.mxnet.adapter", "from hvdgloo.numpy.adapter import NumpyAdapter"),
        ("hvdgloo.tensorflow.tape", "from hvdgloo.rendezvous.client import HttpStore"),
        ("hvdgloo.tensorflow.data.registry", "from hvdgloo.engine import engine"),
        ("hvdgloo.torch.adapter", "from hvdgloo.run import run"),
        ("hvdgloo.reducer", "import hvdgloo.run"),
    ],
)
def test_the_rule_can_be_broken(name: str, text: str) -> None:
    assert len(wrong_directions({**library(), name: parse(name, text)})) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hvdgloo.engine.executor", "import torch"),
        ("hvdgloo.context", "def f():\n    from torch import nn"),
        ("hvdgloo.numpy.adapter", "import torch.distributed"),
        ("hvdgloo.torch.adapter", "import tensorflow as tf"),
        ("hvdgloo.keras.callbacks", "import tensorflow as tf"),
        ("hvdgloo.runner.agent", "import jax"),
    ],
)
def test_the_rule_about_frameworks_can_be_broken(name: str, text: str) -> None:
    assert len(stray_frameworks(cast("dict[str, Module]", {name: parse(name, text)}))) == 1


@pytest.mark.parametrize("text", ["import runner", "from rendezvous.auth import seal", "import runner.cli as c"])
def test_the_rule_about_bare_names_can_be_broken(text: str) -> None:
    assert len(top_level_names([parse("tests.x", text)])) == 1
