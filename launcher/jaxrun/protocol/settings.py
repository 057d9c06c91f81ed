"""How an option of the command line is declared, and the options that every worker of the job is told of.

An option is declared once, at the field that holds its value, of WorkerSettings here or of JobOptions
(spec/job/options.py). From that come the flag and its help, its defaults from files and variables, the check of its
value, the refusal by a backend that does not take it, and its entry in job.json. The annotation says what a value is:
`bool` makes a flag, `float` a time, a tuple an option that may be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_MODES, LOCKSTEP_RECORD

# The sections of --help-all, in its order.
SHAPE, START, BY_HAND, MPIRUN, SLURM, KUBERNETES, OUTPUT, FAILURE, ABOUT = GROUPS = (
    "The job's shape",
    "Backends and environment",
    "One command on each host, without MPI or Slurm",
    "mpirun",
    "Slurm",
    "Kubernetes",
    "Output",
    "Failure",
    "About",
)
MAKE_MESH_JAXRUN, MAKE_MESH_JAX = MAKE_MESH_MODES = ("jaxrun", "jax")  # who lays a mesh over several hosts
# Who compiles a program that the ranks of a host have in common: one of them where that is safe, or each.
COMPILE_AUTO, COMPILE_EACH = COMPILE_MODES = ("auto", "each")
STDIN_RANK_0, STDIN_NONE = "0", "none"  # who has jaxrun's standard input, besides other numbers
TLS_AUTO, TLS_ON, TLS_OFF = TLS_MODES = ("auto", "on", "off")  # whether only ranks of the job reach JAX's coordinator
CACHE_OFF, CACHE_AUTO = "off", "auto"  # where compiled programs are kept, besides a directory


@dataclass(frozen=True, slots=True)
class Option:
    """How people give the value of a field.

    title:         the flags, as messages name it: "-n/--processes"
    help:          for people; {default} stands for the default
    group:         the section of --help-all
    choices:       all values that people may give, if they are few
    words:         words that people may give in place of a number; cli/make_job.py makes numbers of them
    check:         completes "--grace …" for a value that is wrong; empty for any other. Without it, `choices` decides
    main:          --help shows it, too
    aliases:       names that other launchers have for it, which no page of help shows
    flag_value:    what it means that the flag is given, where the field is no bool
    needs:         only backends that have this among their `options` understand it; empty for all
    configurable:  its default may come from pyproject.toml or a variable
    attach:        `jaxrun attach` has it; doctor: `jaxrun doctor` has it
    """

    title: str
    help: str
    group: str
    metavar: str | None = None
    choices: Collection[str] = ()
    words: tuple[str, ...] = ()
    check: Callable[[Any], str] | None = None
    main: bool = False
    aliases: tuple[str, ...] = ()
    flag_value: str = ""
    needs: str = ""
    configurable: bool = True
    attach: bool = True
    doctor: bool = True

    @property
    def flags(self) -> list[str]:
        return self.title.split("/")


def option(title: str, text: str, *, default: Any = None, **attributes: Any) -> Any:
    """Declare the option of a dataclass's field; the attributes are those of Option."""
    return field(default=default, metadata={"option": Option(title, text, **attributes)})


def options_of(record: Any) -> list[tuple[Field[Any], Option]]:
    """Return the fields of a dataclass that have an option, and these options."""
    return _options_of(record if isinstance(record, type) else type(record))


@cache
def _options_of(kind: type[Any]) -> list[tuple[Field[Any], Option]]:
    return [(each, each.metadata["option"]) for each in fields(kind) if "option" in each.metadata]


def check_values(record: Any) -> None:
    """Raise UsageError for a value that its option refuses; a default is never refused."""
    for each, declared in options_of(record):
        value = getattr(record, each.name)
        if value is None or value == each.default:
            continue
        wrong = declared.check(value) if declared.check else _check_choice(declared.choices, value)
        if wrong:
            raise UsageError(f"{declared.title} {wrong}")


def _check_choice(choices: Collection[str], value: str) -> str:
    return f"must be one of {', '.join(choices)}, not {value!r}" if choices and value not in choices else ""


def at_least(least: int) -> Callable[[int], str]:
    return lambda value: f"must be {least} or more, not {value}" if value < least else ""


def positive_seconds(value: float) -> str:
    return "" if 0 < value < math.inf else f"must be a positive number of seconds, not {value:g}"


def _check_compile_cache(choice: str) -> str:
    is_valid = choice in (CACHE_OFF, CACHE_AUTO) or choice.startswith("/")
    return "" if is_valid else f"must be a directory, auto or off, not {choice!r}"


def _check_stdin(who: str) -> str:
    is_valid = who == STDIN_NONE or (who.isascii() and who.isdigit())
    return "" if is_valid else f"must be the number of a rank, or {STDIN_NONE}, not {who!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What the command line says to every worker.

    compile_cache:  where compiled programs are kept: an absolute path, "auto" or "off"
    stdin:          which rank has jaxrun's standard input: a number, or "none"; "" while that is undecided
    init_timeout:   seconds until every process must have joined
    """

    make_mesh: str = option(
        "--make-mesh",
        "Who makes a jax.make_mesh over several hosts: jaxrun puts the hosts along the leading axes; jax refuses since "
        "0.10.2. [default: {default}]",
        default=MAKE_MESH_JAXRUN,
        group=SHAPE,
        choices=MAKE_MESH_MODES,
        doctor=False,
    )
    stdin: str = option(
        "--stdin",
        "The rank that reads jaxrun's standard input. [default: 0]",
        default="",
        group=START,
        metavar="RANK|none",
        check=_check_stdin,
        doctor=False,
    )
    torch_env: bool = option(
        "--torch-env",
        "Also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like, as torchrun does.",
        default=False,
        group=START,
        doctor=False,
    )
    compile: str = option(
        "--compile",
        "Compile each program once for all ranks of a host if that is safe (auto), or in each rank. "
        "[default: {default}]",
        default=COMPILE_AUTO,
        group=START,
        choices=COMPILE_MODES,
    )
    compile_cache: str = option(
        "--compile-cache",
        "Keep compiled programs in this directory for the next attempt and the next job; auto: in ~/.cache/jaxrun. "
        "[default: {default}]",
        default=CACHE_OFF,
        group=START,
        metavar="DIR|auto|off",
        check=_check_compile_cache,
    )
    coordinator_tls: str = option(
        "--coordinator-tls",
        "Keep strangers out of JAX's coordinator, by mutual TLS, which JAX has since 0.12: on, off, or where the job "
        "has several hosts (auto). [default: {default}]",
        default=TLS_AUTO,
        group=START,
        choices=TLS_MODES,
    )
    verbose: bool = option("-v/--verbose", "Say what jaxrun does.", default=False, group=OUTPUT)
    lockstep: str = option(
        "--lockstep",
        "Compare the cross-process calls of the ranks. record: report a difference; fail: report it, and end the job "
        "as failed; strict: stop before the call that differs (slow, for debugging). [default: {default}]",
        default=LOCKSTEP_RECORD,
        group=FAILURE,
        choices=LOCKSTEP_MODES,
    )
    init_timeout: float = option(
        "--init-timeout",
        "Stop the job if not all processes have joined after this time. [default: {default}; with --host-rank or "
        "attach in a pod 600]",
        default=120.0,
        group=FAILURE,
        check=positive_seconds,
    )
    pdb: bool = option(
        "--pdb", "Open a debugger in the rank that fails first, in this terminal.", default=False, group=FAILURE
    )
