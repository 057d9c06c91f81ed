"""An option as click has it, and values of options: times, processes per node, words as typed in a shell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from jaxrun.errors import UsageError
from jaxrun.protocol.settings import Option
from jaxrun.text import parse_seconds

PER_GPU = "gpu"  # a process for each GPU
AUTOMATIC = "auto"  # as jaxrun does without the option


class JobOption(click.Option):
    """An option that knows how it was declared; further names of it are understood, and no page of help shows them."""

    def __init__(self, names: Sequence[str], declared: Option, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.declared = declared

    @property
    def parameter(self) -> str:
        """The name of its value."""
        assert self.name is not None
        return self.name

    @property
    def long_name(self) -> str:
        """ "stall-timeout" of --stall-timeout; the letter alone of an option that has no long name."""
        return max(self.opts, key=len).lstrip("-")

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        if self.declared.aliases:
            parser.add_option(
                obj=self, opts=list(self.declared.aliases), dest=self.name, action="store", nargs=self.nargs
            )


def job_options(command: click.Command) -> list[JobOption]:
    return [param for param in command.params if isinstance(param, JobOption)]


class Time(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """Seconds as a number, or with units: 90s, 5m, 1h30m."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = value if isinstance(value, float) else parse_seconds(str(value))
        if seconds is None:
            self.fail(f"{value!r} is no time; write seconds, or 90s, 5m, 1h30m", param, ctx)
        return seconds


class ProcessesPerNode(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """A number, or one of the words that torchrun takes for it; AUTOMATIC and PER_GPU stay words."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in (AUTOMATIC, PER_GPU):
            return str(value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {AUTOMATIC} or {PER_GPU}", param, ctx)


class RunDirectory(click.Path):
    """A directory, or a number: the run directory of the Nth latest job of those that `jaxrun list` shows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
            from jaxrun.records.rundir.jobs import latest_job

            if found := latest_job(int(value)):
                value = str(found)
        return super().convert(value, param, ctx)


def split_words(text: str, option: str) -> list[str]:
    """Split `text` as a shell does. Raises UsageError that names `option`."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} cannot be split into words: {str(error).lower()}") from None
