"""docs/troubleshooting.md is keyed by messages that are really printed: each of its headings occurs in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.source import ROOT, everything, library, nodes

PAGE = ROOT / "docs/troubleshooting.md"
ANYTHING = "\0"
"""Stands for what differs from case to case, in headings as in templates."""

_CONVERSIONS = re.compile(r"%[-.\d]*[sdrgf]|\{[a-z_]+\}")  # of logging, and of str.format


def heads(text: str) -> list[str]:
    """The messages that a page explains."""
    return re.findall(r"^### `(.+)`$", text, re.M)


def template(node: ast.expr) -> str | None:
    """The text of a literal, with ``ANYTHING`` for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _CONVERSIONS.sub(ANYTHING, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = template(node.left), template(node.right)
        return None if sides == (None, None) else "".join(ANYTHING if side is None else side for side in sides)
    return None


def _documentation(tree: ast.Module) -> Iterator[int]:
    """Docstrings, also of attributes: a message that stands only there is never printed."""
    for node in nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


@cache
def templates() -> tuple[str, ...]:
    found = []
    companions = [module for module in everything() if module.place.startswith("packaging/")]
    for module in (*library().values(), *companions):
        documentation = set(_documentation(module.tree))
        for node in nodes(module.tree):
            if isinstance(node, ast.expr) and id(node) not in documentation:
                text = template(node)
                if text is not None:
                    found.append(text)
    return tuple(found)


def occurs(head: str) -> bool:
    wanted = re.sub(r"<\.\.\.>", ANYTHING, head)
    return any(wanted in text for text in templates())


@pytest.mark.parametrize("head", heads(PAGE.read_text(encoding="utf-8")))
def test_every_message_that_is_explained_is_printed(head: str) -> None:
    assert occurs(head), f"no text in the source has {head!r}; has the message been reworded?"


def test_every_message_has_an_explanation_and_is_there_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = heads(text)
    assert len(found) > 50
    assert sorted(set(found)) == sorted(found)
    assert all(len(re.sub(r"<\.\.\.>|\W", "", head)) >= 10 for head in found), "too short to be told from others"
    sections = re.split(r"^### .*$", text, flags=re.M)[1:]
    assert all(section.partition("\n#")[0].strip() for section in sections)


def test_a_message_that_is_never_printed_is_found_out() -> None:
    assert not occurs("the launcher was eaten by <...>")
    assert not occurs("the launcher has been silent for a while")
    assert not occurs("has to be noticed sooner than")  # stands in no message


def test_every_error_that_is_raised_is_named() -> None:
    raised = {
        node.exc.func.id
        for module in library().values()
        for node in nodes(module.tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    tree = {node.name for node in ast.walk(library()["hvdgloo.errors"].tree) if isinstance(node, ast.ClassDef)}
    text = PAGE.read_text(encoding="utf-8")
    assert {name for name in raised & tree if f"`{name}`" not in text} == set()
