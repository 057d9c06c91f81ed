"""Whether this process is one of several that mpirun, srun or the like has started."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.contract.names import RANK
from jaxrun.errors import JaxrunError
from jaxrun.planning import surroundings
from jaxrun.planning.surroundings import Place


def among_others(environ: Mapping[str, str]) -> Place | None:
    """Its place among them; None if it is alone, or a rank of a job of ours."""
    if RANK in environ:
        return None
    try:
        place = surroundings.find(environ)
    except JaxrunError:  # variables that make no sense say so when they are needed
        return None
    return place if place is not None and place.size > 1 else None
