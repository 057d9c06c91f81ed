"""Intel MPI: its mpirun is a Hydra, as MPICH's, with other words for hosts, and it binds processes by itself.

Tried across hosts with 2021.18.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxrun.spec.engines.engine import PMI_1, Engine, Environ, RankVariables
from jaxrun.spec.engines.mpich import ABORT_WORDS, LAUNCHES, PLACES, per_host
from jaxrun.spec.engines.mpirun_words import HostCounts, Mpirun, MpirunRequest, Words

_HOME = "I_MPI_ROOT"


def _hosts(counts: HostCounts) -> Words:
    return ("-hosts", ",".join(name for name, _ in counts))


def _place(request: MpirunRequest) -> tuple[Words, ...]:
    """Give each host a block of its own if the numbers differ: Intel MPI ignores numbers in a list of hosts."""
    if request.host_counts and request.per_host is None:
        return tuple(("-n", str(count), "-host", name) for name, count in request.host_counts)
    hosts = _hosts(request.host_counts) if request.host_counts else ()
    return (("-n", str(request.processes), *hosts, *per_host(request)),)


def _program(path: str) -> str:
    """Return Intel MPI's program instead of its mpirun, a script that runs the first mpiexec.hydra on PATH."""
    program = os.path.join(os.path.dirname(path), "mpiexec.hydra")
    try:
        with open(path, "rb") as file:
            is_script = file.read(2) == b"#!" and b"I_MPI_" in file.read()
    except OSError:
        return path
    return program if is_script and os.access(program, os.X_OK) else path


def _own_env(path: str, environ: Environ) -> dict[str, str]:
    """Return what Intel MPI's own script would set."""
    if _HOME in environ:
        return {}
    home = Path(path).parent.parent
    return {_HOME: str(home), "PATH": os.pathsep.join(filter(None, (environ.get("PATH"), str(home / "bin"))))}


MPIRUN = Mpirun(
    version_pattern=r"Intel\(R\) MPI Library.*Version (\S+)",
    program=_program,
    host_words=_hosts,
    placement_words=_place,
    directory_option="-wdir",
    own_env=_own_env,
    unbind_env={"I_MPI_PIN": "0"},
    binding_choices=(
        "bind-to",
        "cpu-bind",
        "I_MPI_PIN",
        "I_MPI_PIN_CELL",
        "I_MPI_PIN_DOMAIN",
        "I_MPI_PIN_PROCESSOR_LIST",
    ),
    launcher_option="-launcher",
    placement_choices=PLACES,
    launcher_choices=LAUNCHES,
)
INTEL_MPI = Engine(
    key="intel-mpi",
    title="Intel MPI",
    command="mpirun",
    ranks=RankVariables(
        rank="PMI_RANK",
        size="PMI_SIZE",
        markers=("MPI_LOCALRANKID", "I_MPI_HYDRA_UUID"),  # the second distinguishes it from MPICH
        job=("I_MPI_HYDRA_UUID",),
    ),
    mpirun=(MPIRUN,),
    # Until its child has a process group of its own, a hydra_pmi_proxy forwards a SIGTERM to itself, forever.
    sigterm_at_start=False,
    agents_stay=True,
    abort_words=ABORT_WORDS,
    abort=PMI_1,
)
