"""Completion by the shell: `eval "$(_JAXRUN_COMPLETE=bash_source jaxrun)"`, and the same for zsh and fish.

The shell starts jaxrun with the words so far in COMP_WORDS; click answers, for the command that is to be completed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from jaxrun.protocol.names import SUBCOMMANDS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VARIABLE = "_JAXRUN_COMPLETE"
_WORDS = "COMP_WORDS"
_AT = "COMP_CWORD"  # bash and zsh: the number of the word to complete; fish: that word


def command_to_complete(commands: Collection[str]) -> str:
    """The command whose words are to be completed, empty for `jaxrun` itself; its name is taken out of the words."""
    text, at = os.environ.get(_WORDS, ""), os.environ.get(_AT, "")
    words = text.split()
    if len(words) < 2 or words[1] not in commands:
        return ""
    if os.environ[VARIABLE].startswith("fish"):
        itself = len(words) == 2 and at == words[1]
    else:
        itself = at == "1"
        os.environ[_AT] = at if itself else str(int(at) - 1)
    if itself:
        return ""
    os.environ[_WORDS] = text.replace(words[1], "", 1)
    return words[1]


def complete_program(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files, and as the very first word the commands of jaxrun."""
    from click.shell_completion import CompletionItem

    typed = click.core.ParameterSource.COMMANDLINE
    first = not any(ctx.get_parameter_source(other.name or "") is typed for other in ctx.command.params)
    names = [name for name in SUBCOMMANDS if name.startswith(incomplete)] if first and ctx.info_name == "jaxrun" else []
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]
