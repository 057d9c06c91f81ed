"""Keeps the children of a rank from joining the job as that rank.

A child is any process that the program starts, by whatever means. It inherits two variables: JAXRUN_CHILD_OF names the
rank that started it, and PYTHONPATH leads Python to child_site/sitecustomize.py, which guards
jax.distributed.initialize. The ranks of a job that a rank starts get neither. A process that the program forks has
JAX's state from the rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import CHILD_OF, COORDINATOR_ADDRESS, INITIALIZE_IN_CHILD

SITE = Path(__file__).parent / "child_site"
_PYTHONPATH = "PYTHONPATH"
# mpirun, srun and clouds set some of these to different values in each process; JAX and MPI read them.
CLUSTER_VARIABLES = (
    *("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMIX_RANK"),
    *("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PALS_RANKID", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
    *("JOB_COMPLETION_INDEX", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "MEGASCALE_SLICE_ID"),
)


def tell_children(env: WorkerEnv, environ: MutableMapping[str, str]) -> None:
    """Set the variables for children in `environ`, which they inherit. Called when this rank has joined."""
    told = {
        "pid": os.getpid(),
        "says": what_initialize_says(env.rank),
        "coordinator": environ[COORDINATOR_ADDRESS],
        "cluster": {name: environ.get(name) for name in CLUSTER_VARIABLES},
    }
    environ[CHILD_OF] = json.dumps(told)
    before = environ.get(_PYTHONPATH, "")
    if before.split(os.pathsep)[0] != str(SITE):
        environ[_PYTHONPATH] = f"{SITE}{os.pathsep}{before}" if before else str(SITE)


def what_initialize_says(rank: int) -> str:
    """Return the line for jax.distributed.initialize() in a child of this rank."""
    return (
        f"{INITIALIZE_IN_CHILD} {rank}, which is a JAX process by itself; for a JAX job of its own, give it another "
        "coordinator_address"
    )
