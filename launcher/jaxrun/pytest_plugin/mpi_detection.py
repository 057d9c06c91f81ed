"""Whether this process is one of several that mpirun, srun or the like has started."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.errors import JaxrunError
from jaxrun.job import cluster_env
from jaxrun.job.cluster_env import RankInfo
from jaxrun.protocol.names import RANK


def find_mpi_place(environ: Mapping[str, str]) -> RankInfo | None:
    """Its place among them; None if it is alone, or a rank of a job of ours."""
    if RANK in environ:
        return None
    try:
        place = cluster_env.find_rank_info(environ)
    except JaxrunError:  # variables that make no sense say so when they are needed
        return None
    return place if place is not None and place.size > 1 else None
