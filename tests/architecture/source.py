"""The project's own source as data: modules, what they import, what they call. Nothing is imported or run.

The symlinks ``hvdgloo/rendezvous`` and ``hvdgloo/runner`` are not followed; their targets at the top level are read
under the names by which they are imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from hvdgloo._platform.imports import collector_paused

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = {"hvdgloo": "hvdgloo", "rendezvous": "hvdgloo.rendezvous", "runner": "hvdgloo.runner"}
"""Folders that are installed, and the package that each one is."""

OTHERS = ("tests", "examples", "benchmarks", "docs", "packaging")
TEXT_SUFFIXES = frozenset({".py", ".md", ".cfg", ".toml", ".txt", ".html", ".yml", ".yaml"})
_LOOSE_FILES = (
    "Makefile",
    ".ci/run",
    "README.md",
    "CHANGELOG.md",
    "setup.cfg",
    "setup.py",
    "MANIFEST.in",
    "pyproject.toml",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "ruff.toml",
    ".gitignore",
)


@dataclass(frozen=True)
class Import:
    """One imported name: the module it was imported from (or is), and the line."""

    target: str
    line: int


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is first wanted: many rules look at a part of all modules."""
        with collector_paused():
            return ast.parse(self.text, str(self.path))

    @property
    def place(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def library() -> dict[str, Module]:
    """Every module that is installed, by name."""
    return {module.name: module for folder, package in LIBRARY.items() for module in _modules(ROOT / folder, package)}


@cache
def everything() -> tuple[Module, ...]:
    """Every Python file of the project, tests included."""
    others = [module for folder in OTHERS for module in _modules(ROOT / folder, folder)]
    return (*library().values(), *others)


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the project."""
    for folder in (*LIBRARY, *OTHERS):
        for path in _files(ROOT / folder):
            if path.suffix in TEXT_SUFFIXES:
                yield path, path.read_text(encoding="utf-8")
    for name in _LOOSE_FILES:
        if (ROOT / name).is_file():
            yield ROOT / name, (ROOT / name).read_text(encoding="utf-8")


def imports(module: Module, known: Sequence[str] | frozenset[str] = ()) -> list[Import]:
    """All that a module imports, wherever in it: at its top, in a function, for type checkers only, or by
    ``importlib.import_module("a.name")``.

    Args:
        known: module names, by which ``from package import name`` is told to import a module or a value.
    """
    return list(_imports(module, frozenset(known)))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Everything in a module: rules walk over the same trees again and again."""
    return tuple(ast.walk(tree))


@cache
def _imports(module: Module, known: frozenset[str]) -> tuple[Import, ...]:
    found = []
    for node in nodes(module.tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.append(Import(whole if whole in known else base, node.lineno))
        elif isinstance(node, ast.Call) and dotted(node.func) in {"importlib.import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.append(Import(argument.value, node.lineno))
    return tuple(found)


def dotted(node: ast.expr) -> str:
    """``os.environ`` as text; empty for what is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function with its qualified name; what is outside of all is ``<module>``'s, and not yielded."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        elif not isinstance(node, ast.expr):  # no expression has one inside, and most of a tree is expressions
            yield from functions(node, prefix)


def parse(name: str, text: str) -> Module:
    """A module out of a text, for showing that a rule can be broken."""
    return Module(name, ROOT / "example.py", text)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts if module.path.name == "__init__.py" else parts[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _modules(folder: Path, package: str) -> Iterator[Module]:
    for path in _files(folder):
        if path.suffix == ".py":
            inner = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(inner[:-1] if inner[-1] == "__init__" else inner)))
            yield Module(name, path, path.read_text(encoding="utf-8"))


def _files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path
