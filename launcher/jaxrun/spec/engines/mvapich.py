"""MVAPICH 2: the variables of the ranks that its mpirun_rsh starts, as it documents them; it was not tried.

The mpirun of MVAPICH 3 is MPICH's (mpich.py).
"""

from __future__ import annotations

from jaxrun.spec.engines.engine import PMI_1, Engine, RankVariables

MVAPICH = Engine(
    key="mvapich",
    title="MVAPICH",
    command="mpirun",
    ranks=RankVariables(rank="MV2_COMM_WORLD_RANK", size="MV2_COMM_WORLD_SIZE", job=("MPIRUN_HOST", "MPIRUN_ID")),
    abort=PMI_1,
)
