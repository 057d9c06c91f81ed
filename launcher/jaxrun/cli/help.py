"""The pages of help, and completion in the shell.

--help has the few options that people need first, on a screen of 24 lines; --help-all has every option in its group,
and the exit statuses.
A shell completes words once it has evaluated "$(_JAXRUN_COMPLETE=bash_source jaxrun)", and the same for zsh and fish:
it starts jaxrun with the words so far in COMP_WORDS, and click answers, for the command to complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import click

from jaxrun.cli.job_option import JobOption, job_options
from jaxrun.terminal import PROSE_WIDTH

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_USAGE = """\
Usage: jaxrun [OPTIONS] PROGRAM [ARGS]...
       mpirun|srun ... jaxrun attach [OPTIONS] PROGRAM [ARGS]...
       jaxrun explain|logs|stop|stacks|top|profile [JOB]  jaxrun list|clean [DIR]  jaxrun doctor

Run PROGRAM in the processes of one JAX job, once they have proved to be the job you asked for.
"""
ATTACH_USAGE = """\
Usage: mpirun|srun ... jaxrun attach [OPTIONS] PROGRAM [ARGS]...

Run PROGRAM in one JAX job, made of processes that mpirun, srun or something else has started.
"""
DOCTOR_USAGE = """\
Usage: jaxrun doctor [OPTIONS]

Check the hosts, the network and the installation that a job with these options would use.
"""
_ATTACH_EXAMPLES = """
Examples:
  mpirun -n 8 jaxrun attach train.py --lr 0.1      Open MPI, MPICH, Intel MPI: one process each
  srun -N 2 --ntasks-per-node 4 jaxrun attach train.py
  jaxrun attach --rank 3 --size 8 --head h1:7777 train.py     by hand, on each host

Exit status: the program's own; 128+n after signal n; 2 for wrong usage. All of it: --help-all
"""
_EXAMPLES = """
Examples:
  jaxrun -n 4 train.py --lr 0.1         four processes; words after train.py belong to it
  jaxrun -n 2 -d 4 -m package.train     a module in two processes, with four devices each
  jaxrun --backend mpirun -H h1:4,h2:4 train.py   two hosts; in an allocation: --backend slurm

Exit status: the program's own; 128+n after signal n; 2 for wrong usage. All of it: --help-all
"""
_DOCTOR_EXAMPLES = """
Examples:
  jaxrun doctor                                      this machine
  jaxrun doctor --backend mpirun -H h1,h2,h3         three hosts; in an allocation: --backend slurm

Exit status: 0 if a job can run, with or without warnings; 69 if something fails; 2 for wrong usage
"""
_EXAMPLES_OF = {"jaxrun": _EXAMPLES, "jaxrun attach": _ATTACH_EXAMPLES, "jaxrun doctor": _DOCTOR_EXAMPLES}
_EXIT_STATUS = """
Exit status:
  the program's own; if several fail, the first one's; and
  2      the command line is wrong, or asks for more than the hosts have; no program was started
  65     the processes are not the job you asked for; the program was not started
  69     a backend is missing or could not start
  70     a message made no sense: a bug of jaxrun, or another program on its port
  73     the job runs already, and takes in no process that comes now
  75     preempted; the job may be resumed
  124    the job, or its start, took longer than its timeout
  128+n  a process died of signal n: 137 SIGKILL, 139 SIGSEGV; jaxrun: 130 Ctrl-C, 143 SIGTERM
"""
_NAMES_WIDTH = 32
_DEFAULT = re.compile(r"\[default: [^;\]]*(?=[;\]])")
COMPLETION_VARIABLE = "_JAXRUN_COMPLETE"
_WORDS = "COMP_WORDS"
_AT = "COMP_CWORD"  # bash and zsh: the number of the word to complete; fish: that word


class Command(click.Command):
    """A command with these two pages of help; all its options are of class JobOption."""

    def get_help(self, ctx: click.Context) -> str:
        shown = [option for option in job_options(self) if option.declared.main or option.declared.common]
        return (
            (self.help or _USAGE) + _section(ctx, "Options", shown, _in_short) + _EXAMPLES_OF[self.name or ""].rstrip()
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """What follows the program belongs to it: files, and none of jaxrun's options."""
        if ctx.params.get("program"):
            from click.shell_completion import CompletionItem

            return [CompletionItem(incomplete, type="file")]
        found = super().shell_complete(ctx, incomplete)
        for item in found:
            item.help = item.help and _in_short(item.help)
        return found


def all_help(ctx: click.Context) -> str:
    """Return the page with every option in its group, and every exit status."""
    return (ctx.command.help or _USAGE) + _sections(ctx, job_options(ctx.command)) + _EXIT_STATUS.rstrip()


def _in_short(text: str) -> str:
    """Return the first sentence of an option's help, and its default."""
    first, _, rest = text.partition(". ")
    default = _DEFAULT.search(rest)
    return " ".join(filter(None, (f"{first.rstrip('.')}." if rest else first, default and f"{default[0]}]")))


def _sections(ctx: click.Context, options: list[JobOption]) -> str:
    groups: dict[str, list[JobOption]] = {}
    for option in options:
        groups.setdefault(option.declared.group, []).append(option)
    return "".join(_section(ctx, *item) for item in groups.items())


def _section(
    ctx: click.Context, title: str, options: list[JobOption], shorten: Callable[[str], str] = lambda text: text
) -> str:
    formatter = click.HelpFormatter(width=PROSE_WIDTH)
    with formatter.section(title):
        records = [record for option in options if (record := option.get_help_record(ctx))]
        formatter.write_dl([(names, shorten(text)) for names, text in records], col_max=_NAMES_WIDTH)
    return "\n" + formatter.getvalue().strip("\n") + "\n"


def command_to_complete(commands: Collection[str]) -> str:
    """Return the command whose words are to complete, empty for `jaxrun` itself; removes its name from the words."""
    text, at = os.environ.get(_WORDS, ""), os.environ.get(_AT, "")
    words = text.split()
    if len(words) < 2 or words[1] not in commands:
        return ""
    if os.environ[COMPLETION_VARIABLE].startswith("fish"):
        itself = len(words) == 2 and at == words[1]
    else:
        itself = at == "1"
        os.environ[_AT] = at if itself else str(int(at) - 1)
    if itself:
        return ""
    os.environ[_WORDS] = text.replace(words[1], "", 1)
    return words[1]
