"""Directories that --stage copies to local disks: the messages of head and agents, and the paths of the copies.

    agent                                     head
                          ◀──────────    JobInfo                (with a Stage)
    AgentReport           ──────────▶                           (with the port at which others can copy from it)
                          ◀──────────    CopyStaged             (to one agent of each host)
    StagedCopied          ──────────▶                           (then the workers are started)

They belong to the messages of agent_messages.py. node/staging/transfer.py describes how hosts copy from each other.
A mapping `staged` has the path of the copy for each source: {"/home/me/venv": "/tmp/…/copy"}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from msgspec import Struct

from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.codec import Message
from jaxrun.protocol.names import STAGED
from jaxrun.protocol.worker_command import program_of

STAGE_VENV = "venv"  # a name for --stage: the environment in which jaxrun runs
_PATH_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


class StagedContent(Struct, frozen=True, forbid_unknown_fields=True):
    """A directory as it was read: the paths that mean it, the hash of its content, the bytes of its files."""

    sources: tuple[str, ...]
    name: str
    nbytes: int


class Stage(Struct, frozen=True, forbid_unknown_fields=True):
    """All directories to copy, and the directory of --stage-dir; empty for each host's TMPDIR or /tmp."""

    base: str
    contents: tuple[StagedContent, ...]


class CopyStaged(Message, frozen=True):
    """Copy all staged directories from `giver` ("host:port", "" for the head) to your host; `takers` copy from it."""

    giver: str
    takers: int


class StagedCopied(Message, frozen=True):
    """All staged directories are on the agent's host, which received `nbytes` for it; or `error` says why not."""

    agent: AgentId
    nbytes: int
    error: str = ""


def staged_path(path: str, staged: Mapping[str, str]) -> str:
    """Return the path of `path` in the copies; the path itself if it is in none."""
    full = os.path.abspath(path)
    for source, copy in staged.items():
        if full == source or full.startswith(f"{source}/"):
            return copy + full[len(source) :]
    return path


def use_copies(
    argv: tuple[str, ...], environ: Mapping[str, str], staged: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a worker's command, and the variables that name files, with copies for sources."""
    program, *arguments = program_of(argv)
    files = argv[: -1 - len(arguments)] if program == "-m" else argv[: len(argv) - len(arguments)]
    lists = {name: environ[name].split(":") for name in _PATH_VARIABLES if environ.get(name)}
    variables = {name: ":".join(staged_path(part, staged) for part in parts) for name, parts in lists.items()}
    argv = (*(staged_path(file, staged) for file in files), *argv[len(files) :])
    return argv, {**variables, STAGED: json.dumps(staged)}


def read_staged(environ: Mapping[str, str]) -> dict[str, str]:
    """The copies that the launcher or an agent has told this worker of."""
    return dict(json.loads(environ.get(STAGED, "{}")))
