"""Declares options of the command line, each once, at the field of JobOptions (options.py) that holds its value.

A declaration yields the flag and its help, its defaults from files and variables, the check of its value, the refusal
by a backend that does not support it, its entry in job.json, and the words that give it to another jaxrun. Its kind
(option_kinds.py) says how people write its value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from msgspec import Struct, StructMeta

from jaxrun.errors import UsageError
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.spec.job.option_kinds import Kind

# The sections of --help-all, in order.
SHAPE, START, BY_HAND, MPIRUN, SSH, SLURM, KUBERNETES, OUTPUT, FAILURE, ABOUT = GROUPS = (
    "The job's shape",
    "Backends and environment",
    "One command on each host, without MPI or Slurm",
    "mpirun, and hosts by name",
    "ssh",
    "Slurm, PBS and Grid Engine",
    "Kubernetes",
    "Output",
    "Failure",
    "About",
)


class Option(Struct, frozen=True):
    """How people set the value of a field.

    title:         the flags, as messages name them: "-n/--processes"
    kind:          how people write its value
    help:          for people; {default} stands for the default
    group:         the section of --help-all
    metavar:       stands for the value on pages of help, instead of the kind's
    check:         completes "--grace …" for a wrong value; empty for any other. Without it, the kind's choices decide
    main:          --help shows it, and a warning is possible if it comes after the program's name
    common:        --help shows it, too
    aliases:       names in other launchers, which no page of help shows
    needs:         only backends that have this among their `options` support it; empty for all
    configurable:  its default may come from pyproject.toml or a variable
    attach, doctor:  `jaxrun attach` or `jaxrun doctor` has it
    """

    title: str
    kind: Kind
    help: str
    group: str
    metavar: str = ""
    check: Callable[[Any], str] | None = None
    main: bool = False
    common: bool = False
    aliases: tuple[str, ...] = ()
    needs: str = ""
    configurable: bool = True
    attach: bool = True
    doctor: bool = True

    @property
    def flags(self) -> list[str]:
        return self.title.split("/")

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that give the option this value; none if nobody could type it."""
        name = self.flags[-1]
        if self.kind.is_flag:
            return [name] if value == self.kind.on else []
        if self.kind.choices and value not in self.kind.choices:
            return []
        return [f"{name}={text}" for text in self.kind.format(value)]


def option(title: str, kind: Kind, text: str, *, default: Any = None, **attributes: Any) -> Any:
    """Declare the option of a field; the attributes are Option's.

    default:  None for the kind's, or for the default of a field that the class inherits
    """
    return _Declaration(kind.empty if default is None else default, Option(title, kind, text, **attributes))


class _Declaration(NamedTuple):
    default: Any
    option: Option


class OptionField(NamedTuple):
    """A field that has an option, and its default."""

    name: str
    default: Any


class _OptionsMeta(StructMeta):
    """Makes a Struct of a class body in which options are declared.

    A declaration without an annotation is the option of a field that the class inherits, with its default.
    """

    declared: tuple[tuple[OptionField, Option], ...] = ()

    def __new__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any], **config: Any) -> Any:
        declared = {field: each for field, each in namespace.items() if isinstance(each, _Declaration)}
        if not declared:
            return super().__new__(cls, name, bases, namespace, **config)
        inherited = dict(zip(bases[0].__struct_fields__, bases[0].__struct_defaults__, strict=True))
        defaults = {field: inherited.get(field, each.default) for field, each in declared.items()}
        body = {field: defaults.get(field, value) for field, value in namespace.items() if field not in inherited}
        made = super().__new__(cls, name, bases, body, **config)
        own = ((OptionField(field, defaults[field]), each.option) for field, each in declared.items())
        made.declared = (*own, *bases[0].declared)
        return made


class OptionValues(WorkerSettings, frozen=True, kw_only=True, metaclass=_OptionsMeta):
    """The base of the class whose fields have options."""


def options_of(record: OptionValues | type[OptionValues]) -> tuple[tuple[OptionField, Option], ...]:
    """Return (field, option) for each field that has an option."""
    return (record if isinstance(record, type) else type(record)).declared


def check_values(record: OptionValues) -> None:
    """Raise UsageError for a value that its option refuses; a default is never refused."""
    for each, declared in options_of(record):
        value = getattr(record, each.name)
        if value is None or value == each.default:
            continue
        wrong = declared.check(value) if declared.check else _check_choice(declared.kind.choices, value)
        if wrong:
            raise UsageError(f"{declared.title} {wrong}")


def _check_choice(choices: Collection[str], value: str) -> str:
    return f"must be one of {', '.join(choices)}, not {value!r}" if choices and value not in choices else ""
