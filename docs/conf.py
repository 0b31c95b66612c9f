"""How Sphinx makes a site of this folder: ``make docs``.

The pages are plain Markdown, to be read on a code host as well. What only the site has (its navigation, pages of the
source files that are linked) is added while it is built, and so nothing in a page is written for Sphinx.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "site"), str(Path(__file__).parents[1])]

from hvdgloo.version import __version__  # noqa: E402 (it has just become reachable)

project = "hvdgloo"
author = "hvdgloo contributors"
release = version = __version__
language = "en"

extensions = ["myst_parser", "sphinx_copybutton", "navigation", "sources"]
navigation = {
    "Start": (
        "installation",
        "tutorial-torch",
        "tutorial-keras",
        "tutorial-tensorflow",
        "tutorial-mxnet",
        "tutorial-numpy",
    ),
    "Running jobs": ("launching", "observing", "tuning", "elastic", "gpus", "torch-distributed", "spark",
        "ray", "timeline"),
    "Coming from Horovod": ("migrating", "compatibility"),
    "Reference": ("api", "api-tensorflow", "api-mxnet", "configuration", "troubleshooting", "security", "changelog"),
    "How it works": ("performance", "life-of-a-tensor", "life-of-a-host"),
}  # fmt: skip
"""The pages in the order of the side bar: title of a part to names of its pages. A page that is missing is an error."""

myst_heading_anchors = 6  # links to headings are those of code hosts
# Indented text and blocks without a language are a terminal's or a protocol's, rarely Python.
highlight_language = "none"
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"hvdgloo {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = False
html_show_copyright = False
# Summaries of what was found are fetched from the pages, which browsers refuse in a site that lies on a disk.
html_show_search_summary = False
