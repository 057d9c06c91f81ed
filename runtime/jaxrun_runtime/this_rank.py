"""Keeps the settings that this process got when it started as a rank, for the functions that the program calls.

They are kept in memory. The program's environment shows only the variables in docs/environment.md. It has no settings
of the job, no descriptors and no secret, because programs log or publish their environment.
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
    """Return this rank's settings; in a child of a rank, the settings that its environment shows.

    Raises ProtocolError if `environ` is not the environment of a rank or its child.
    """
    return WorkerEnv.from_program_env(environ) if _told is None else _told
