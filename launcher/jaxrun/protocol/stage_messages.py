"""What --stage copies to the hosts' local disks, and how head and agents speak of it.

    agent                                     head
                          ◀──────────    JobInfo                (with a Stage)
    AgentReport           ──────────▶                           (with the port at which others can copy from it)
                          ◀──────────    CopyStaged             (to one agent of each host)
    StagedCopied          ──────────▶                           (then the workers are started)

They belong to the messages of agent_messages.py. How hosts copy from each other is said in node/staging/transfer.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagedContent:
    """A directory as it was when it was read: the paths that mean it, the hash of its content, bytes of its files."""

    sources: tuple[str, ...]
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """All that is copied, and the directory of --stage-dir; empty for each host's TMPDIR or /tmp.

    port:  where the launcher gives it to others
    """

    base: str
    contents: tuple[StagedContent, ...]
    port: int = 0


@dataclass(frozen=True, slots=True)
class CopyStaged:
    """Have all that is staged on your host, from `giver`, "host:port", and give it to so many `takers`."""

    giver: str
    takers: int


@dataclass(frozen=True, slots=True)
class StagedCopied:
    """All that is staged is on the agent's host, to which `nbytes` have come; or `error` says why it is not."""

    rank: int
    nbytes: int
    error: str = ""
