"""Grid Engine: the hosts and slots of a job, which mpirun or ssh is told; its jobs are in backends/grid_engine_job.py.

Tried with 8.1.9: agents are started by `qrsh -inherit`, whose processes belong to the job, so Grid Engine ends them
with it, and ends the whole job if one of them is killed.
"""

from __future__ import annotations

from jaxrun.errors import UsageError
from jaxrun.spec.engines.engine import Engine, Environ, read_starter_output

HOSTFILE = "PE_HOSTFILE"  # a file with lines such as "h1 4 all.q@h1 UNDEFINED"


def _slots(environ: Environ) -> str:
    """Return "h1:4,h2:4". Raises UsageError if the file of the job cannot be read, or makes no sense."""
    path = environ.get(HOSTFILE, "")
    if not path:
        return ""
    lines = read_lines(HOSTFILE, path)
    rows = [line.split() for line in lines]
    if not rows or not all(len(row) >= 2 and row[1].isdecimal() and int(row[1]) for row in rows):
        raise UsageError(f"{HOSTFILE}={path} has {lines[:3]!r}, not lines such as 'h1 4 all.q@h1 UNDEFINED'; give -H")
    return ",".join(f"{row[0]}:{row[1]}" for row in rows)


def read_lines(variable: str, path: str) -> list[str]:
    """Return the lines of the file in which a scheduler names a job's hosts. Raises UsageError."""
    try:
        with open(path, encoding="utf-8") as file:
            return [line for line in file.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{variable}={path} cannot be read ({why}): start jaxrun on the host of the job's script, or give -H"
        ) from None


GRID_ENGINE = Engine(
    key="sge", title="Grid Engine", slots=_slots, explains_itself=True, read_output=read_starter_output
)
