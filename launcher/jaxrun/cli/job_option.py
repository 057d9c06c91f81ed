"""A click option of jaxrun's commands: it knows its declaration, and reads values as the declaration's kind says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from jaxrun.errors import UsageError
from jaxrun.spec.backends import backends_with
from jaxrun.spec.job.option_declaration import Option

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class WrongValueError(click.BadParameter):
    """A text that is no value of its option, which the message names."""


class KindType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """What click knows of the kind of an option."""

    name = "text"

    def __init__(self, declared: Option) -> None:
        self._declared = declared

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._declared.kind.parse(value, self._declared.title)
        except UsageError as error:
            raise WrongValueError(str(error), ctx, param) from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        kind = self._declared.kind
        if kind.path:
            return [CompletionItem(incomplete, type=kind.path)]
        return [CompletionItem(text) for text in kind.complete(incomplete)]


class JobOption(click.Option):
    """An option that knows its declaration; its further names are accepted, but no page of help shows them."""

    def __init__(self, names: Sequence[str], declared: Option, default: Any = None, **attributes: Any) -> None:
        kind = declared.kind
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        super().__init__(
            names,
            is_flag=kind.is_flag or None,  # False would mean that the value may be left out
            multiple=kind.repeats,
            type=None if kind.is_flag else KindType(declared),
            metavar=declared.metavar or "|".join(kind.choices) or kind.metavar,
            help=declared.help.format(default=shown, backends=", ".join(backends_with(declared))),
            **attributes,
        )
        self.declared = declared

    @property
    def parameter(self) -> str:
        assert self.name is not None
        return self.name

    @property
    def long_name(self) -> str:
        """ "stall-timeout" of --stall-timeout; the letter alone of an option that has no long name."""
        return max(self.opts, key=len).lstrip("-")

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value; of an option that may be repeated, the values of all its texts."""
        cast = super().type_cast_value(ctx, value)
        return tuple(chain.from_iterable(cast)) if self.multiple and cast else cast

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        if self.declared.aliases:
            parser.add_option(
                obj=self, opts=list(self.declared.aliases), dest=self.name, action="store", nargs=self.nargs
            )


def job_options(command: click.Command) -> list[JobOption]:
    return [param for param in command.params if isinstance(param, JobOption)]
