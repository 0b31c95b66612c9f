"""The texts of all pages in a script, from which the search shows excerpts.

Sphinx's own search fetches each page that it has found, which browsers refuse for a site that is opened from disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", load)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def load(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Have the search's page load the texts."""
    if page == "search":
        app.add_js_file("texts.js")
        app.add_js_file("excerpts.js", defer="defer")


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the sections of each page, as pairs of the identifier and the text."""
    if error is None and app.builder.format == "html":
        texts = {page: _sections(app.env.get_doctree(page)) for page in app.env.found_docs}
        script = f"const TEXTS = {json.dumps(texts, sort_keys=True, separators=(',', ':'))};\n"
        (Path(app.outdir) / "_static/texts.js").write_text(script, encoding="utf-8")


def _sections(doctree: nodes.document) -> list[tuple[str, str]]:
    return [
        (section["ids"][0], " ".join(text for text in map(_text, section.children) if text))
        for section in doctree.findall(nodes.section)
    ]


def _text(node: nodes.Node) -> str:
    return "" if isinstance(node, nodes.section) else " ".join(node.astext().split())
