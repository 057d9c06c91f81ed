"""Reads a process's rank from the variables of the mpirun or srun that started it: one table, tried in order.

jaxrun tells the agents that it starts which entry to read; only `jaxrun attach` detects the entry. Each entry stands
before the entries whose variables its processes may inherit. Slurm is last: mpirun's daemons are tasks of a Slurm step
of their own, and the processes that they start inherit that step's numbers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.protocol.names import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, RANK, SIZE
from jaxrun.text import format_columns

BY_OPTIONS = "by hand"  # the engine of a rank that is given by --rank and --size alone

_NUMBER = re.compile(r"[0-9]{1,9}")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # steps from here on are salloc's shell, the batch script and the like
_CONTROL_PORT = "--control-port"
_BATCH_SCRIPT = re.compile(r"slurmstepd: \[[^\]]*\.batch\]")  # Slurm's daemon, the parent of a batch script


def _launch_id_of_slurm(environ: Mapping[str, str]) -> str:
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def _is_task_of_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a Slurm step, and not a batch script that was submitted from inside a step."""
    step = environ.get("SLURM_STEP_ID", "")
    same = environ.get("SLURM_NTASKS") == environ["SLURM_STEP_NUM_TASKS"]
    return same and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


class CancelCommand(Struct, frozen=True):
    """Ends all processes that an engine has started together, when its launch command can no longer do so.

    argv:      the command, to which the launch id reported by an agent is appended
    title:     what people call the thing it ends, in front of the launch id: "Slurm's step"
    too_late:  texts of its errors that say that these processes have ended already
    """

    argv: tuple[str, ...]
    title: str
    too_late: tuple[str, ...] = ()


class ClusterEnv(Struct, frozen=True):
    """An engine (`key`) that starts processes, and the variables by which they know their rank.

    command:  what people type to start processes, to which they add -n; empty if they type nothing
    rank_variable, size_variable:  the variables with the numbers
    job_variables:     variables whose values together are the same in all ranks of a job, and differ between jobs
    marker_variables:  variables besides the rank that must be set, to distinguish the engine's processes from others
    head_variable:     the variable with "host:port" on rank 0's host; empty if there is none
    applies:           whether these variables, if set, are meant for this process
    launch_id:         the engine's name for the processes it started together; empty if no command accepts one
    cancel:            the command that accepts it; None if the engine has none
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
        """Whether this engine started the process with the environment `environ`."""
        return all(name in environ for name in (self.rank_variable, *self.marker_variables)) and self.applies(environ)


CLUSTER_ENVS = (
    ClusterEnv("open-mpi", "Open MPI", "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
    # srun --mpi=pmi2 and Flux set PMI_RANK, too, but not the local rank.
    ClusterEnv(
        "hydra", "MPICH or Intel MPI", "mpirun", "PMI_RANK", "PMI_SIZE", ("I_MPI_HYDRA_UUID",), ("MPI_LOCALRANKID",)
    ),
    ClusterEnv(
        "mvapich", "MVAPICH", "mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MPIRUN_HOST", "MPIRUN_ID")
    ),
    # Flux inside a PALS job passes the variables of PALS on to its own tasks.
    ClusterEnv("flux", "Flux", "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_JOB_ID",)),
    # srun --mpi=cray_shasta sets PALS_RANKID, too, but no size.
    ClusterEnv("pals", "PALS (HPE Cray)", "mpiexec", "PALS_RANKID", "PMI_SIZE", ("PALS_APID",), ("PMI_SIZE",)),
    # A batch script has SLURM_PROCID=0, too, but no step.
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
    # Pods with one process each. Processes started inside inherit the pod's variables.
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


class RankInfo(Struct, frozen=True):
    """The rank of one process.

    job_key:  distinguishes its job from others; empty if nothing does
    head:     "host:port" on rank 0's host; empty if the engine names none
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

    `ancestors` are the command lines of the processes above this one, the parent first; only they name a job of MPICH.
    Raises UsageError in a process that jaxrun has started, and UnavailableError if the numbers make no sense.
    """
    if RANK in environ:
        which = f"rank {environ[RANK]} of {environ.get(SIZE, '?')}"
        raise UsageError(
            f"this process is already {which} of a jaxrun job ({RANK} is set), and cannot attach to another; "
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

    Processes of a jaxrun job inherit such variables, but may start jobs. `words` are the words after `jaxrun`;
    `ancestors` returns the command lines that `find_rank_info` needs.
    """
    if RANK in environ or not any(engine.is_set(environ) for engine in CLUSTER_ENVS):
        return
    try:
        found = find_rank_info(environ, ancestors())
    except (UnavailableError, UsageError):  # broken variables do not forbid starting a job
        return
    if found is None or found.size == 1:
        return
    engine = _BY_KEY[found.engine]
    typed, prefix = shlex.join(words), f"{engine.command} -n {found.size} " if engine.command else ""
    raise UsageError(
        f"{engine.title} has started this process as number {found.rank} of {found.size} "
        f"({engine.rank_variable}={found.rank}), and each would run a job of its own. For one job of all, type: "
        f"{prefix}jaxrun attach {typed}. For a job in each, give its number of processes: {prefix}jaxrun -n 1 {typed}"
    )


def _is_in_batch_script(ancestors: Iterable[Sequence[str]]) -> bool:
    """Whether this is a batch script, or runs below one: if submitted inside a step, it has the step's variables."""
    return any(_BATCH_SCRIPT.match(argv[0]) for argv in ancestors if argv)


def starts_all_processes(engine: str) -> bool:
    """Whether one command of this engine (a `key`) starts all processes of a job, and ends with a status of theirs."""
    return any(known.key == engine and known.command for known in CLUSTER_ENVS)


def cancel_command(engine: str) -> CancelCommand | None:
    """Return the command that ends all processes that this engine (a `key`) started together; None if it has none."""
    return _BY_KEY[engine].cancel if engine in _BY_KEY else None


def launch_id(environ: Mapping[str, str]) -> str:
    """Return the engine's name for the processes that it started together with this one: Slurm's step, "12.0".

    Empty if no command accepts such a name.
    """
    return next((found for each in CLUSTER_ENVS if each.is_set(environ) and (found := each.launch_id(environ))), "")


def starts_ranks_again(engine: str) -> bool:
    """Whether what has started a rank can start one rank alone again, while the others run: a person, or a cluster."""
    return engine == BY_OPTIONS or bool(_BY_KEY[engine].head_variable)


def detect_rank_info(
    environ: Mapping[str, str],
    ancestors: Iterable[Sequence[str]] = (),
    rank: int | None = None,
    size: int | None = None,
) -> RankInfo:
    """Do what `find_rank_info` does, and take --rank and --size into account.

    Raises UsageError if they contradict what was found, or are incomplete. If they are not given and nothing was found,
    the error lists what was searched for.
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
                f"{option} {given} contradicts {variable}={value}, with which {engine.title} started this process; "
                f"leave {option} out, or hide the variable: env -u {engine.rank_variable} jaxrun attach ..."
            )
    return found


def _from_options(rank: int | None, size: int | None) -> RankInfo:
    if rank is None or size is None:
        given = f"--rank {rank}" if rank is not None else f"--size {size}"
        raise UsageError(f"a process that mpirun or srun did not start needs --rank and --size; only {given} is given")
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} is not a rank of a job of --size {size}; its ranks are 0 to {size - 1}")
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
        f"{received}, but {engine.title} stores the ranks of its processes there; "
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
    """Return where MPICH's mpiexec listens, "h1:46095", as the command lines of a job's proxies show it."""
    for argv in ancestors:
        for word, value in pairwise(argv):
            if word == _CONTROL_PORT:
                return value
    return ""


def _describe_half_set(engine: ClusterEnv, environ: Mapping[str, str]) -> str:
    """Return which variables of a pod are missing where others of the same engine are set; empty if none is set."""
    names = (engine.rank_variable, *engine.marker_variables)
    there = [name for name in names if name in environ]
    lacking = [name for name in names if name not in environ]
    verb = "is" if len(lacking) == 1 else "are"
    return f"{engine.title} sets {' and '.join(there)}, but {' and '.join(lacking)} {verb} not set" if there else ""


def _nothing_found_message(environ: Mapping[str, str]) -> str:
    rows = [(f"  {env.title}", ", ".join((env.rank_variable, *env.marker_variables))) for env in CLUSTER_ENVS]
    lines = ["nothing says which rank this process is; looked for the variables of", *format_columns(rows)]
    lines += filter(None, (_describe_half_set(each, environ) for each in CLUSTER_ENVS if each.head_variable))
    if "SLURM_JOB_ID" in environ:
        lines.append(
            f"This is Slurm job {environ['SLURM_JOB_ID']}, but a batch script or a shell, not a task of a step; "
            "prepend srun: srun jaxrun attach PROGRAM"
        )
    lines.append("Start it with mpirun or srun: mpirun -n 8 jaxrun attach PROGRAM")
    lines.append("or give its rank: jaxrun attach --rank 3 --size 8 --head host:port PROGRAM")
    return "\n".join(lines)
