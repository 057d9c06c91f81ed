"""What --stage copies to the hosts' local disks, and how head and agents speak of it.

    agent                                     head
                          ◀──────────    JobInfo                (with a Stage)
    AgentReport           ──────────▶                           (with the port at which others can copy from it)
                          ◀──────────    CopyStaged             (to one agent of each host)
    StagedCopied          ──────────▶                           (then the workers are started)

They belong to the messages of agent_messages.py. How agents copy from each other is said in node/staging/transfer.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagedContent:
    """A directory as it was when it was read: the paths that mean it, the hash of its content, bytes of its files."""

    sources: tuple[str, ...]
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """All that is copied, and the directory of --stage-dir; empty for each host's TMPDIR or /tmp."""

    base: str
    contents: tuple[StagedContent, ...]


@dataclass(frozen=True, slots=True)
class CopyStaged:
    """Have all that is staged on your host, from the first of these addresses, "host:port", that gives it."""

    givers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StagedCopied:
    """All that is staged is on the agent's host, to which `nbytes` have come; or `error` says why it is not."""

    rank: int
    nbytes: int
    error: str = ""


def staged_path(path: str, staged: Mapping[str, str]) -> str:
    """Where `path` is in the copies, which are given by source; the path itself if it is in none."""
    full = os.path.abspath(path)
    for source, copy in staged.items():
        if full == source or full.startswith(f"{source}/"):
            return copy + full[len(source) :]
    return path


def format_staged(staged: Mapping[str, str]) -> str:
    """The value of JAXRUN_STAGED: copies by their sources."""
    return json.dumps(dict(staged)) if staged else ""


def parse_staged(text: str) -> dict[str, str]:
    return dict(json.loads(text)) if text else {}
