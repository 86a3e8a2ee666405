"""Sphinx's configuration for the site of these pages, which `make docs` builds.

The pages are plain Markdown and are read without the site as well: tables of contents are here.
Sphinx, because MkDocs 1 is without releases and Material for MkDocs ends in May 2027.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
CONTENTS = {
    "Use it": "demo node gateway batches scheduler capacity-policy client weights buckets models"
    " trainers gpu-memory engines security",
    "Operate it": "operators/*",
    "Understand it": "architecture lifecycle code-map glossary contracts/README adr/README",
    "Measurements": "simulator evaluation bench bench-gateway gpu",
    "The project": "contributing changelog",
}
OF_THE_ROOT = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
CHILDREN = {
    "contracts/README": (
        "environment control-page replica-http gateway-http scheduler-grpc weights raw-records"
        " demo-processes"
    ),
    "adr/README": "0*",
    "operators/alerts": "runbooks/*",
    "trainers": "trainers/*",
}

project = "ROSE"
author = "the ROSE developers"
copyright = author
version = release = next(
    found[1]
    for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    if (found := re.match(r'version = "(.+)"', line))
)

extensions = ["myst_parser"]
templates_path = ["_templates"]
myst_heading_anchors = 4  # GitHub's anchors, so that a link works here and there.
highlight_language = "none"

html_theme = "pydata_sphinx_theme"
html_title = f"ROSE {release}"
html_static_path = ["_static"]
html_css_files = ["rose.css"]
html_show_sourcelink = False
html_sidebars = {"**": ["contents"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_align": "left",
    "show_toc_level": 2,
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}


def toctree(pages: str, caption: str = "") -> str:
    """Return a hidden table of contents."""
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages.split(), "```", ""])


def at_root(name: str) -> str:
    """Return a page of the repository's root, with its links as seen from this folder."""
    text = (ROOT / OF_THE_ROOT[name]).read_text(encoding="utf-8").replace("](docs/", "](")
    for page, file in OF_THE_ROOT.items():
        text = text.replace(f"]({file})", f"]({page}.md)")
    return re.sub(r"\]\((?=LICENSE\)|examples/)", "](../", text)


def complete(_: Sphinx, name: str, source: list[str]) -> None:
    """Add to a page what it has on the site alone."""
    if name in OF_THE_ROOT:
        source[0] = at_root(name)
    # Pages of the repository's root have other names on the site.
    for page, file in OF_THE_ROOT.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(file)}", f"](/{page}.md", source[0])
    if name == "index":
        source[0] += "".join(toctree(pages, caption) for caption, pages in CONTENTS.items())
    source[0] += toctree(CHILDREN[name]) if name in CHILDREN else ""


def setup(app: Sphinx) -> None:
    """Connect `complete`."""
    app.connect("source-read", complete)
