"""What stands after %gang and %%gang: the words of `jaxrun` for a job's shape, or what to do. Pure."""

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
    """`shape` is None if nothing is said of one; `timeout` is a cell's, in seconds."""

    action: str = ""
    shape: GangSpec | None = None
    timeout: float | None = None


def parse_arguments(line: str) -> MagicArguments:
    """What `line` asks for. UsageError."""
    try:
        given = _options().make_context("%gang", shlex.split(line)).params
    except (click.UsageError, ValueError) as error:
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(f"{text} (%gang? says what there is)") from None
    words, timeout, assignments = given.pop("words"), given.pop("timeout"), given.pop("env")
    if words and not words[0].startswith("-"):
        if len(words) > 1 or words[0] not in ACTIONS:
            raise UsageError(f"%gang knows {' and '.join(ACTIONS)}, not {' '.join(words)!r} (%gang? says more)")
        return MagicArguments(action=words[0])
    env = dict(assignment.partition("=")[::2] for assignment in assignments)
    shape = {name: value for name, value in given.items() if value is not None}
    asks = bool(shape or words or env)
    return MagicArguments(shape=GangSpec(**shape, env=env, options=words) if asks else None, timeout=timeout)


def _options() -> click.Command:
    number: dict[str, Any] = {"type": int}
    return click.Command(
        "gang",
        params=[
            click.Option(["-n", "--processes"], **number),
            click.Option(["-d", "--devices-per-process", "devices"], **number),
            click.Option(["-N", "--hosts"], **number),
            click.Option(["--backend"], type=click.Choice(BACKENDS)),
            click.Option(["--platform"], type=click.Choice(PLATFORMS)),
            click.Option(["--env"], multiple=True),
            click.Option(["--timeout"], type=float),
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED),
        ],
        add_help_option=False,
        # What is for jaxrun's own command line, such as --partition, is left to it.
        context_settings={"ignore_unknown_options": True},
    )
