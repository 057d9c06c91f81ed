"""Parses the line after %gang and %%gang: options of `jaxrun`, or an action."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import click

from jaxrun.backends import BACKENDS
from jaxrun.errors import UsageError
from jaxrun.gang.spec import GangSpec
from jaxrun.job.job import PLATFORMS

ACTIONS = ("stop", "restart")


@dataclass(frozen=True, slots=True)
class MagicArguments:
    """The parsed line.

    action:   one of ACTIONS, or empty
    spec:     the gang that is wanted; None if the line has no option for one
    timeout:  of a cell, in seconds
    """

    action: str = ""
    spec: GangSpec | None = None
    timeout: float | None = None


def parse_arguments(line: str) -> MagicArguments:
    """Parse the line. Raises UsageError."""
    try:
        given = _command().make_context("%gang", shlex.split(line)).params
    except (click.UsageError, ValueError) as error:
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(f"{text} (%gang? says what there is)") from None
    words, timeout, assignments = given.pop("words"), given.pop("timeout"), given.pop("env")
    if words and not words[0].startswith("-"):
        if len(words) > 1 or words[0] not in ACTIONS:
            raise UsageError(f"%gang knows {' and '.join(ACTIONS)}, not {' '.join(words)!r} (%gang? says more)")
        return MagicArguments(action=words[0])
    env = dict(assignment.partition("=")[::2] for assignment in assignments)
    options = {name: value for name, value in given.items() if value is not None}
    spec = GangSpec(**options, env=env, options=words) if options or words or env else None
    return MagicArguments(spec=spec, timeout=timeout)


def _command() -> click.Command:
    number: dict[str, Any] = {"type": int}
    return click.Command(
        "gang",
        params=[
            click.Option(["-n", "--processes"], **number),
            click.Option(["-d", "--devices-per-process", "devices"], **number),
            click.Option(["-N", "--hosts"], **number),
            click.Option(["--backend"], type=click.Choice(tuple(BACKENDS))),
            click.Option(["--platform"], type=click.Choice(PLATFORMS)),
            click.Option(["--env"], multiple=True),
            click.Option(["--timeout"], type=float),
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED),
        ],
        add_help_option=False,
        # Unknown options, such as --partition, are passed on to jaxrun's own command line.
        context_settings={"ignore_unknown_options": True},
    )
