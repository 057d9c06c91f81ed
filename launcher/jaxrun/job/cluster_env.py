"""Which rank of which job this process is, by the variables of whatever started it: one table, tried in one order.

An agent that jaxrun has started is told which engine's variables to read. Only `jaxrun attach` detects. In the table,
an engine stands before those whose variables its processes may inherit: Slurm is last, as mpirun's daemons are tasks of
a step of their own there, and what they start finds the numbers of that step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.protocol.names import RESERVED_PREFIX
from jaxrun.text import format_columns

BY_OPTIONS = "by hand"  # the engine of a place that only --rank and --size tell

_OWN_RANK = f"{RESERVED_PREFIX}RANK"
_OWN_SIZE = f"{RESERVED_PREFIX}SIZE"
_NUMBER = re.compile(r"[0-9]{1,9}")
_FIRST_SPECIAL_STEP = (
    0xFFFFFFF0  # above it are the shell of salloc, the batch script and the like: no steps of anybody's job
)
_CONTROL_PORT = "--control-port"


def _always_applies(environ: Mapping[str, str]) -> bool:
    return True


def _is_task_of_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a step; a script that was submitted inside of one inherits the names of that one."""
    step = environ.get("SLURM_STEP_ID", "")
    same = environ.get("SLURM_NTASKS") == environ["SLURM_STEP_NUM_TASKS"]
    return same and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


@dataclass(frozen=True, slots=True)
class ClusterEnv:
    """What starts processes, and by which variables they know it.

    rank, size:  the variables of the numbers
    job:         variables whose values together are alike in all ranks of a job, and differ between jobs
    signs:       what must be set besides the rank, to tell its processes from others
    holds:       whether all these, where they are set, are meant for this process
    """

    key: str
    title: str
    rank_variable: str
    size_variable: str
    job_variables: tuple[str, ...]
    marker_variables: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, str]], bool] = _always_applies


CLUSTER_ENVS = (
    ClusterEnv(
        "open-mpi", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", job_variables=("PMIX_NAMESPACE",)
    ),
    # srun --mpi=pmi2 and Flux set PMI_RANK too, but not the local one.
    ClusterEnv(
        "hydra",
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        marker_variables=("MPI_LOCALRANKID",),
        job_variables=("I_MPI_HYDRA_UUID",),
    ),
    ClusterEnv(
        "mvapich", "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", job_variables=("MPIRUN_HOST", "MPIRUN_ID")
    ),
    # Flux inside of a job of PALS hands the variables of PALS to its own tasks.
    ClusterEnv("flux", "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", job_variables=("FLUX_JOB_ID",)),
    # srun --mpi=cray_shasta sets PALS_RANKID too, but no size.
    ClusterEnv(
        "pals",
        "PALS (HPE Cray)",
        "PALS_RANKID",
        "PMI_SIZE",
        marker_variables=("PMI_SIZE",),
        job_variables=("PALS_APID",),
    ),
    # A batch script has SLURM_PROCID=0 as well, but no step.
    ClusterEnv(
        "slurm",
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        marker_variables=("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
        job_variables=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        applies=_is_task_of_step,
    ),
)
_BY_KEY = {engine.key: engine for engine in CLUSTER_ENVS}


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One process among those of its job; `job` tells this job from others, and is empty where nothing does."""

    engine: str
    rank: int
    size: int
    job_key: str = ""


def read_rank_info(key: str, environ: Mapping[str, str]) -> RankInfo:
    """The place by the variables of one engine. UnavailableError names one that is missing or wrong."""
    if key not in _BY_KEY:
        raise ProtocolError(f"there is no engine {key!r}; known are {', '.join(_BY_KEY)}")
    return _rank_info(_BY_KEY[key], environ, ())


def find_rank_info(environ: Mapping[str, str], ancestors: Iterable[Sequence[str]] = ()) -> RankInfo | None:
    """The place by the first engine whose variables are there; None without any.

    `ancestors` are the command lines of the processes above this one, the parent first: MPICH names its job only there.
    UsageError in a process of jaxrun's own; UnavailableError where the numbers make no sense.
    """
    if _OWN_RANK in environ:
        which = f"rank {environ[_OWN_RANK]} of {environ.get(_OWN_SIZE, '?')}"
        raise UsageError(
            f"this process is already {which} of a jaxrun job ({_OWN_RANK} is set), and cannot attach to another; "
            "run the program itself, without jaxrun attach"
        )
    for engine in CLUSTER_ENVS:
        if all(name in environ for name in (engine.rank_variable, *engine.marker_variables)) and engine.applies(
            environ
        ):
            return _rank_info(engine, environ, ancestors)
    return None


def detect_rank_info(environ: Mapping[str, str], ancestors: Iterable[Sequence[str]] = ()) -> RankInfo:
    """The place, as `find` does it. UsageError says what was looked for, and how to do without."""
    place = find_rank_info(environ, ancestors)
    if place is None:
        raise UsageError(_nothing_found_message(environ))
    return place


def combine_with_options(place: RankInfo | None, rank: int | None, size: int | None) -> RankInfo:
    """The place with --rank and --size, as far as they are given. UsageError where they contradict it or do not do."""
    if place is None:
        return _from_options(rank, size)
    engine = _BY_KEY[place.engine]
    for option, name, given, found in (
        ("--rank", engine.rank_variable, rank, place.rank),
        ("--size", engine.size_variable, size, place.size),
    ):
        if given is not None and given != found:
            raise UsageError(
                f"{option} {given} contradicts {name}={found}, by which {engine.title} has started this process; "
                f"leave {option} out, or hide the variable: env -u {engine.rank_variable} jaxrun attach ..."
            )
    return place


def _from_options(rank: int | None, size: int | None) -> RankInfo:
    if rank is None or size is None:
        given = f"--rank {rank}" if rank is not None else f"--size {size}" if size is not None else "neither"
        raise UsageError(f"a process that mpirun or srun did not start needs --rank and --size; given is {given}")
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} is not in a job of --size {size}; ranks are 0 to --size less 1")
    return RankInfo(BY_OPTIONS, rank, size)


def _rank_info(engine: ClusterEnv, environ: Mapping[str, str], ancestors: Iterable[Sequence[str]]) -> RankInfo:
    if engine.key == "slurm":
        _refuse_heterogeneous(environ)
    rank, size = (
        _read_number(engine, engine.rank_variable, environ),
        _read_number(engine, engine.size_variable, environ),
    )
    if rank >= size:
        raise UnavailableError(
            f"{engine.title} has set {engine.rank_variable}={rank}, which is no rank in a job of "
            f"{engine.size_variable}={size}; look for what changes these variables before jaxrun is run"
        )
    parts = [environ.get(name) for name in engine.job_variables]
    job = ".".join(part or "0" for part in parts) if any(parts) else ""
    return RankInfo(engine.key, rank, size, job or (_control_port(ancestors) if engine.key == "hydra" else ""))


def _read_number(engine: ClusterEnv, name: str, environ: Mapping[str, str]) -> int:
    value = environ.get(name)
    if value is not None and _NUMBER.fullmatch(value):
        return int(value)
    received = f"{name} is not set" if value is None else f"{name}={value!r} is no whole number"
    raise UnavailableError(
        f"{received}, but {engine.title} tells its processes their place by it; "
        f"was this process started by {engine.title}, and is its environment passed on?"
    )


def _refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    groups = environ.get("SLURM_HET_SIZE", "1")
    if groups not in ("", "0", "1"):
        raise UsageError(
            f"Slurm's job {environ.get('SLURM_JOB_ID', '?')} is heterogeneous (SLURM_HET_SIZE={groups}), and jaxrun "
            "needs hosts that are alike; ask for one group of hosts, without ':' on Slurm's command line"
        )


def _control_port(ancestors: Iterable[Sequence[str]]) -> str:
    """Where MPICH's mpiexec listens, "h1:46095": all proxies of a job have it on their command lines."""
    for argv in ancestors:
        for word, value in pairwise(argv):
            if word == _CONTROL_PORT:
                return value
    return ""


def _nothing_found_message(environ: Mapping[str, str]) -> str:
    looked_for = format_columns(
        [(f"  {engine.title}", ", ".join((engine.rank_variable, *engine.marker_variables))) for engine in CLUSTER_ENVS]
    )
    lines = ["nothing says which rank this process is; looked for the variables of", *looked_for]
    if "SLURM_JOB_ID" in environ:
        lines.append(
            f"In Slurm's job {environ['SLURM_JOB_ID']}, but in a batch script or a shell and not in a task of a step; "
            "put srun in front: srun jaxrun attach PROGRAM"
        )
    lines.append("Start it with mpirun or srun: mpirun -n 8 jaxrun attach PROGRAM")
    lines.append("or say it by hand: jaxrun attach --rank 3 --size 8 --head host:port PROGRAM")
    return "\n".join(lines)
