"""MPICH: Hydra, its mpirun; the variables of its ranks, and its words.

Tried across hosts with 4.0.2 and 5.0.2. Hydra waits for the last process; after MPI_Abort, or an error of MPI in a
rank, it kills everything at once. Intel MPI's mpirun is a Hydra, too (intel_mpi.py).
"""

from __future__ import annotations

from itertools import pairwise

from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.spec.engines.engine import PMI_1, CommandLines, Engine, RankVariables
from jaxrun.spec.engines.mpirun_words import HostCounts, Mpirun, MpirunRequest, Words, joined

PLACES = ("ppn", "perhost", "map-by", "rankmap", "rr", "grr", "order-nodes")
LAUNCHES = ("launcher", "bootstrap", "rmk", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP")
# "Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 5) - process 1", or MPI's error
ABORT_WORDS = lazy_pattern(r"(?m)^Abort\((-?[0-9]{1,11})\) on node [0-9]+ \(rank [0-9]+ in comm [0-9]+\): ")
_CONTROL_PORT = "--control-port"


def _control_port(command_lines: CommandLines) -> str:
    """Return where mpiexec listens, "h1:46095", as the command lines of a job's proxies show it."""
    for argv in command_lines:
        for word, value in pairwise(argv):
            if word == _CONTROL_PORT:
                return value
    return ""


def _hosts(counts: HostCounts) -> Words:
    return ("-hosts", joined(counts))


def _place(request: MpirunRequest) -> tuple[Words, ...]:
    hosts = _hosts(request.host_counts) if request.host_counts else per_host(request)
    return (("-n", str(request.processes), *hosts),)


def per_host(request: MpirunRequest) -> Words:
    return ("-ppn", str(request.per_host)) if request.per_host else ()


# Hydra passes all variables on. With -genvlist, MPICH silently loses the last variable of its environment.
MPIRUN = Mpirun(
    version_pattern=r"HYDRA build details:\s+Version:\s+(\S+)",
    host_words=_hosts,
    placement_words=_place,
    directory_option="-wdir",
    launcher_option="-launcher",
    placement_choices=PLACES,
    launcher_choices=LAUNCHES,
)
MPICH = Engine(
    key="mpich",
    title="MPICH",
    command="mpirun",
    # srun --mpi=pmi2 and Flux set PMI_RANK, too, but not the local rank.
    ranks=RankVariables(rank="PMI_RANK", size="PMI_SIZE", markers=("MPI_LOCALRANKID",), job_above=_control_port),
    mpirun=(MPIRUN,),
    agents_stay=True,
    abort_words=ABORT_WORDS,
    abort=PMI_1,
)
