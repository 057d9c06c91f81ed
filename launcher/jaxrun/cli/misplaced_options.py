"""Options of jaxrun that stand after the program, and so go to it: where that may be a slip, a line asks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from jaxrun.cli.option_types import JobOption, job_options
from jaxrun.protocol.settings import SHAPE

_READ_BYTES = 2**20


def describe_misplaced(ctx: click.Context, words: Sequence[str], program: Sequence[str], source: Path | None) -> str:
    """Ask whether options among the program's own were meant for jaxrun; empty where nothing speaks for it.

    words:   the whole command line
    program: its end, the program and its arguments
    source:  the program's file; an option that it mentions is its own, and any is where the file is not known

    An option that the command line also gives jaxrun is known to the user, and not asked for.
    """
    before = words[: len(words) - len(program)]
    if "--" in before or source is None:
        return ""
    moved, kept = _split(ctx, program[1:], _options(ctx), _read(source))
    if not moved:
        return ""
    verb = "goes" if sum(word.startswith("-") for word in moved) == 1 else "go"
    instead = shlex.join(["jaxrun", *moved, *before, program[0], *kept])
    return f"{shlex.join(moved)} {verb} to {program[0]}; did you mean {instead}?"


def _options(ctx: click.Context) -> dict[str, JobOption]:
    """The options to look for, by each of their names: those that most jobs need, and those of their shape."""
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: option
        for option in job_options(ctx.command)
        if option.declared.main or option.declared.group == SHAPE
        if option.opts != ["-m"] and ctx.get_parameter_source(option.parameter) is not typed
        for name in (*option.opts, *option.declared.aliases)
    }


def _split(
    ctx: click.Context, words: Sequence[str], options: Mapping[str, JobOption], text: str
) -> tuple[list[str], list[str]]:
    """The words that may be meant for jaxrun, and the others."""
    moved: list[str] = []
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return moved, [*kept, word, *rest]
        name, equals, value = word.partition("=")
        option = options.get(name if name.startswith("-") else "")
        if option is None or _mentions(text, name):
            kept.append(word)
        elif option.is_flag or (equals and _fits(ctx, option, value)):
            moved.append(word)
        elif not equals and rest and _fits(ctx, option, rest[0]):
            moved += [word, rest.pop(0)]
        else:
            kept.append(word)
    return moved, kept


def _fits(ctx: click.Context, option: JobOption, value: str) -> bool:
    try:
        option.type.convert(value, option, ctx)
    except click.ClickException:
        return False
    return True


def _mentions(text: str, name: str) -> bool:
    """Whether a program's text has an option of this name: "-n" or "n" in quotes, --processes, or a field of it."""
    bare = name.lstrip("-")
    found = re.search(rf"""["'`]-{{0,2}}{re.escape(bare)}\b""", text)
    return found is not None or (len(bare) > 2 and re.search(rf"\b{bare.replace('-', '[-_]')}\b", text) is not None)


def _read(source: Path) -> str:
    try:
        with source.open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
