"""Errors about command lines that cannot run as typed, and questions about possible slips."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from jaxrun.cli.defaults import Defaults
from jaxrun.cli.job_option import JobOption, WrongValueError, job_options
from jaxrun.cli.options_of_others import find_foreign, find_instead
from jaxrun.spec.job.option_declaration import SHAPE

_RUN_PROGRAMS = ("", "jaxrun", "jaxrun attach")
_READ_BYTES = 2**20  # of a program


def describe(error: click.ClickException, words: Sequence[str], defaults: Defaults) -> str:
    """Describe the error in jaxrun's own style; `words` are the words of the command line."""
    match error:
        case click.NoSuchOption():
            return _no_such_option(error, words)
        case click.BadOptionUsage():
            return _plain(re.sub("^Option '(.*?)'", r"\1", error.message))
        case click.MissingParameter(param=click.Parameter() as param):
            return f"{_name(param)} is missing"
        case click.BadParameter(param=click.Parameter() as param):
            return _bad_value(error, param, words, defaults)
    return _plain(error.format_message())


def _no_such_option(error: click.NoSuchOption, words: Sequence[str]) -> str:
    foreign, instead = find_foreign(error.option_name, words)
    if foreign:
        return f"there is no option {foreign}: {instead}"
    command = error.ctx.command.name if error.ctx else ""
    text = f"there is no option {error.option_name}{f' of {command}' if command != 'jaxrun' else ''}"
    close = _close_options(error)
    if close:
        return f"{text}; did you mean {' or '.join(close)}?"
    if command not in _RUN_PROGRAMS:
        return f"{text}; {command} --help lists its options"
    return f"{text}; put the program's options after its name; --help-all lists jaxrun's"


def _bad_value(error: click.BadParameter, param: click.Parameter, words: Sequence[str], defaults: Defaults) -> str:
    source = defaults.sources.get(param.name or "")
    is_typed = error.ctx is None or source is None or not _is_default(error.ctx, param)
    # click takes mpirun's `-npernode 2` for -n with the value "pernode".
    for word in words if is_typed else ():
        begins_so = word.startswith(tuple(name for name in param.opts if len(name) == len("-x")))
        if begins_so and (instead := find_instead(word)):
            return f"there is no option {word}: {instead}"
    text = error.message if isinstance(error, WrongValueError) else f"{_name(param)}: {_plain(error.message)}"
    return text if is_typed else f"{source}: {text}"


def _close_options(error: click.NoSuchOption) -> list[str]:
    """Return the options that begin with the typed text, or else the most similar one."""
    known = [name for param in (error.ctx.command.params if error.ctx else ()) for name in param.opts]
    beginning = [name for name in known if len(error.option_name) > 3 and name.startswith(error.option_name)]
    if beginning:
        return beginning
    import difflib  # takes 1 ms

    return difflib.get_close_matches(error.option_name, known, n=1, cutoff=0.7)


def _is_default(ctx: click.Context, param: click.Parameter) -> bool:
    return param.name is not None and ctx.get_parameter_source(param.name) is click.core.ParameterSource.DEFAULT_MAP


def _name(param: click.Parameter) -> str:
    if isinstance(param, click.Option):
        return "/".join(param.opts)
    return str(param.metavar or param.name).upper()


def _plain(message: str) -> str:
    """Return the message as the end of a sentence."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]


# ---- options of jaxrun that are typed after the program, so the program gets them


def describe_misplaced(ctx: click.Context, words: Sequence[str], program: Sequence[str], source: Path | None) -> str:
    """Ask whether an option among the program's own was meant for jaxrun; empty if that is unlikely.

    words:   the whole command line
    program: its end, the program and its arguments
    source:  the program's file; an option that the file mentions belongs to the program, and so does any if it is None
    """
    before = words[: len(words) - len(program)]
    if "--" in before or source is None:
        return ""
    options, text = _options(ctx), _read(source)
    for at, word in enumerate(program[1:], 1):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        option = options.get(name)
        if option is None or _mentions(text, name):
            continue
        end = at + (1 if equals or option.is_flag else 2)
        if option.is_flag or (end <= len(program) and _fits(ctx, option, value if equals else program[end - 1])):
            moved = program[at:end]
            instead = shlex.join(["jaxrun", *moved, *before, *program[:at], *program[end:]])
            return f"{shlex.join(moved)} goes to {program[0]}; did you mean {instead}?"
    return ""


def _options(ctx: click.Context) -> dict[str, JobOption]:
    """Return the options to look for, by each of their names: those that most jobs need, and those of their shape.

    An option that the command line also gives to jaxrun is known to the user, so it is left out.
    """
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: option
        for option in job_options(ctx.command)
        if option.declared.main or option.declared.group == SHAPE
        if option.opts != ["-m"] and ctx.get_parameter_source(option.parameter) is not typed
        for name in (*option.opts, *option.declared.aliases)
    }


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
