"""A click option of jaxrun's commands that knows its declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from jaxrun.spec.job.option_declaration import Option

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class JobOption(click.Option):
    """An option that knows its declaration; its further names are accepted, but no page of help shows them."""

    def __init__(self, names: Sequence[str], declared: Option, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.declared = declared

    @property
    def parameter(self) -> str:
        assert self.name is not None
        return self.name

    @property
    def long_name(self) -> str:
        """ "stall-timeout" of --stall-timeout; the letter alone of an option that has no long name."""
        return max(self.opts, key=len).lstrip("-")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return complete_path(self, incomplete) or super().shell_complete(ctx, incomplete)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        if self.declared.aliases:
            parser.add_option(
                obj=self, opts=list(self.declared.aliases), dest=self.name, action="store", nargs=self.nargs
            )


def job_options(command: click.Command) -> list[JobOption]:
    return [param for param in command.params if isinstance(param, JobOption)]


def complete_path(param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the value of an option as a path if its metavar says that it is one; empty for any other option."""
    from click.shell_completion import CompletionItem

    kinds = {"DIR": "dir", "FILE": "file", "PATH": "file"}
    kind = next((kinds[word] for word in (param.metavar or "").split("|") if word in kinds), "")
    return [CompletionItem(incomplete, type=kind)] if kind else []
