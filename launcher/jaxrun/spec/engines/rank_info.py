"""Reads a process's rank from the variables of the mpirun or srun that started it.

jaxrun tells the agents that it starts which engine it was; only `jaxrun attach` detects the engine, as the first one of
the table that has set its variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.protocol.names import RANK, SIZE
from jaxrun.spec.engines.engine import Engine, RankVariables
from jaxrun.spec.engines.lookup import all_engines, engine_of, marked_engines
from jaxrun.text import format_columns

BY_OPTIONS = "by hand"  # the engine of a rank that is given by --rank and --size alone
_NUMBER = re.compile(r"[0-9]{1,9}")


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
    engine = engine_of(key)
    if engine.ranks is None:
        raise ProtocolError(f"{engine.title} numbers no processes, so that no variable has this one's rank")
    return _rank_info(engine, engine.ranks, environ, ())


def find_rank_info(environ: Mapping[str, str], ancestors: Sequence[Sequence[str]] = ()) -> RankInfo | None:
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
    for engine, ranks in _engines_set(environ):
        return None if ranks.inherited(ancestors) else _rank_info(engine, ranks, environ, ancestors)
    return None


def _engines_set(environ: Mapping[str, str]) -> Iterator[tuple[Engine, RankVariables]]:
    """Yield the engines whose variables for ranks are set."""
    for engine in marked_engines(environ):
        if engine.ranks is not None and engine.ranks.are_set(environ):
            yield engine, engine.ranks


def refuse_task_of_several(
    environ: Mapping[str, str], ancestors: Callable[[], Sequence[Sequence[str]]], words: Sequence[str]
) -> None:
    """Raise UsageError in one of several processes that mpirun or srun has started, each of which would run a job.

    Processes of a jaxrun job inherit such variables, but may start jobs. `words` are the words after `jaxrun`;
    `ancestors` returns the command lines that `find_rank_info` needs.
    """
    if RANK in environ or not any(_engines_set(environ)):
        return
    try:
        found = find_rank_info(environ, ancestors())
    except (UnavailableError, UsageError):  # broken variables do not forbid starting a job
        return
    if found is None or found.size == 1:
        return
    engine = engine_of(found.engine)
    typed, prefix = shlex.join(words), f"{engine.command} -n {found.size} " if engine.command else ""
    raise UsageError(
        f"{engine.title} has started this process as number {found.rank} of {found.size} "
        f"({_variables(engine).rank}={found.rank}), and each would run a job of its own. For one job of all, type: "
        f"{prefix}jaxrun attach {typed}. For a job in each, give its number of processes: {prefix}jaxrun -n 1 {typed}"
    )


def detect_rank_info(
    environ: Mapping[str, str],
    ancestors: Sequence[Sequence[str]] = (),
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
    engine = engine_of(found.engine)
    variables = _variables(engine)
    for option, variable, given, value in (
        ("--rank", variables.rank, rank, found.rank),
        ("--size", variables.size, size, found.size),
    ):
        if given is not None and given != value:
            raise UsageError(
                f"{option} {given} contradicts {variable}={value}, with which {engine.title} started this process; "
                f"leave {option} out, or hide the variable: env -u {variables.rank} jaxrun attach ..."
            )
    return found


def _variables(engine: Engine) -> RankVariables:
    assert engine.ranks is not None
    return engine.ranks


def _from_options(rank: int | None, size: int | None) -> RankInfo:
    if rank is None or size is None:
        given = f"--rank {rank}" if rank is not None else f"--size {size}"
        raise UsageError(f"a process that mpirun or srun did not start needs --rank and --size; only {given} is given")
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} is not a rank of a job of --size {size}; its ranks are 0 to {size - 1}")
    return RankInfo(BY_OPTIONS, rank, size)


def _rank_info(
    engine: Engine, variables: RankVariables, environ: Mapping[str, str], ancestors: Sequence[Sequence[str]]
) -> RankInfo:
    variables.check(environ)
    rank = _read_number(engine, variables.rank, environ)
    size = _read_number(engine, variables.size, environ)
    if rank >= size:
        raise UnavailableError(
            f"{engine.title} has set {variables.rank}={rank}, which is not a rank of a job of "
            f"{variables.size}={size}; find out what changes these variables before jaxrun starts"
        )
    parts = [environ.get(name) for name in variables.job]
    job = ".".join(part or "0" for part in parts) if any(parts) else variables.job_above(ancestors)
    return RankInfo(engine.key, rank, size, job, environ.get(variables.head, ""))


def _read_number(engine: Engine, name: str, environ: Mapping[str, str]) -> int:
    value = environ.get(name)
    if value is not None and _NUMBER.fullmatch(value):
        return int(value)
    received = f"{name} is not set" if value is None else f"{name}={value!r} is not a whole number"
    raise UnavailableError(
        f"{received}, but {engine.title} stores the ranks of its processes there; "
        f"was this process started by {engine.title}, and is its environment passed on?"
    )


def _describe_half_set(title: str, variables: RankVariables, environ: Mapping[str, str]) -> str:
    """Return which variables of a pod are missing where others of the same engine are set; empty if none is set."""
    names = (variables.rank, *variables.markers)
    there = [name for name in names if name in environ]
    lacking = [name for name in names if name not in environ]
    verb = "is" if len(lacking) == 1 else "are"
    return f"{title} sets {' and '.join(there)}, but {' and '.join(lacking)} {verb} not set" if there else ""


def _nothing_found_message(environ: Mapping[str, str]) -> str:
    known = [(engine, engine.ranks) for engine in all_engines() if engine.ranks is not None]
    rows = [(f"  {engine.title}", ", ".join((each.rank, *each.markers))) for engine, each in known]
    lines = ["nothing says which rank this process is; looked for the variables of", *format_columns(rows)]
    lines += filter(None, (_describe_half_set(engine.title, each, environ) for engine, each in known if each.head))
    lines += filter(None, (each.hint(environ) for _, each in known))
    lines.append("Start it with mpirun or srun: mpirun -n 8 jaxrun attach PROGRAM")
    lines.append("or give its rank: jaxrun attach --rank 3 --size 8 --head host:port PROGRAM")
    return "\n".join(lines)
