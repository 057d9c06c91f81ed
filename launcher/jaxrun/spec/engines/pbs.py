"""PBS (OpenPBS, PBS Professional): the hosts and slots of a job, as it documents them; not tried.

Its jobs are in backends/pbs_job.py.
"""

from __future__ import annotations

from collections import Counter

from jaxrun.spec.engines.engine import Engine, Environ
from jaxrun.spec.engines.grid_engine import read_lines

NODEFILE = "PBS_NODEFILE"  # a file with the name of a host in each line, once for each of its slots (mpiprocs)


def _slots(environ: Environ) -> str:
    """Return "h1:4,h2:4", or "h1,h2" if each host has one slot, as it has where nobody asked for mpiprocs."""
    path = environ.get(NODEFILE, "")
    counts = Counter(line.strip() for line in read_lines(NODEFILE, path)) if path else Counter[str]()
    if set(counts.values()) <= {1}:
        return ",".join(counts)
    return ",".join(f"{host}:{count}" for host, count in counts.items())


PBS = Engine(key="pbs", title="PBS", slots=_slots)
