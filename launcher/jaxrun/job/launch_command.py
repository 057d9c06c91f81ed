"""What starts the agents on the hosts: somebody else's command, trusted to start processes and for nothing more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

AGENT_ARGV = (sys.executable, "-m", "jaxrun.agent")  # what the starter is to run once for each rank


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """One mpirun or srun.

    engine:     the key of its variables in surroundings.ENGINES: "open-mpi", "hydra", "slurm"
    title:      how people call it: "Open MPI 5.0.11"
    argv:       the whole command, the agent's at its end; every value of a variable is in the environment, never here
    set_env:    variables for the command itself, besides those for the workers
    unset_env:  names that it must not see
    attached:   what has started the processes already, where this starts only the agent of rank 0
    """

    engine: str
    title: str
    argv: tuple[str, ...]
    set_env: Mapping[str, str] = field(default_factory=dict)
    unset_env: tuple[str, ...] = ()
    attached_to: str = ""
