"""Turns a program and keyword arguments into the words of jaxrun's command line, which checks them. No I/O.

A keyword is the option's name with underscores: `max_restarts=2` is `--max-restarts=2`. Any other keyword becomes an
option as well, so that the command line refuses it in its own words.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrun.errors import UsageError
from jaxrun.protocol.names import SUBCOMMANDS, WORDS_OF_OTHERS
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.option_kinds import FLAG, Kind

Program = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def make_words(program: Program, options: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line. Raises UsageError for values that no command line can have."""
    words = _program_words(program)
    # Without this, a program called `list` would be a command of jaxrun.
    separator = ["--"] if words[0] in SUBCOMMANDS or words[0] in WORDS_OF_OTHERS else []
    return [*(word for name, value in options.items() for word in _option_words(name, value)), *separator, *words]


def _program_words(program: Program) -> list[str]:
    """Return the program and its arguments; a text is split as in a shell, a path is one word."""
    if isinstance(program, str):
        try:
            words = shlex.split(program)
        except ValueError as error:
            raise UsageError(f"program {program!r} cannot be split into words: {str(error).lower()}") from None
    else:
        parts = [program] if isinstance(program, os.PathLike) else program
        words = [_text("program", part) for part in parts]
    if not words:
        raise UsageError("PROGRAM is missing; give it and its arguments: jaxrun.run(['train.py', '--lr', '0.1'])")
    return words


def _option_words(name: str, value: Any) -> Iterator[str]:
    """Yield the words of one option; none for a value that stands for a default."""
    long_name = name.replace("_", "-")
    option = f"-{name}" if len(name) == 1 else f"--{long_name}"
    kind = _kinds().get(long_name, FLAG)
    takes_value = not kind.is_flag
    if value is None or (value is False and not takes_value):
        return
    if value is True and not takes_value:
        yield option
        return
    for text in _texts(name, value, repeated=kind.repeats):
        yield from (option, text) if len(name) == 1 else (f"{option}={text}",)


def _texts(name: str, value: Any, *, repeated: bool) -> list[str]:
    """Return the option's values: one for each time that it is given."""
    if isinstance(value, Mapping):
        return [_assignment(name, *pair) for pair in value.items()]
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        texts = [_text(name, each) for each in value]
        return texts if repeated else [",".join(texts)]
    return [_text(name, value)]


def _assignment(option: str, name: Any, value: Any) -> str:
    """Return `NAME=VALUE`, or `NAME` for a variable that is passed on."""
    if not isinstance(name, str) or not name or "=" in name:
        raise UsageError(f"{option}: {name!r} is not the name of a variable")
    return name if value is None else f"{name}={_text(f'{option} {name}', value)}"


def _text(name: str, value: Any) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    raise UsageError(f"{name}: {value!r} is neither a text nor a number nor a path")


def _kinds() -> dict[str, Kind]:
    """Return the kind of each option by its long names; a name that is not known is a flag's."""
    return {
        flag.lstrip("-"): declared.kind
        for _, declared in options_of(Job)
        for flag in (*declared.flags, *declared.aliases)
    }
