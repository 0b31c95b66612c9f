"""Pages for the source files to which pages link (``../runner/launch.py``), so that they can be read offline.

On a code host such a link leads to the file itself, and a link to a directory to a list of files. Sphinx would offer
the file for download, and does not support directories.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

LANGUAGES = {".py": "python", ".pyi": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".cfg": "ini"}


def setup(app: Sphinx) -> dict[str, Any]:
    # Before Sphinx's own, which collects what is to be downloaded.
    app.connect("doctree-read", link, priority=100)
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", pages)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}


def linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """Return the files to which each page links, as paths from the repository's root."""
    if not hasattr(env, "linked_sources"):
        env.linked_sources = {}  # type: ignore[attr-defined]
    found: dict[str, set[str]] = env.linked_sources  # type: ignore[attr-defined]
    return found


def link(app: Sphinx, doctree: nodes.document) -> None:
    """Make a page's links to files and directories outside docs/ lead to their pages."""
    root = Path(app.srcdir).resolve().parent
    page = app.env.docname
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        path = (Path(app.env.doc2path(page)).parent / node["reftarget"]).resolve()
        folder = isinstance(node, addnodes.pending_xref)
        if not path.is_relative_to(root) or path.is_relative_to(app.srcdir) or path.is_dir() != folder:
            continue
        name = path.relative_to(root).as_posix()
        linked(app.env).setdefault(page, set()).add(name)
        address = app.builder.get_relative_uri(page, f"source/{name}")
        node.replace_self(nodes.reference("", "", *node.children, refuri=address, internal=True))


def forget(app: Sphinx, env: BuildEnvironment, page: str) -> None:
    linked(env).pop(page, None)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each file or directory: its name, the template's values, and the template."""
    root = Path(app.srcdir).resolve().parent
    names = set().union(*linked(app.env).values())
    listed = {name: _files(root, name) for name in names if (root / name).is_dir()}
    for name in sorted(names.union(*listed.values())):
        if name in listed:
            links = (f'<li><a href="{Path(name).name}/{Path(file).name}.html">{file}</a></li>' for file in listed[name])
            shown = f"<ul>{''.join(links)}</ul>"
        else:
            text = (root / name).read_text(encoding="utf-8")
            language = LANGUAGES.get(Path(name).suffix, "none")
            shown = app.builder.highlighter.highlight_block(text, language)  # type: ignore[attr-defined]
        yield f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>{shown}"}, "page.html"


def _files(root: Path, folder: str) -> list[str]:
    """Return the source files in a directory, as paths from the root."""
    found = (path for path in (root / folder).iterdir() if path.suffix in LANGUAGES)
    return sorted(path.relative_to(root).as_posix() for path in found)
