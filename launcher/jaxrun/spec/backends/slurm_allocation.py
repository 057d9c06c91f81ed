"""The Slurm allocation of this process, read from the environment, and the layout of tasks that srun would choose.

Only variables of the whole job are used. In a step (`srun --pty bash`, or salloc's own shell at sites where that is a
step), SLURM_NNODES, SLURM_NODELIST and SLURM_TASKS_PER_NODE describe the step, and in a batch script SLURM_PROCID
means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.errors import UsageError

_NODE = re.compile(r"(?:[A-Za-z0-9_.-]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([1-9][0-9]{0,5})\))?")
_MAX_NODES = 1 << 16  # Slurm's own limit; a longer list is a typing error


class Allocation(Struct, frozen=True):
    """A Slurm job.

    cpus:           the job's CPUs on each node, in the order of `nodes`
    tasks:          the number of tasks that the job requested; None if it requested none
    cpus_per_task:  the number that the job requested; None if it requested none, and within a step
    gpus:           GPUs of each node; None if no variable mentions any
    in_step:        whether this process is itself a task of a step of the job
    """

    job_id: str
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    tasks: int | None = None
    cpus_per_task: int | None = None
    gpus: int | None = None
    in_step: bool = False


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the allocation; None if there is none. Raises UsageError if no job can be started in it."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    if _number(environ, "SLURM_HET_SIZE", 1) > 1:
        raise UsageError(
            f"Slurm job {job_id} is heterogeneous (SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}), and srun gives each of "
            "its components ranks of their own; ask for one component: leave out ':' and '#SBATCH hetjob'"
        )
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"):
        if not environ.get(name):
            raise UsageError(
                f"SLURM_JOB_ID={job_id} is set, but {name} is not, so this shell is not inside the allocation; "
                f"enter it with: srun --jobid={job_id} --overlap --pty bash"
            )
    in_step = "SLURM_STEP_ID" in environ
    nodes = expand_node_list(environ["SLURM_JOB_NODELIST"])
    cpus = expand_counts(environ["SLURM_JOB_CPUS_PER_NODE"])
    if len(cpus) != len(nodes):
        raise UsageError(
            f"SLURM_JOB_NODELIST={environ['SLURM_JOB_NODELIST']} names {len(nodes)} nodes, but SLURM_JOB_CPUS_PER_NODE="
            f"{environ['SLURM_JOB_CPUS_PER_NODE']} counts {len(cpus)}; one of them is not Slurm's own value"
        )
    return Allocation(
        job_id=job_id,
        nodes=nodes,
        cpus=cpus,
        tasks=_tasks(environ, len(nodes)),
        cpus_per_task=None if in_step else _number(environ, "SLURM_CPUS_PER_TASK") or None,
        gpus=_gpus(environ, len(nodes)),
        in_step=in_step,
    )


def without_nodes(allocation: Allocation, left_out: Collection[str]) -> Allocation:
    """Return the allocation as if it had been made without these nodes."""
    kept = {node: cpus for node, cpus in zip(allocation.nodes, allocation.cpus, strict=True) if node not in left_out}
    tasks = allocation.tasks and allocation.tasks * len(kept) // len(allocation.nodes)
    return replace(allocation, nodes=tuple(kept), cpus=tuple(kept.values()), tasks=tasks)


def spread_tasks(processes: int, room: Sequence[int]) -> tuple[int, ...]:
    """Count the tasks of each node as srun's block distribution does: a round adds one to each node that has room.

    If no node has room, rounds continue anyway, as with srun --overcommit.
    """
    counts = [0] * len(room)
    crowded = False
    while (left := processes - sum(counts)) > 0:
        takers = [index for index, limit in enumerate(room) if crowded or counts[index] < limit]
        crowded = not takers
        for index in takers[:left]:
            counts[index] += 1
    return tuple(counts)


def _tasks(environ: Mapping[str, str], nodes: int) -> int | None:
    """Return SLURM_NTASKS, the requested number of tasks, unless it is the size of this process's step."""
    tasks = _number(environ, "SLURM_NTASKS")
    of_step = tasks == _number(environ, "SLURM_STEP_NUM_TASKS", -1)
    if tasks and not (of_step and _number(environ, "SLURM_STEP_NUM_NODES") < nodes):
        return tasks
    return _number(environ, "SLURM_NTASKS_PER_NODE") * nodes or None


def _gpus(environ: Mapping[str, str], nodes: int) -> int | None:
    """Return the GPUs of each node: the requested number, else this node's, else an equal share of all."""
    asked, total = (_count(environ.get(name, "")) for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS"))
    return asked or _number(environ, "SLURM_GPUS_ON_NODE") or total // nodes or None


def _count(text: str) -> int:
    """Return the sum of the numbers in a text such as "8", "a100:8" or "a100:4,v100:4"."""
    return sum(int(number) for number in re.findall(r"(?:^|:)([0-9]+)(?=,|$)", text))


def _number(environ: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    text = environ.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} is not a number, so Slurm did not set it; unset it")
    return int(text)


# ---- lists in Slurm's notation


def expand_node_list(text: str) -> tuple[str, ...]:
    """Expand Slurm's "rack[1-2]n[01-16],login1", the last bracket fastest. Raises UsageError for any other text."""
    nodes: list[str] = []
    for name in re.split(r",(?![^\[\]]*\])", text):
        if not _NODE.fullmatch(name):
            raise UsageError(f"{text!r} is not a list of Slurm nodes such as rack[1-2]n[01-16],login1: see {name!r}")
        parts = [
            _numbers(part[1:-1], text) if part[0] == "[" else [part] for part in re.findall(r"\[.*?\]|[^\[]+", name)
        ]
        if len(nodes) + prod(map(len, parts)) > _MAX_NODES:
            raise UsageError(f"{text!r} names more than {_MAX_NODES} nodes")
        nodes += map("".join, product(*parts))
    return tuple(nodes)


def _numbers(ranges: str, text: str) -> list[str]:
    """Expand "1,07-11" to 1, 07, 08, 09, 10, 11: each number as wide as the first of its range."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f"{text!r} is not a list of Slurm nodes: [{ranges}] needs numbers such as 1,3-5, see {part!r}"
            )
        span = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(numbers) + len(span) > _MAX_NODES:
            raise UsageError(f"{text!r} names more than {_MAX_NODES} nodes")
        numbers += [f"{number:0{len(match[1])}}" for number in span]
    return numbers


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand Slurm's "2(x3),1" to 2, 2, 2, 1. Raises UsageError for any other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise UsageError(f"{text!r} is not a list of counts by Slurm, such as 2(x3),1: see {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
