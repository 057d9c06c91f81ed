"""Declares options of the command line, each once, at the field of JobOptions (options.py) that holds its value.

A declaration yields the flag and its help, its defaults from files and variables, the check of its value, the refusal
by a backend that does not support it, and its entry in job.json. The annotation says what kind of value it is: `bool`
makes a flag, `float` a time, a tuple an option that may be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any

from jaxrun.errors import UsageError

# The sections of --help-all, in order.
SHAPE, START, BY_HAND, MPIRUN, SSH, SLURM, KUBERNETES, OUTPUT, FAILURE, ABOUT = GROUPS = (
    "The job's shape",
    "Backends and environment",
    "One command on each host, without MPI or Slurm",
    "mpirun, and hosts by name",
    "ssh",
    "Slurm",
    "Kubernetes",
    "Output",
    "Failure",
    "About",
)


@dataclass(frozen=True, slots=True)
class Option:
    """How people set the value of a field.

    title:         the flags, as messages name them: "-n/--processes"
    help:          for people; {default} stands for the default
    group:         the section of --help-all
    choices:       all values that people may give, if there are few
    words:         words that people may give instead of a number; cli/make_job.py turns them into numbers
    check:         completes "--grace …" for a wrong value; empty for any other. Without it, `choices` decides
    main:          --help shows it, and a warning is possible if it comes after the program's name
    common:        --help shows it, too
    aliases:       names in other launchers, which no page of help shows
    flag_value:    the value if the flag is given, for a field that is not a bool
    needs:         only backends that have this among their `options` support it; empty for all
    configurable:  its default may come from pyproject.toml or a variable
    attach, doctor:  `jaxrun attach` or `jaxrun doctor` has it
    """

    title: str
    help: str
    group: str
    metavar: str | None = None
    choices: Collection[str] = ()
    words: tuple[str, ...] = ()
    check: Callable[[Any], str] | None = None
    main: bool = False
    common: bool = False
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
    """Return (field, option) for each field of a dataclass that has an option."""
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
