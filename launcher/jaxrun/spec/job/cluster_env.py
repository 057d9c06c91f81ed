"""Reads a process's rank from the variables of the mpirun or srun that started it: one table, tried in one order.

An agent that jaxrun has started is told which entry to read; only `jaxrun attach` detects it. An entry stands before
those whose variables its processes may inherit. Slurm is last: mpirun's daemons are tasks of a Slurm step of their own,
and what they start inherits the numbers of that step.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.protocol.names import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, RESERVED_PREFIX
from jaxrun.text import format_columns

BY_OPTIONS = "by hand"  # the engine of a rank that only --rank and --size tell

_OWN_RANK = f"{RESERVED_PREFIX}RANK"
_OWN_SIZE = f"{RESERVED_PREFIX}SIZE"
_NUMBER = re.compile(r"[0-9]{1,9}")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on: salloc's shell, the batch script and the like, no steps of a job
_CONTROL_PORT = "--control-port"
_BATCH_SCRIPT = re.compile(r"slurmstepd: \[[^\]]*\.batch\]")  # the daemon above a batch script


def _launch_id_of_slurm(environ: Mapping[str, str]) -> str:
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def _is_task_of_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a Slurm step, and not a batch script that was submitted inside of one."""
    step = environ.get("SLURM_STEP_ID", "")
    same = environ.get("SLURM_NTASKS") == environ["SLURM_STEP_NUM_TASKS"]
    return same and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Ends all processes that an engine has started together, where the launch command cannot do that any more.

    argv:      the command; the launch id that an agent has reported follows
    title:     how people call what it ends, in front of the launch id: "Slurm's step"
    too_late:  texts of its errors that say that these processes have ended already
    """

    argv: tuple[str, ...]
    title: str
    too_late: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterEnv:
    """What starts processes (the engine `key`), and the variables by which they know their rank.

    command:  what people type to start processes, to which they add -n; empty where they type nothing
    rank_variable, size_variable:  the variables of the numbers
    job_variables:     variables whose values together are alike in all ranks of a job, and differ between jobs
    marker_variables:  what must be set besides the rank, to tell the engine's processes from those of others
    head_variable:     the variable that has "host:port", on the host of rank 0; empty where there is none
    applies:           whether these variables, where they are set, are meant for this process
    launch_id:         how the engine calls the processes that it started together; empty where no command takes that
    cancel:            the command that takes it; None where the engine has none
    """

    key: str
    title: str
    command: str
    rank_variable: str
    size_variable: str
    job_variables: tuple[str, ...]
    marker_variables: tuple[str, ...] = ()
    head_variable: str = ""
    applies: Callable[[Mapping[str, str]], bool] = lambda environ: True
    launch_id: Callable[[Mapping[str, str]], str] = lambda environ: ""
    cancel: CancelCommand | None = None

    def is_set(self, environ: Mapping[str, str]) -> bool:
        """Whether this engine has started the process whose environment is `environ`."""
        return all(name in environ for name in (self.rank_variable, *self.marker_variables)) and self.applies(environ)


CLUSTER_ENVS = (
    ClusterEnv("open-mpi", "Open MPI", "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
    # srun --mpi=pmi2 and Flux set PMI_RANK too, but not the local one.
    ClusterEnv(
        "hydra", "MPICH or Intel MPI", "mpirun", "PMI_RANK", "PMI_SIZE", ("I_MPI_HYDRA_UUID",), ("MPI_LOCALRANKID",)
    ),
    ClusterEnv(
        "mvapich", "MVAPICH", "mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MPIRUN_HOST", "MPIRUN_ID")
    ),
    # Flux inside of a job of PALS hands the variables of PALS to its own tasks.
    ClusterEnv("flux", "Flux", "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_JOB_ID",)),
    # srun --mpi=cray_shasta sets PALS_RANKID too, but no size.
    ClusterEnv("pals", "PALS (HPE Cray)", "mpiexec", "PALS_RANKID", "PMI_SIZE", ("PALS_APID",), ("PMI_SIZE",)),
    # A batch script has SLURM_PROCID=0 as well, but no step.
    ClusterEnv(
        "slurm",
        "Slurm",
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        job_variables=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        marker_variables=("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
        applies=_is_task_of_step,
        launch_id=_launch_id_of_slurm,
        cancel=CancelCommand(
            ("scancel", "--signal=KILL"), "Slurm's step", too_late=("already complet", "Invalid job id")
        ),
    ),
    # Pods that are a process each. What is started within one inherits its variables.
    ClusterEnv(
        "kubeflow",
        "Kubeflow Trainer's JAX runtime",
        "",
        PROCESS_ID,
        NUM_PROCESSES,
        (COORDINATOR_ADDRESS,),
        (NUM_PROCESSES, COORDINATOR_ADDRESS),
        COORDINATOR_ADDRESS,
    ),
    ClusterEnv(
        "axlearn",
        "AXLearn",
        "",
        "PROCESS_ID",
        "NUM_PROCESSES",
        ("DISTRIBUTED_COORDINATOR",),
        ("NUM_PROCESSES", "DISTRIBUTED_COORDINATOR"),
        "DISTRIBUTED_COORDINATOR",
    ),
)
_BY_KEY = {engine.key: engine for engine in CLUSTER_ENVS}


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of one process.

    job_key:  tells its job from others; empty where nothing does
    head:     "host:port" on the host of rank 0; empty if the engine names none
    """

    engine: str
    rank: int
    size: int
    job_key: str = ""
    head: str = ""


def read_rank_info(key: str, environ: Mapping[str, str]) -> RankInfo:
    """Read the rank from the variables of one engine. Raises UnavailableError that names a wrong variable."""
    if key not in _BY_KEY:
        raise ProtocolError(f"there is no engine {key!r}; known are {', '.join(_BY_KEY)}")
    return _rank_info(_BY_KEY[key], environ, ())


def find_rank_info(environ: Mapping[str, str], ancestors: Iterable[Sequence[str]] = ()) -> RankInfo | None:
    """Read the rank from the variables of the first engine that has set any; None if none has.

    `ancestors` are the command lines of the processes above this one, the parent first: MPICH names its job only there.
    Raises UsageError in a process that jaxrun has started, UnavailableError where the numbers make no sense.
    """
    if _OWN_RANK in environ:
        which = f"rank {environ[_OWN_RANK]} of {environ.get(_OWN_SIZE, '?')}"
        raise UsageError(
            f"this process is already {which} of a jaxrun job ({_OWN_RANK} is set), and cannot attach to another; "
            "run the program itself, without jaxrun attach"
        )
    engine = next((engine for engine in CLUSTER_ENVS if engine.is_set(environ)), None)
    if engine is None or (engine.key == "slurm" and _is_in_batch_script(ancestors)):
        return None
    return _rank_info(engine, environ, ancestors)


def refuse_task_of_several(
    environ: Mapping[str, str], ancestors: Callable[[], Sequence[Sequence[str]]], words: Sequence[str]
) -> None:
    """Raise UsageError in one of several processes that mpirun or srun has started, each of which would run a job.

    The processes of a job of jaxrun inherit such variables, and may start jobs. `words` follow `jaxrun`, and
    `ancestors` returns what `find_rank_info` takes.
    """
    if _OWN_RANK in environ or not any(engine.is_set(environ) for engine in CLUSTER_ENVS):
        return
    try:
        found = find_rank_info(environ, ancestors())
    except (UnavailableError, UsageError):  # variables that make no sense are no reason to start nothing
        return
    if found is None or found.size == 1:
        return
    engine = _BY_KEY[found.engine]
    typed, prefix = shlex.join(words), f"{engine.command} -n {found.size} " if engine.command else ""
    raise UsageError(
        f"{engine.title} has started this process as number {found.rank} of {found.size} "
        f"({engine.rank_variable}={found.rank}), and each would run a job of its own. For one job of all, type: "
        f"{prefix}jaxrun attach {typed}. If each is to run one, say of how many processes: {prefix}jaxrun -n 1 {typed}"
    )


def _is_in_batch_script(ancestors: Iterable[Sequence[str]]) -> bool:
    """Whether this is a batch script, or runs below it: one that was submitted inside of a step has its variables."""
    return any(_BATCH_SCRIPT.match(argv[0]) for argv in ancestors if argv)


def cancel_command(engine: str) -> CancelCommand | None:
    """Return what ends all processes that this engine (a `key`) started together; None where it has no command."""
    return _BY_KEY[engine].cancel if engine in _BY_KEY else None


def launch_id(environ: Mapping[str, str]) -> str:
    """Return how the engine calls the processes that it started together with this one: Slurm's step, "12.0".

    Empty where no command takes that.
    """
    return next((found for each in CLUSTER_ENVS if each.is_set(environ) and (found := each.launch_id(environ))), "")


def detect_rank_info(
    environ: Mapping[str, str],
    ancestors: Iterable[Sequence[str]] = (),
    rank: int | None = None,
    size: int | None = None,
) -> RankInfo:
    """Do what `find_rank_info` does, with what --rank and --size say.

    Raises UsageError where these contradict what was found or are not enough; where they are not given, and nothing was
    found, it says what was looked for.
    """
    found = find_rank_info(environ, ancestors)
    if found is None and rank is None and size is None:
        raise UsageError(_nothing_found_message(environ))
    if found is None:
        return _from_options(rank, size)
    engine = _BY_KEY[found.engine]
    for option, variable, given, value in (
        ("--rank", engine.rank_variable, rank, found.rank),
        ("--size", engine.size_variable, size, found.size),
    ):
        if given is not None and given != value:
            raise UsageError(
                f"{option} {given} contradicts {variable}={value}, by which {engine.title} has started this process; "
                f"leave {option} out, or hide the variable: env -u {engine.rank_variable} jaxrun attach ..."
            )
    return found


def _from_options(rank: int | None, size: int | None) -> RankInfo:
    if rank is None or size is None:
        given = f"--rank {rank}" if rank is not None else f"--size {size}"
        raise UsageError(f"a process that mpirun or srun did not start needs --rank and --size; only {given} is given")
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} is not in a job of --size {size}, whose ranks are 0 to {size - 1}")
    return RankInfo(BY_OPTIONS, rank, size)


def _rank_info(engine: ClusterEnv, environ: Mapping[str, str], ancestors: Iterable[Sequence[str]]) -> RankInfo:
    if engine.key == "slurm":
        _refuse_heterogeneous(environ)
    rank = _read_number(engine, engine.rank_variable, environ)
    size = _read_number(engine, engine.size_variable, environ)
    if rank >= size:
        raise UnavailableError(
            f"{engine.title} has set {engine.rank_variable}={rank}, which is not a rank of a job of "
            f"{engine.size_variable}={size}; find out what changes these variables before jaxrun starts"
        )
    parts = [environ.get(name) for name in engine.job_variables]
    job = ".".join(part or "0" for part in parts) if any(parts) else ""
    job = job or (_control_port(ancestors) if engine.key == "hydra" else "")
    return RankInfo(engine.key, rank, size, job, environ.get(engine.head_variable, ""))


def _read_number(engine: ClusterEnv, name: str, environ: Mapping[str, str]) -> int:
    value = environ.get(name)
    if value is not None and _NUMBER.fullmatch(value):
        return int(value)
    received = f"{name} is not set" if value is None else f"{name}={value!r} is not a whole number"
    raise UnavailableError(
        f"{received}, but {engine.title} gives its processes their ranks in it; "
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
    """Return where MPICH's mpiexec listens, "h1:46095", which all proxies of a job have on their command lines."""
    for argv in ancestors:
        for word, value in pairwise(argv):
            if word == _CONTROL_PORT:
                return value
    return ""


def _nothing_found_message(environ: Mapping[str, str]) -> str:
    rows = [(f"  {env.title}", ", ".join((env.rank_variable, *env.marker_variables))) for env in CLUSTER_ENVS]
    lines = ["nothing says which rank this process is; looked for the variables of", *format_columns(rows)]
    if "SLURM_JOB_ID" in environ:
        lines.append(
            f"In Slurm's job {environ['SLURM_JOB_ID']}, but in a batch script or a shell and not in a task of a step; "
            "put srun in front: srun jaxrun attach PROGRAM"
        )
    lines.append("Start it with mpirun or srun: mpirun -n 8 jaxrun attach PROGRAM")
    lines.append("or say it by hand: jaxrun attach --rank 3 --size 8 --head host:port PROGRAM")
    return "\n".join(lines)
