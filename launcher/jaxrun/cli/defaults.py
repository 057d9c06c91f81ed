"""Defaults of options from places other than the command line: [tool.jaxrun] of pyproject.toml, and variables.

A JAXRUN_… variable overrides the file, and the command line overrides both. They apply only to typed commands: gangs,
pools and tests of the pytest plugin ignore them. In a process of a job, variables are ignored: the job has set them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click
from msgspec import field

from jaxrun.cli.click_options import attach_parameters, parameters
from jaxrun.cli.job_option import JobOption
from jaxrun.cli.make_job import read_variables
from jaxrun.errors import UsageError
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import GANG_ADDRESS, JOB_ID, RESERVED_PREFIX
from jaxrun.spec.job.option_kinds import split_words

_FILE = "pyproject.toml"
_TABLE = "jaxrun"


class Defaults(HidesFields, frozen=True):
    """Values by the name of the parameter, as click takes them, and the source of each; `env`: for the workers."""

    hidden = frozenset({"env"})

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def read_defaults(own: Sequence[JobOption], environ: Mapping[str, str], directory: str) -> Defaults:
    """Read the defaults of the options `own`; the file may also contain options of other commands.

    Raises UsageError that names the file or the variable, and what is wrong there.
    """
    if GANG_ADDRESS in environ:
        return Defaults()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    by_name = _by_name(own)
    path, table = _find_table(directory)
    for key, value in table.items():
        option = by_name.get(key.replace("_", "-"))
        if option is not None:
            values[option.parameter] = _from_toml(option, value, f"{path}: {key}")
            sources[option.parameter] = path
        elif key.replace("_", "-") not in (known := _names_of_all()):
            raise UsageError(f"{path}: [tool.{_TABLE}] {_no_such_key(key, known)}")
    env = _pop_variables(values, environ)
    if JOB_ID not in environ:
        for option in by_name.values():
            variable = variable_of(option)
            if environ.get(variable):
                values[option.parameter] = _from_text(option, environ[variable], variable)
                sources[option.parameter] = variable
    return Defaults(values, sources, env | _pop_variables(values, environ))


def _pop_variables(values: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Remove --env-file and --env from `values` and return their variables: the command line adds to them."""
    return read_variables(values.pop("env_files", ()), values.pop("assignments", ()), environ)


def variable_of(option: JobOption) -> str:
    """Return the variable of an option: JAXRUN_STALL_TIMEOUT for --stall-timeout."""
    return RESERVED_PREFIX + option.long_name.upper().replace("-", "_")


def used_defaults(ctx: click.Context, defaults: Defaults) -> frozenset[str]:
    """Return the names of the values that the command line does not replace."""
    source = click.core.ParameterSource.DEFAULT_MAP
    return frozenset(name for name in defaults.values if ctx.get_parameter_source(name) is source)


def _by_name(options: Sequence[JobOption]) -> dict[str, JobOption]:
    return {option.long_name: option for option in options if option.declared.configurable}


def _names_of_all() -> Collection[str]:
    return _by_name([each for each in (*parameters(), *attach_parameters()) if isinstance(each, JobOption)])


def _find_table(directory: str) -> tuple[str, Mapping[str, Any]]:
    """Return the table [tool.jaxrun] of the nearest pyproject.toml that has one, in `directory` or above."""
    while True:
        path = os.path.join(directory, _FILE)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            text = file.read()
            if _TABLE.encode() in text and (table := _parse(path, text)) is not None:
                return path, table
        if directory == (directory := os.path.dirname(directory)):
            return "", {}


def _parse(path: str, text: bytes) -> Mapping[str, Any] | None:
    import tomllib

    try:
        content = tomllib.loads(text.decode())
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    tools = content.get("tool")
    table = tools.get(_TABLE) if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.{_TABLE}] must be a table, not {table!r}")
    return table


def _no_such_key(key: str, by_name: Collection[str]) -> str:
    import difflib

    close = difflib.get_close_matches(key.replace("_", "-"), by_name, n=1)
    return f"has no option {key!r}; " + (f"did you mean {close[0]!r}?" if close else "jaxrun --help-all lists them")


def _from_toml(option: JobOption, value: Any, source: str) -> Any:
    """Return the value as on a command line: a text, or a tuple of texts for an option that may be repeated."""
    if option.multiple and isinstance(value, dict):
        value = [f"{name}={text}" for name, text in value.items()]
    if option.multiple:
        value = value if isinstance(value, list) else _from_text(option, value, source)
    parts = value if option.multiple else (value,)
    if not all(isinstance(part, (str, int, float)) for part in parts):
        not_this = "" if option.name == "assignments" else f", not {value!r}"  # which may be a secret
        raise UsageError(f"{source} must be {'a list of strings' if option.multiple else 'one value'}{not_this}")
    return tuple(map(str, parts)) if option.multiple else str(value)


def _from_text(option: JobOption, text: str, source: str) -> Any:
    if not option.multiple:
        return text
    return tuple(split_words(str(text), source)) if option.declared.kind.listed else (text,)
