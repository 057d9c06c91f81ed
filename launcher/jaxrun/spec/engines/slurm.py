"""Slurm: the variables of its tasks, how a step ends, and srun's words.

srun's command line is made in spec/backends/srun.py, because each agent of a Slurm job imports this file, and plans
nothing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from jaxrun.errors import UsageError
from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.protocol.agent_id import AgentId
from jaxrun.spec.engines.engine import CancelCommand, CommandLines, Engine, Environ, LaunchOutput, RankVariables
from jaxrun.text import parse_ranks

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # steps from here on are salloc's shell, the batch script and the like
_BATCH_SCRIPT = lazy_pattern(r"slurmstepd: \[[^\]]*\.batch\]")  # Slurm's daemon, the parent of a batch script
# "srun: error: h2: tasks 1-2,5: Exited with exit code 69"
_FAILED_TASKS = lazy_pattern(r"(?m)^srun: error: (\S+): tasks? ([0-9,-]+): Exited with exit code")
_NO_REASON = lazy_pattern(r"srun: |slurmstepd\S*: error: \*\*\* |\s*$")  # a line that does not say why a task failed


def _launch_id(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def _is_task_of_step(environ: Environ) -> bool:
    """Whether this is a task of a Slurm step, and not a batch script that was submitted from inside a step."""
    step = environ.get("SLURM_STEP_ID", "")
    same = environ.get("SLURM_NTASKS") == environ["SLURM_STEP_NUM_TASKS"]
    return same and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _is_in_batch_script(command_lines: CommandLines) -> bool:
    """Whether this is a batch script, or runs below one: if submitted inside a step, it has the step's variables."""
    return any(_BATCH_SCRIPT.match(argv[0]) for argv in command_lines if argv)


def _refuse_heterogeneous(environ: Environ) -> None:
    groups = environ.get("SLURM_HET_SIZE", "1")
    if groups not in ("", "0", "1"):
        raise UsageError(
            f"Slurm's job {environ.get('SLURM_JOB_ID', '?')} is heterogeneous (SLURM_HET_SIZE={groups}), and jaxrun "
            "needs hosts that are alike; ask for one group of hosts, without ':' on Slurm's command line"
        )


def _hint(environ: Environ) -> str:
    if "SLURM_JOB_ID" not in environ:
        return ""
    return (
        f"This is Slurm job {environ['SLURM_JOB_ID']}, but a batch script or a shell, not a task of a step; "
        "prepend srun: srun jaxrun attach PROGRAM"
    )


def _mpi_launcher(hosts: Sequence[str], environ: Environ) -> str:
    """Return "slurm" in a Slurm job, where ssh may be forbidden, unless srun would reorder the hosts."""
    from jaxrun.spec.backends.slurm_allocation import expand_node_list

    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return ""
    used = dict.fromkeys(hosts)
    return "slurm" if list(used) == [node for node in expand_node_list(nodes) if node in used] else "ssh"


def _mpi_env(environ: Environ) -> dict[str, str]:
    """Return the variables without which the srun of mpirun's daemons waits forever for hosts that have a step."""
    return {"SLURM_OVERLAP": "1"} if "SLURM_JOB_ID" in environ else {}


def _read_output(text: str) -> LaunchOutput:
    failed, lines = _FAILED_TASKS.findall(text), text.splitlines()
    numbers = [part for _, tasks in failed for part in parse_ranks(tasks, "srun's tasks")]
    is_unexplained = failed and all(map(_NO_REASON.match, lines))
    hint = _describe_lost_reason(failed[0][0]) if is_unexplained else ""
    return LaunchOutput(lines, frozenset(AgentId(number) for part in numbers for number in part), hint=hint)


def _describe_lost_reason(host: str) -> str:
    """Return how to see why a task failed there: srun may lose a task's last words (seen with Slurm 22.05)."""
    command = ("srun", "-N1", "-n1", "-w", host, sys.executable, "-c", "import jaxrun")
    return f"{host} has not said why, or srun has lost it; to see it, type in this job: {shlex.join(command)}"


SLURM = Engine(
    key="slurm",
    title="Slurm",
    command="srun",
    ranks=RankVariables(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        markers=("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),  # a batch script has SLURM_PROCID=0, too, but no step
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        applies=_is_task_of_step,
        inherited=_is_in_batch_script,
        check=_refuse_heterogeneous,
        hint=_hint,
    ),
    mpi_launcher=_mpi_launcher,
    mpi_env=_mpi_env,
    passes_stdin=True,
    read_output=_read_output,
    cancel=CancelCommand(
        ("scancel", "--signal=KILL"), "Slurm's step", _launch_id, too_late=("already complet", "Invalid job id")
    ),
)
