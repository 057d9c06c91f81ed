"""The variables that jaxrun removes for workers, and those that it sets for every interpreter. Pure.

This module is imported before the launcher has read its command line, so it imports almost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.protocol.names import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, RESERVED_PREFIX

PLATFORMS_VARIABLE = "JAX_PLATFORMS"
CPU_DEVICES_VARIABLE = "JAX_NUM_CPU_DEVICES"

# Left over from another job: JAX would take its rank and its coordinator from these.
_OTHER_JOB_VARIABLES = (
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
)


def inherited_job_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names in `environ` that belong to another job and must not reach a worker."""
    return tuple(sorted(name for name in environ if name.startswith(RESERVED_PREFIX) or name in _OTHER_JOB_VARIABLES))


def interpreter_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which every Python interpreter of a job starts; `environ` has what the user gives.

    All ranks have one hash seed unless the user has chosen another.
    """
    return {"PYTHONHASHSEED": "0"} if environ.get("PYTHONHASHSEED", "random") in ("random", "") else {}
