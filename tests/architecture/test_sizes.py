"""Limits of size: a class that grows beyond them holds something that is a thing of its own."""

from __future__ import annotations

import ast

from tests.architecture.source import Module, library, nodes, parse

MOST_LINES = 450

LONGER = {
    ("hvdgloo.config", "Config"): "declarations: each setting beside its documentation",
}


def long_classes(module: Module) -> dict[str, int]:
    """The lines of the classes that have too many, by name; nested ones included."""
    lines = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in nodes(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    return {name: count for name, count in lines.items() if count > MOST_LINES}


def test_no_class_has_more_lines_than_can_be_held_in_mind() -> None:
    found = {
        (module.name, name): count for module in library().values() for name, count in long_classes(module).items()
    }
    too_long = [
        f"{name} in {module}: {count} lines" for (module, name), count in found.items() if (module, name) not in LONGER
    ]
    assert not too_long, f"at most {MOST_LINES} lines; move what is a thing of its own elsewhere"
    assert found.keys() == LONGER.keys(), "exceptions that are no longer needed"


def test_the_rule_about_long_classes_can_be_broken() -> None:
    body = "    x = 0\n" * MOST_LINES
    inner = "".join(f"    {line}\n" for line in f"class Inner:\n{body}".splitlines())
    text = f"class Long:\n{body}\nclass Short:\n{body[:-10]}\nclass Outer:\n{inner}"
    assert long_classes(parse("example", text)) == {
        "Long": MOST_LINES + 1,
        "Outer": MOST_LINES + 2,
        "Inner": MOST_LINES + 1,
    }
