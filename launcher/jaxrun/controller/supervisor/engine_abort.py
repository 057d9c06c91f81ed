"""Has an engine end all that it has started, where agents do not end by themselves as they, or their hosts, hang.

Open MPI does so as soon as one process ends with an error; MPICH and Slurm wait for the last one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from jaxrun.spec.job.cluster_env import slurm_step

_SCANCEL_TIMEOUT_S = 10.0
_ABORT_WAIT_S = 2.0  # for the engine to end this process as well


def abort_job(engine: str, exit_code: int, environ: Mapping[str, str]) -> str:
    """Have the engine to which this process is attached kill all processes of its job, this one too.

    Returns what the user is to be told, if anything, where it does not. `engine` is a key of job/cluster_env.py.
    """
    if engine == "slurm":
        return cancel_step(slurm_step(environ))
    if environ.get("PMI_FD", "").isdecimal():  # as MPI_Abort does, by the wire protocol of PMI-1
        try:
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % exit_code)
        except OSError:
            return ""
        time.sleep(_ABORT_WAIT_S)
    return ""


def cancel_step(step: str) -> str:
    """Have Slurm kill a step; returns what the user is to be told where it cannot."""
    import subprocess  # takes 5 ms, and is hardly ever needed

    if not step:
        return ""
    command = ["scancel", "--signal=KILL", step]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCANCEL_TIMEOUT_S, errors="replace")
        failure = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if not failure or "already complet" in failure or "Invalid job id" in failure:
        return ""
    return f"Slurm's step {step} may still run on other hosts ({failure}); end it with: {' '.join(command)}"
