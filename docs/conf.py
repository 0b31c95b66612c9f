"""Configuration with which Sphinx makes a site of this directory: ``make docs``.

The pages are plain Markdown, which is readable on a code host as well. The parts that only the site has (its
navigation, pages of linked source files) are added while it is built, so nothing in a page is written for Sphinx.
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

extensions = ["myst_parser", "sphinx_copybutton", "navigation", "sources", "excerpts"]
navigation = {
    "Start": (
        "installation",
        "compatibility",
        "tutorial-torch",
        "tutorial-keras",
        "tutorial-tensorflow",
        "tutorial-jax",
        "tutorial-mxnet",
        "tutorial-numpy",
        "tutorial-torch-distributed",
        "faq",
    ),
    "Running jobs": ("recipes", "launching", "hosts", "slurm", "kubernetes", "settings-file", "doctor", "elastic",
        "torch-distributed", "spark", "ray", "tf-data-service", "gpus", "troubleshooting"),
    "Seeing and tuning": ("observing", "timeline", "tuning", "slow-networks"),
    "Coming from Horovod": ("migrating",),
    "Reference": ("configuration", "security", "security-protocols", "changelog"),
    "API": ("api", "api-start", "api-collectives", "api-training", "api-elastic", "api-observing", "api-run",
        "api-tensorflow", "api-tensorflow-data", "api-keras", "api-jax", "api-mxnet"),
    "How it works": ("performance", "performance-history", "gpu-report-h100", "life-of-a-tensor", "life-of-a-host"),
}  # fmt: skip
"""The pages by title of their part, in the order of the side bar. A missing page is an error."""

myst_heading_anchors = 6  # links to headings are the same as on code hosts
# Indented text and blocks without a language show terminals or protocols, rarely Python.
highlight_language = "none"
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"hvdgloo {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = False
html_show_copyright = False
# Off, since Sphinx's summaries of results are fetched from the pages, which browsers refuse for a site on disk; the
# extension "excerpts" has others.
html_show_search_summary = False
