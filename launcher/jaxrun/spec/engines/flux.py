"""Flux: the variables of its tasks, as it documents them; it was not tried.

A Flux inside a PALS job passes the variables of PALS on to its own tasks, so it stands before PALS in the table.
"""

from __future__ import annotations

from jaxrun.spec.engines.engine import PMI_1, Engine, RankVariables

FLUX = Engine(
    key="flux",
    title="Flux",
    command="flux run",
    ranks=RankVariables(rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", job=("FLUX_JOB_ID",)),
    abort=PMI_1,
)
