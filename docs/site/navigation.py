"""The table of contents, which the pages do not have themselves: on a forge, Markdown has no directive for it."""

from __future__ import annotations

from typing import Any

CONTENTS = {
    "Begin": ["docs/tutorial", "docs/cheatsheet", "docs/gallery", "docs/environment", "docs/tools", "docs/comparison"],
    "Clusters": [
        "docs/clusters",
        "docs/clusters/slurm",
        "docs/clusters/qsub",
        "docs/clusters/mpi",
        "docs/clusters/ssh",
        "docs/clusters/pods",
        "docs/kubernetes",
        "docs/clusters/schedulers",
        "docs/clusters/sites",
        "docs/clusters/hosts",
        "docs/clusters/on-each-host",
        "docker/README",
    ],
    "Jobs": [
        "docs/failures",
        "docs/surviving",
        "docs/survivors",
        "docs/goodput",
        "docs/snapshots",
        "docs/compilation",
        "docs/debugging",
        "docs/lockstep",
        "docs/startup",
    ],
    "From Python": ["docs/python", "docs/gangs", "docs/notebooks", "docs/testing"],
    "Reference": ["docs/command-line", "docs/api", "docs/json", "docs/event-log", "docs/security", "docs/evidence"],
    "The project": ["CONTRIBUTING", "docs/contributing", "docs/how-it-works", "CHANGELOG", "SECURITY"],
}


def add_contents(app: Any, page: str, source: list[str]) -> None:
    """Append the table to the first page."""
    if page != app.config.root_doc:
        return
    for caption, pages in CONTENTS.items():
        names = "\n".join(f"/{name}" for name in pages)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
