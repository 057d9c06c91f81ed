"""Links from names of JAX and Python in the pages, `jax.make_mesh` or `jax.process_index()`, to their documentation.

The pages name them as code, so that they stay plain Markdown. Intersphinx resolves the names from inventories that are
written here, with the pattern of the addresses: a build needs no network. `scripts/docs --links` checks the addresses.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref

_NAME = re.compile(r"((?:jax|multiprocessing|subprocess|pathlib)(?:\.\w+)+)(?:\(.*\))?")
# By the page of their documentation: names of JAX with a page of their own, and those with a page of several.
JAX_OWN_PAGE = [
    "jax.debug.callback",
    "jax.device_put",
    "jax.distributed.initialize",
    "jax.jit",
    "jax.local_devices",
    "jax.make_mesh",
    "jax.process_count",
    "jax.process_index",
    "jax.random.key",
    "jax.shard_map",
]
PYTHON = {"multiprocessing.Pool": "library/multiprocessing.html#multiprocessing.pool.Pool"}


def write_inventory(path: Path, project: str, entries: dict[str, str]) -> None:
    """Write an inventory of Sphinx, version 2: a head, and compressed lines with names and addresses."""
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    lines = "".join(f"{name} py:function 1 {address} -\n" for name, address in sorted(entries.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(lines.encode()))


def write_inventories(app: Any, config: Any) -> None:
    jax = {name: f"_autosummary/{name}.html#{name}" for name in JAX_OWN_PAGE}
    for project, entries in {"jax": jax, "python": PYTHON}.items():
        write_inventory(Path(config.intersphinx_mapping[project][1]), project, entries)


def link_names(app: Any, document: nodes.document) -> None:
    """Make each name in the text that an inventory may have a reference; one that it does not have stays code."""
    for literal in list(document.findall(nodes.literal)):
        found = _NAME.fullmatch(literal.astext())
        if found and not isinstance(literal.parent, nodes.reference | pending_xref):
            target = {"refdomain": "py", "reftype": "func", "reftarget": found[1], "refwarn": False}
            reference = pending_xref("", **target, refdoc=app.env.docname)
            literal.replace_self(reference)
            reference += literal


def setup(app: Any) -> dict[str, bool]:
    app.connect("config-inited", write_inventories, priority=1)  # before intersphinx reads them
    app.connect("doctree-read", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
