"""The side bar: a table of contents outside the pages, since a code host would show it as a block of code."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("navigation", {}, "env")
    app.connect("source-read", append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def append(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the hidden table to the start page's text; the theme shows it at the side of every page."""
    if page == app.config.root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
            for title, pages in app.config.navigation.items()
        )
