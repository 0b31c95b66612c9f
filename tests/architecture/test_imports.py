"""Imports point one way. The table below is the rule; the import statements are read, not run."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import pytest

from tests.architecture.source import Import, Module, everything, imports, library, parse

VALUES = ("hvdgloo.errors", "hvdgloo.types", "hvdgloo.topology", "hvdgloo.version")
"""Modules that import nothing of ours; every module may import them."""

GRAPH: dict[str, set[str]] = {
    # What all the others stand on.
    "hvdgloo._platform": set(),
    "hvdgloo.config": {"_platform"},
    "hvdgloo._net": {"_platform"},
    "hvdgloo._observe": {"_net", "_platform", "config"},
    # The server, and how it is reached.
    "hvdgloo.rendezvous": {"_net", "_platform", "rendezvous._client", "rendezvous._server"},
    "hvdgloo.rendezvous._membership": {"rendezvous"},
    "hvdgloo.rendezvous._elastic": {"_net", "rendezvous._membership"},
    "hvdgloo.rendezvous._page_server": {"_net", "config", "rendezvous", "rendezvous._server"},
    "hvdgloo.rendezvous._server": {
        "_net",
        "_observe",
        "config",
        "rendezvous",
        "rendezvous._elastic",
        "rendezvous._membership",
    },
    "hvdgloo.rendezvous._client": {"_net", "config", "rendezvous", "rendezvous._elastic"},
    # What is seen of a job: the page, and top.
    "hvdgloo._observe.page": {"_net", "_observe", "_platform", "rendezvous._page_server", "rendezvous._server"},
    "hvdgloo._observe.top": {"_observe", "_platform"},
    "hvdgloo.rendezvous._job_observer": {
        "_net",
        "_observe",
        "_observe.page",
        "rendezvous._elastic",
        "rendezvous._page_server",
    },
    "hvdgloo.rendezvous._console": {"rendezvous._elastic", "rendezvous._server", "rendezvous._job_observer"},
    "hvdgloo.rendezvous._cli": {
        "_net",
        "_platform",
        "config",
        "rendezvous",
        "rendezvous._elastic",
        "rendezvous._server",
        "rendezvous._job_observer",
        "rendezvous._console",
    },
    "hvdgloo.rendezvous.__main__": {"_commands"},
    # A worker.
    "hvdgloo._backends": {"_net", "_platform", "config"},
    "hvdgloo._engine": {"_backends", "_net", "_observe", "_platform"},
    "hvdgloo._job": {"_backends", "_engine", "_net", "_observe", "_platform", "config", "rendezvous"},
    "hvdgloo._collectives": {"_backends", "_engine", "_job", "_observe", "_platform", "rendezvous"},
    "hvdgloo.elastic": {"_collectives", "_job", "_platform", "rendezvous"},
    "hvdgloo.common": {"_collectives", "_job", "_platform", "elastic"},
    "hvdgloo._training": {"_collectives", "_platform", "common"},
    "hvdgloo.data": set(),
    "hvdgloo.numpy": {"_collectives", "_job", "_training", "elastic"},
    "hvdgloo.jax": {"_collectives", "_job", "_platform", "_training", "elastic", "numpy"},
    "hvdgloo.torch": {"_backends", "_collectives", "_job", "_platform", "_training", "common", "config", "elastic"},
    "hvdgloo.torch.distributed": {
        "_backends",
        "_collectives",
        "_job",
        "_net",
        "_observe",
        "_platform",
        "_torch_backend",
        "config",
        "rendezvous",
        "torch",
    },
    "hvdgloo._torch_backend": set(),
    "hvdgloo.mxnet": {"_collectives", "_job", "_platform", "_training", "common", "elastic"},
    "hvdgloo.tensorflow": {"_collectives", "_job", "_platform", "_training", "common", "elastic"},
    "hvdgloo.tensorflow.data": {"_job", "_net", "_platform", "config", "rendezvous", "tensorflow"},
    "hvdgloo.tensorflow.keras": {"_collectives", "_training", "keras", "tensorflow"},
    "hvdgloo.keras": {
        "_collectives",
        "_job",
        "_platform",
        "_training",
        "elastic",
        "jax",
        "numpy",
        "tensorflow",
        "torch",
    },
    "hvdgloo.as_horovod": set(),
    # On Spark.
    "hvdgloo.spark.data": {"_platform"},
    "hvdgloo.spark": {"_job", "config", "runner", "runner.elastic", "runner.inbound", "runner.job"},
    "hvdgloo.spark.torch": {"_backends", "spark", "spark.common", "torch"},
    "hvdgloo.spark.common": {"_job", "_platform", "rendezvous", "run", "runner.job", "spark", "spark.data"},
    "hvdgloo.spark.keras": {"_platform", "keras", "numpy", "spark", "spark.common"},
    "hvdgloo.spark.tensorflow": {"rendezvous", "runner.network", "spark", "spark.common", "tensorflow.data"},
    # The launcher, and its agents on the hosts.
    "hvdgloo.runner.protocol": {"_net"},
    "hvdgloo.runner.network": {"_net"},
    "hvdgloo.runner.job": {"_platform", "config", "rendezvous._elastic", "runner.network", "runner.protocol"},
    "hvdgloo.runner.elastic": {"_platform", "config", "rendezvous._elastic", "runner.job"},
    "hvdgloo.runner.processes": {"_net", "as_horovod", "runner.protocol"},
    "hvdgloo.runner.transport": {"_platform", "runner.agent", "runner.job", "runner.processes", "runner.protocol"},
    "hvdgloo.runner.agent": {
        "_net",
        "_observe",
        "_platform",
        "rendezvous",
        "runner.network",
        "runner.processes",
        "runner.protocol",
    },
    "hvdgloo.runner.console": {"_platform", "runner.job", "runner.protocol"},
    "hvdgloo.runner.supervise": {
        "_net",
        "_platform",
        "rendezvous._elastic",
        "rendezvous._membership",
        "runner.console",
        "runner.job",
        "runner.processes",
        "runner.protocol",
        "runner.transport",
    },
    "hvdgloo.runner.observing": {
        "_net",
        "_observe",
        "_observe.page",
        "_platform",
        "rendezvous",
        "rendezvous._page_server",
        "runner.console",
        "runner.job",
        "runner.protocol",
        "runner.supervise",
    },
    "hvdgloo.runner.worker": {"_job", "_platform", "config", "rendezvous"},
    "hvdgloo.runner": {
        "_platform",
        "_net",
        "_observe",
        "config",
        "rendezvous",
        "rendezvous._elastic",
        "rendezvous._membership",
        "rendezvous._server",
        "runner.console",
        "runner.elastic",
        "runner.job",
        "runner.network",
        "runner.protocol",
        "runner.observing",
        "runner.supervise",
        "runner.transport",
        "runner.worker",
    },
    "hvdgloo.runner.inbound": {
        "_job",
        "_net",
        "config",
        "rendezvous",
        "runner",
        "runner.agent",
        "runner.elastic",
        "runner.job",
        "runner.network",
        "runner.processes",
        "runner.protocol",
        "runner.transport",
        "runner.worker",
    },
    "hvdgloo.runner.doctor": {
        "_platform",
        "config",
        "rendezvous",
        "runner",
        "runner.agent",
        "runner.console",
        "runner.job",
        "runner.network",
        "runner.protocol",
        "runner.supervise",
        "runner.transport",
    },
    "hvdgloo.runner.tuning": {
        "_platform",
        "_collectives",
        "_engine",
        "_job",
        "config",
        "numpy",
        "runner",
        "runner.job",
        "runner.worker",
    },
    "hvdgloo.runner.cli": {
        "_observe",
        "_observe.top",
        "_platform",
        "config",
        "rendezvous",
        "runner",
        "runner.console",
        "runner.doctor",
        "runner.elastic",
        "runner.job",
        "runner.transport",
        "runner.tuning",
    },
    "hvdgloo._commands": {"_platform", "rendezvous._cli", "runner.cli"},
    "hvdgloo.runner.__main__": {"_commands"},
    "hvdgloo.run": {
        "_job",
        "config",
        "rendezvous",
        "runner",
        "runner.elastic",
        "runner.job",
        "runner.transport",
        "runner.worker",
    },
    # Leaves: other systems that start workers.
    "hvdgloo.ray": {
        "_job",
        "_net",
        "_platform",
        "config",
        "runner",
        "runner.elastic",
        "runner.inbound",
        "runner.job",
        "runner.worker",
    },
}
"""The graph between sub-packages, from the ground up: each part, and the parts that it imports (without "hvdgloo.").

A part is a package, or a module that stands alone; a module belongs to the longest name that fits. An arrow that the
code does not have any more is an error, too, so this is what the structure *is*. Some files only hand on names and
belong to no part's story: ``_FACES``, and ``hvdgloo/rendezvous/__init__.py``, whose arrows to server and client are
followed on the first use of a name.
"""

_FACES = frozenset({"hvdgloo", "hvdgloo.runner"})
"""Packages from which programs take ``run``, as from Horovod's; it is imported on the first use of the name."""

_HANDED_OVER = {
    ("hvdgloo._torch_backend", "hvdgloo.torch.distributed._group"): "makes groups for torch.distributed",
    ("hvdgloo.tensorflow._optimizer", "hvdgloo.tensorflow.keras"): "wraps a Keras optimizer that TensorFlow's is given",
    ("hvdgloo.spark.common.store", "hvdgloo.spark.keras._models"): "puts weights into a Keras model that it is given",
}
"""Imports in a function, the other way: what a call is handed belongs to a front-end above, which is looked up then."""

_INNER = {
    "hvdgloo._backends.shm",
    "hvdgloo.as_horovod.horovod",
    "hvdgloo.torch.elastic",
}
"""Packages that are parts of another one's story."""

LEAVES = {"ray", "run"}
"""Parts that no module of ours imports, save for the package's own attribute, and ``_ON_TOP``."""

_ON_TOP = {"hvdgloo.spark.common.backend"}  # LocalBackend is hvdgloo.run.run

FRAMEWORKS = frozenset({"torch", "tensorflow", "mxnet", "keras", "jax", "ray"})

FRAMEWORK_EXCEPTIONS = {
    ("hvdgloo._torch_backend", "torch"): "torch's entry point, which must not import the front-end",
    ("hvdgloo.keras._on_jax", "jax"): "Keras on JAX",
    ("hvdgloo.keras._on_torch", "torch"): "Keras on torch",
    ("hvdgloo.spark.keras._callbacks", "keras"): "ranks import it once it is known which Keras is meant",
    ("hvdgloo.spark.keras._library", "keras"): "which Keras is meant, and on which backend",
    ("hvdgloo.spark.keras._feeding", "keras"): "ranks import it once it is known which Keras is meant",
    **{
        (f"hvdgloo.spark.torch.{name}", "torch"): "torch's estimator"
        for name in ("_codecs", "_losses", "_predictor", "_remote", "estimator")
    },
    ("hvdgloo.runner.cli.build_report", "torch"): "--check-build asks torch whether it was built with NCCL",
}


def part_of(name: str) -> str:
    if name == "hvdgloo":
        return "package"
    if name in VALUES:
        return "values"
    return max((part for part in GRAPH if f"{name}.".startswith(f"{part}.")), key=len).removeprefix("hvdgloo.")


def _allowed(part: str) -> set[str]:
    return {part, "package", "values"} | GRAPH.get(f"hvdgloo.{part}", set())


def _ours(module: Module, known: frozenset[str]) -> Iterable[Import]:
    return (i for i in imports(module, known) if i.target == "hvdgloo" or i.target.startswith("hvdgloo."))


def arrows(modules: Mapping[str, Module]) -> Iterator[tuple[Module, Import, str, str]]:
    """Every import between two parts: who, what, from which part to which."""
    known = frozenset(modules)
    for module in modules.values():
        if module.name in _FACES:
            continue
        for entry in _ours(module, known):
            source, target = part_of(module.name), part_of(entry.target)
            if (module.name, entry.target) not in _HANDED_OVER and target not in (source, "package", "values"):
                yield module, entry, source, target


def wrong_directions(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.place}:{entry.line}: {source} imports {entry.target}, which is {target}"
        for module, entry, source, target in arrows(modules)
        if target not in _allowed(source)
    ]


def stray_frameworks(modules: Mapping[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        home = module.name.split(".")[1] if "." in module.name else ""
        for entry in imports(module):
            framework = entry.target.partition(".")[0]
            allowed = home in ("_backends", framework) or (module.name, framework) in FRAMEWORK_EXCEPTIONS
            if framework in FRAMEWORKS and not allowed:
                found.append(f"{module.place}:{entry.line}: imports {entry.target}")
    return found


_BARE = re.compile(r"""(\bimport\b|\bfrom\b|["']).*(?<![\w.])(rendezvous|runner)\b""")
"""Pattern of a line in every module that imports one of them; parsing all tests would take four seconds."""


def top_level_names(modules: Iterable[Module]) -> list[str]:
    return [
        f"{module.place}:{entry.line}: imports {entry.target}; its name is hvdgloo.{entry.target}"
        for module in modules
        if _BARE.search(module.text)
        for entry in imports(module)
        if entry.target.partition(".")[0] in ("rendezvous", "runner")
    ]


def test_the_source_is_found() -> None:
    names = set(library())
    assert {"hvdgloo", "hvdgloo.errors", "hvdgloo._engine.engine", "hvdgloo.rendezvous._server.service"} <= names
    assert {"hvdgloo.runner.agent.agent", "hvdgloo.torch._adapter", "hvdgloo._backends.gloo"} <= names


def test_imports_point_one_way() -> None:
    assert wrong_directions(library()) == []


def test_every_arrow_of_the_graph_is_there() -> None:
    found = {(source, target) for _, _, source, target in arrows(library())}
    drawn = {(part.removeprefix("hvdgloo."), target) for part, targets in GRAPH.items() for target in targets}
    assert drawn - found == set()


def test_the_graph_has_no_circle() -> None:
    parts = {part.removeprefix("hvdgloo."): targets for part, targets in GRAPH.items()}
    parts["rendezvous"] = set()  # whose __init__ only hands on what server and client define
    graphlib.TopologicalSorter(parts).prepare()


def test_values_import_nothing_of_ours() -> None:
    known = frozenset(library())
    assert [
        f"{name} imports {entry.target}"
        for name in VALUES
        for entry in _ours(library()[name], known)
        if entry.target not in VALUES
    ] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Between modules there is no circle either, not even one for annotations only."""
    known = frozenset(library())
    faces = _FACES | {"hvdgloo.rendezvous"}
    graph = {
        module.name: {entry.target for entry in _ours(module, known) if (module.name, entry.target) not in _HANDED_OVER}
        & known - {module.name} - faces
        for module in library().values()
        if module.name not in faces
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_every_package_says_what_it_is_for_in_one_sentence() -> None:
    """The first line of ``__init__.py``: what runs where is to be seen from the folders alone."""
    lines = {
        module.name: (ast.get_docstring(module.tree) or "").partition("\n")[0]
        for module in library().values()
        if module.path.name == "__init__.py"
    }
    assert [name for name, line in lines.items() if not line.endswith(".") or len(line) < 20] == []


def test_leaves_are_leaves() -> None:
    assert {module.name for module, _, _, target in arrows(library()) if target in LEAVES} == _ON_TOP


def test_frameworks_stay_in_their_folders() -> None:
    assert stray_frameworks(library()) == []


def test_framework_exceptions_are_still_needed() -> None:
    used = {(module.name, entry.target.partition(".")[0]) for module in library().values() for entry in imports(module)}
    assert set(FRAMEWORK_EXCEPTIONS) <= used


def test_no_module_imports_the_folders_by_their_bare_names() -> None:
    # A user's own runner.py would be imported in their place.
    assert top_level_names(everything()) == []


def test_a_new_folder_must_be_given_a_part() -> None:
    """A package that the table does not name would count as a part of the one around it."""
    packages = {module.name for module in library().values() if module.path.name == "__init__.py"}
    assert packages - set(GRAPH) - {"hvdgloo"} <= _INNER


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hvdgloo.errors", "from hvdgloo._job.context import current"),
        ("hvdgloo.config", "def f():\n    import hvdgloo.rendezvous._client.client"),
        ("hvdgloo.rendezvous._server.service", "from hvdgloo._engine import engine"),
        ("hvdgloo.rendezvous._server.service", "from hvdgloo.runner.job.spec import Host"),
        ("hvdgloo._engine.fusion", "from hvdgloo._collectives.frontend import Frontend"),
        ("hvdgloo._engine.fusion", "from .._collectives.frontend import Frontend"),
        ("hvdgloo._backends.gloo", "import hvdgloo.runner.job.spec"),
        ("hvdgloo.runner.agent.agent", "from hvdgloo._job import process"),
        ("hvdgloo.runner.agent.agent", "import importlib\nimportlib.import_module('hvdgloo._engine.engine')"),
        ("hvdgloo._job.context", "if TYPE_CHECKING:\n    from hvdgloo.torch import adapter"),
        ("hvdgloo.torch._adapter", "from hvdgloo.numpy._adapter import NumpyAdapter"),
        ("hvdgloo.tensorflow._adapter", "from hvdgloo.keras import distributed"),
        ("hvdgloo.tensorflow._tape", "from hvdgloo.torch import adapter"),
        ("hvdgloo.mxnet._adapter", "from hvdgloo.numpy._adapter import NumpyAdapter"),
        ("hvdgloo.tensorflow._tape", "from hvdgloo.rendezvous._client.client import HttpStore"),
        ("hvdgloo.tensorflow.data._registry", "from hvdgloo._engine import engine"),
        ("hvdgloo.torch._adapter", "from hvdgloo.run import run"),
        ("hvdgloo._training.reducer", "import hvdgloo.run"),
    ],
)
def test_the_rule_can_be_broken(name: str, text: str) -> None:
    assert len(wrong_directions({**library(), name: parse(name, text)})) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hvdgloo._engine.executor", "import torch"),
        ("hvdgloo._job.context", "def f():\n    from torch import nn"),
        ("hvdgloo.numpy._adapter", "import torch.distributed"),
        ("hvdgloo.torch._adapter", "import tensorflow as tf"),
        ("hvdgloo.keras.callbacks", "import tensorflow as tf"),
        ("hvdgloo.runner.agent.agent", "import jax"),
    ],
)
def test_the_rule_about_frameworks_can_be_broken(name: str, text: str) -> None:
    assert len(stray_frameworks(cast("dict[str, Module]", {name: parse(name, text)}))) == 1


@pytest.mark.parametrize("text", ["import runner", "from rendezvous.auth import seal", "import runner.cli as c"])
def test_the_rule_about_bare_names_can_be_broken(text: str) -> None:
    assert len(top_level_names([parse("tests.x", text)])) == 1
