"""Parses the line after %gang and %%gang: options of `jaxrun`, or an action."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
from msgspec import Struct, field

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.option_kinds import TEXT
from jaxrun.text import parse_ranks, parse_seconds

ACTIONS = ("stop", "restart")
HELP = "help"
_GANG_ARGUMENTS = {  # by the field of Job whose option gives their value
    "processes": "processes",
    "devices_per_process": "devices",
    "hosts": "hosts",
    "backend": "backend",
    "platform": "platform",
    "lockstep": "lockstep",
    "preload": "preload",
}
# A comment begins at a # that stands alone or after a blank, outside of quotes, as in a shell.
_BEFORE_COMMENT = re.compile(r"""((?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^'"\\])*?)(?:(?:^|\s)\#.*)?""")


class MagicArguments(Struct, frozen=True):
    """The parsed line.

    action:   one of ACTIONS, HELP, or empty
    gang:     the arguments of the Gang that is wanted; empty if the line has no option for one
    timeout:  of a cell, in seconds
    ranks:    on which a cell runs, as ranges; empty for all
    """

    action: str = ""
    gang: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    ranks: tuple[range, ...] = ()


def parse_arguments(line: str) -> MagicArguments:
    """Parse the line, which may end with a comment. Raises UsageError."""
    try:
        given = _command().make_context("%gang", _words(line)).params
    except (click.UsageError, ValueError) as error:
        raise UsageError(f"{_describe(error)} (%gang? shows all options)") from None
    if given.pop("help"):
        return MagicArguments(action=HELP)
    words, timeout, assignments = given.pop("words"), given.pop("timeout"), given.pop("env")
    rank = given.pop("rank")
    ranks = parse_ranks(rank, "--rank") if rank is not None else ()
    seconds = parse_seconds(timeout) if timeout is not None else None
    if timeout is not None and seconds is None:
        raise UsageError(f"--timeout: {timeout!r} is not a time; write seconds, or 90s, 5m, 1h30m (%gang? shows more)")
    if words and not words[0].startswith("-"):
        if len(words) > 1 or words[0] not in ACTIONS:
            raise UsageError(f"%gang knows {' and '.join(ACTIONS)}, not {' '.join(words)!r} (%gang? shows more)")
        return MagicArguments(action=words[0])
    passed_on = [word for name in assignments if "=" not in name for word in ("--env", name)]
    env = dict(assignment.split("=", 1) for assignment in assignments if "=" in assignment)
    given |= {"env": env, "options": (*passed_on, *words)}
    gang = {name: value for name, value in given.items() if value not in (None, {}, ())}
    GangSpec(**gang)  # or UsageError
    return MagicArguments(gang=gang, timeout=seconds, ranks=ranks)


def _describe(error: Exception) -> str:
    """Describe an error of the line as the command line does."""
    if not isinstance(error, click.UsageError):
        return f"the line cannot be split into words: {str(error).lower()}"
    text = error.message.rstrip(".")
    if isinstance(error, click.BadParameter) and error.param is not None:
        aliases = {alias for _, declared in options_of(Job) for alias in declared.aliases}
        name = "/".join(flag for flag in error.param.opts if flag not in aliases)
        return f"{name}: {text.replace('valid integer range', 'valid integer')}"
    text = re.sub("^Option '(.*?)'", r"\1", text)
    return text[:1].lower() + text[1:]


def _words(line: str) -> list[str]:
    """The words of the line, as a shell splits them, without its comment. Raises ValueError."""
    before = _BEFORE_COMMENT.fullmatch(line)
    return shlex.split(before[1] if before is not None else line)


def _command() -> click.Command:
    options = [
        click.Option(
            [*declared.flags, *declared.aliases, _GANG_ARGUMENTS[field.name]],
            type=click.Choice(choices)
            if (choices := tuple(declared.kind.choices))
            else str
            if declared.kind is TEXT
            else int,
        )
        for field, declared in options_of(Job)
        if field.name in _GANG_ARGUMENTS
    ]
    return click.Command(
        "gang",
        params=[
            *options,
            click.Option(["--env"], multiple=True),
            click.Option(["--timeout"]),
            click.Option(["--rank"]),
            click.Option(["-h", "--help"], is_flag=True),
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED),
        ],
        add_help_option=False,
        # Unknown options, such as --partition, are passed on to jaxrun's own command line.
        context_settings={"ignore_unknown_options": True},
    )
