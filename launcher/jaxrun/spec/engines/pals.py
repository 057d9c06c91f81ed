"""PALS, the mpiexec of HPE Cray's systems with PBS: the variables of its ranks, as it documents them; not tried."""

from __future__ import annotations

from jaxrun.spec.engines.engine import PMI_1, Engine, RankVariables

PALS = Engine(
    key="pals",
    title="PALS (HPE Cray)",
    command="mpiexec",
    # srun --mpi=cray_shasta sets PALS_RANKID, too, but no size.
    ranks=RankVariables(rank="PALS_RANKID", size="PMI_SIZE", markers=("PMI_SIZE",), job=("PALS_APID",)),
    abort=PMI_1,
)
