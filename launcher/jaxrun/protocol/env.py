"""The environment of a worker, and the environment of an agent on another host.

| variable                 | meaning                                                                    |
|--------------------------|----------------------------------------------------------------------------|
| JAXRUN_JOB_ID            | 32 hex digits, one per job; marks every process of it                       |
| JAXRUN_ATTEMPT           | number of the attempt, from 1; with --max-restarts there may be more |
| JAXRUN_RESTART_REASON    | why the previous attempt ended, in one line; empty in the first        |
| JAXRUN_RANK              | number of this process in the job, 0 … size-1: its `jax.process_index()`     |
| JAXRUN_SIZE              | processes in the job                                                       |
| JAXRUN_LOCAL_RANK        | number of this process on its host, 0 … local size-1                      |
| JAXRUN_LOCAL_SIZE        | processes on this host                                                     |
| JAXRUN_HOST              | the host's name in the job                                        |
| JAXRUN_SIMULATED_BOOT_ID | the boot id to show instead of the machine's; empty on a real host           |
| JAXRUN_LOCAL_DEVICE_IDS  | ordinals of the accelerators to take, "0,1"; empty for all                   |
| JAXRUN_CPUS              | the cores to stay on, "0,1"; empty for all                                  |
| JAXRUN_RUN_DIR           | where the job leaves its files; empty with --no-run-dir                      |
| JAXRUN_CHANNEL_FD        | the inherited socket to the agent (see worker_messages.py)                  |
| JAXRUN_STACKS_FD         | an inherited file into which the worker writes the stacks of its threads       |
| JAXRUN_FLIGHT_FD         | an inherited file that is the worker's flight recorder (see flight_file.py) |

and a variable for each field of settings.WorkerSettings, such as JAXRUN_LOCKSTEP. Before the program's first line, they
are removed from its environment, except those of PROGRAM_FIELDS. The secret of the ranks is never in the environment:
it travels over the channel (worker_messages.RankSecret).

An agent started by mpirun or srun finds, besides JAXRUN_JOB_ID and JAXRUN_INIT_TIMEOUT,

| JAXRUN_HEAD_ADDRESSES    | the addresses of the head, the first that answers and knows the token wins |
| JAXRUN_TOKEN             | the job's secret, shared by head and agents; no worker sees it |
| JAXRUN_ENGINE            | the engine whose variables hold its rank: "open-mpi", "mpich", "slurm" …                 |
| JAXRUN_STAYS             | whether it outlives the command that started it: True, False             |

With --stage, JAXRUN_STAGED has this host's copies (see staging_messages.py).
A program also finds JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as other launchers set them, and
with --torch-env also names.TORCH_VARIABLES, as torchrun sets them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from jaxrun.errors import ProtocolError
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import (
    COORDINATOR_ADDRESS,
    JOB_ID,
    NUM_PROCESSES,
    PROCESS_ID,
    RESERVED_PREFIX,
    TORCH_VARIABLES,
)
from jaxrun.protocol.settings import WorkerSettings

# At the first signal a worker writes the stacks of its threads to JAXRUN_STACKS_FD as soon as it has Python's GIL; at
# the second, which can crash some Pythons, at once. Before its Hello, either would kill it, like any real-time signal.
STACKS_SIGNAL = signal.SIGRTMIN + 7
FAULT_HANDLER_SIGNAL = signal.SIGRTMIN + 9
# The fields of WorkerEnv whose variables the program and its children see; they are listed in docs/environment.md.
PROGRAM_FIELDS = (
    *("job_id", "rank", "size", "local_rank", "local_size", "host", "run_dir", "attempt", "restart_reason"),
)
_NEVER_IN_VARIABLES = ("rank_token",)


class WorkerEnv(WorkerSettings, frozen=True, forbid_unknown_fields=True):
    """The settings of one worker at its start; the field `local_rank` travels as JAXRUN_LOCAL_RANK, and so on.

    Its descriptors are -1 until it is spawned.

    interrupts_blocked:  the program finds SIGINT blocked, as jaxrun or its agent did
    """

    hidden = frozenset({"rank_token"})

    job_id: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    channel_fd: int = -1
    stacks_fd: int = -1
    flight_fd: int = -1
    run_dir: str = ""
    simulated_boot_id: str = ""
    local_device_ids: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    attempt: int = 1
    restart_reason: str = ""
    interrupts_blocked: bool = False
    rank_token: str = ""

    @property
    def nonce(self) -> str:
        return attempt_nonce(self.job_id, self.attempt)

    def to_env(self) -> dict[str, str]:
        """Return the variables of this worker; the addresses among them become known when the ranks join."""
        values = _to_variables(self) | {NUM_PROCESSES: str(self.size), PROCESS_ID: str(self.rank)}
        if self.torch_env:
            numbers = (self.rank, self.size, self.local_rank, self.local_size)
            values |= dict(zip(TORCH_VARIABLES, map(str, numbers), strict=False))
        return values

    @classmethod
    def names_by_rank(cls, *, torch_env: bool) -> tuple[str, ...]:
        """Return the names of variables that a worker has, and other processes lack or have with other values."""
        own = (*_variables_of(cls), NUM_PROCESSES, PROCESS_ID, COORDINATOR_ADDRESS)
        return (*own, *TORCH_VARIABLES) if torch_env else own

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerEnv:
        """Read the variables back. Raises ProtocolError that names a missing or malformed one."""
        return cls(**_from_variables(cls, env, _variables_of(cls)))

    @classmethod
    def from_program_env(cls, env: Mapping[str, str]) -> WorkerEnv:
        """Read what a program and its children see; other fields have their defaults. Raises ProtocolError."""
        seen = {name: each for name, each in _variables_of(cls).items() if each in PROGRAM_FIELDS}
        return cls(**_from_variables(cls, env, seen))

    @classmethod
    def hidden_variables(cls) -> tuple[str, ...]:
        """Return the names of the variables that a program does not see."""
        return tuple(name for name, each in _variables_of(cls).items() if each not in PROGRAM_FIELDS)


class AgentEnv(HidesFields, frozen=True):
    """The settings of the agents on all hosts, from the command that starts them.

    head_addresses:  at which the head listens, "10.1.0.4:40123,[fd00::4]:40123"
    engine:          the engine whose variables hold the rank, its key in the table of spec/engines
    stays:           whether the agent outlives that command
    """

    hidden = frozenset({"token"})

    job_id: str
    head_addresses: str
    token: str
    engine: str
    init_timeout: float
    stays: bool = False

    def to_env(self) -> dict[str, str]:
        return _to_variables(self)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> AgentEnv:
        """Read the variables back. Raises ProtocolError that names a missing or malformed one."""
        return cls(**_from_variables(cls, env, _variables_of(cls)))

    @classmethod
    def variable_names(cls) -> tuple[str, ...]:
        """Return the names of the variables that must reach every host."""
        return tuple(_variables_of(cls))


def attempt_nonce(job_id: str, attempt: int) -> str:
    """Return a nonce that all processes of this attempt share, and no process of another job or attempt."""
    return f"{job_id}-{attempt}"


def _to_variables(told: WorkerEnv | AgentEnv) -> dict[str, str]:
    return {name: _write(getattr(told, field)) for name, field in _variables_of(type(told)).items()}


def _from_variables(kind: type[Struct], env: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    missing = [name for name in (JOB_ID, *wanted) if name not in env]
    if missing:
        raise ProtocolError(
            f"{missing[0]} is not set: this process was not started by jaxrun, or the command of --wrap passes on no "
            "variables. Start the program with: jaxrun -n PROCESSES PROGRAM"
        )
    for name, field in wanted.items():
        declared = _declared_type(kind, field)
        try:
            values[field] = _READERS[declared](env[name])
        except (ValueError, KeyError):
            raise ProtocolError(f"{name}={env[name]!r} is not a valid {declared}") from None
    return values


def _variables_of(kind: type[Struct]) -> dict[str, str]:
    """Return the names of fields by the names of their variables, without those that travel in no variable."""
    names = kind.__struct_fields__
    return {RESERVED_PREFIX + name.upper(): name for name in names if name not in _NEVER_IN_VARIABLES}


def _declared_type(kind: type[Struct], field: str) -> str:
    """Return the annotation of a field as it is written."""
    annotations = (vars(base).get("__annotations__", {}) for base in kind.__mro__)
    return next(str(each[field]) for each in annotations if field in each)


def _write(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_READERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: {"True": True, "False": False}[text],
    "tuple[int, ...]": lambda text: tuple(map(int, text.split(","))) if text else (),
}
