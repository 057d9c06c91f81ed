"""The site: Sphinx with MyST over the Markdown pages of the whole checkout, built by scripts/docs."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs/site")]

from jaxrun.protocol.names import VERSION  # noqa: E402 - the environment of the site has jaxrun

project = "jaxrun"
author = copyright = "The jaxrun developers"
version = release = VERSION
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_click",
    "sphinx_copybutton",
    "navigation",
    "docstrings",
    "jax_links",
]

root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/clusters/*.md", "docker/README.md"]
exclude_patterns = [".*", "dist", "launcher", "runtime", "scripts", "tests", "*-runs", "*-results", "docs/_build"]
myst_heading_anchors = 3
default_role = "code"  # of docstrings: `name` is code, as in Markdown
highlight_language = "text"
smartquotes = False  # which would make one dash of the two of an option

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
# Inventories of their own, so that a build needs no network: docs/site/jax_links.py.
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest/", str(ROOT / "docs/_build/jax.inv")),
    "python": ("https://docs.python.org/3/", str(ROOT / "docs/_build/python.inv")),
}

html_theme = "furo"
html_title = f"jaxrun {VERSION}"
html_extra_path = ["site/index.html"]
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/jaxrun/jaxrun/",
    "source_branch": "main",
    "navigation_with_keys": True,
}
copybutton_prompt_text = r"(\w+)?\$ "
copybutton_prompt_is_regexp = True
linkcheck_anchors = False
linkcheck_timeout = 20
linkcheck_ignore = ["https://github.com/jaxrun/", "https://jaxrun.readthedocs.io"]
