"""mpi4py in the user's program: a word about ranks that no MPI has started, and MPI_Finalize at the end."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime.import_watch import call_after_import

_MODULE = "mpi4py.MPI"
# By these a process knows that an MPI, or Slurm for one, has started it: Open MPI, MPICH and Intel MPI, PMIx.
_LAUNCH_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_FD", "PMIX_RANK")


def warn_of_singletons(env: WorkerEnv) -> None:
    """Have rank 0 say, when the program imports mpi4py.MPI, that MPI does not know of the other ranks."""
    if env.rank == 0 and env.size > 1 and not any(name in os.environ for name in _LAUNCH_VARIABLES):
        call_after_import(_MODULE, _warn_of_singleton)


def finalize() -> None:
    """Finalize MPI, if the program has used mpi4py, which does this when the interpreter is torn down."""
    mpi4py, mpi = sys.modules.get("mpi4py"), sys.modules.get(_MODULE)
    if mpi is None or getattr(getattr(mpi4py, "rc", None), "finalize", None) is False:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _warn_of_singleton(module: ModuleType) -> None:
    print(
        "jaxrun: mpi4py sees rank 0 of 1 in every process, as no MPI has started them; "
        "jaxrun --backend mpirun makes them the ranks of one MPI job",
        file=sys.stderr,
    )
