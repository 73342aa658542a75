"""How Sphinx makes the site of these pages; ``make docs`` runs it, warnings are errors."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import torch

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

_project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
project = _project["name"]
version = release = _project["version"]
html_title = f"{project} {version}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "from_code",
    "llms",
]
smartquotes = False  # two hyphens are an option
exclude_patterns = ["_*"]

# Pages are Markdown as GitHub reads it: the same anchors of headings, no further syntax.
myst_heading_anchors = 6

suppress_warnings = ["toc.multiple_toc_parents"]  # a folder may have an index of its own

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# The names of others that signatures show, so that a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "_ext/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "_ext/torch.txt"),
}
nitpicky = True
nitpick_ignore_regex = [  # names in signatures that are not public
    (r"py:.*", r"fullshard\..*"),
    (r"py:class", r"Timing|Wire"),
]
if (
    f"torch=={torch.__version__.partition('+')[0]}\n"
    not in (DOCS.parent / "constraints.txt").read_text()
):
    # Another PyTorch may have moved a class, or name a type variable in a signature.
    nitpick_ignore_regex.append((r"py:.*", r"torch\..*|typing\.~.*"))

html_theme = "furo"
html_static_path = ["_static"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_js_files = [("site.js", {"priority": 300})]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
