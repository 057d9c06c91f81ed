"""What this process was told when it started as a rank, for the parts of the runtime that the program calls.

A rank keeps it in memory. The program's environment shows only what docs/environment.md lists: neither the settings of
the job nor descriptors, and no secret, since programs log or publish their environment.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from jaxrun.protocol.env import WorkerEnv

_told: WorkerEnv | None = None


def keep(env: WorkerEnv, environ: MutableMapping[str, str]) -> None:
    """Remember `env`, and remove from `environ` what the program does not need to see."""
    global _told
    _told = env
    for name in WorkerEnv.hidden_variables():
        environ.pop(name, None)


def read(environ: Mapping[str, str]) -> WorkerEnv:
    """Return what this rank was told; in a child of a rank, as much of it as its environment shows.

    Raises ProtocolError if `environ` is not the environment of a rank or its child.
    """
    return WorkerEnv.from_program_env(environ) if _told is None else _told
