"""The pages of help: --help fits on one screen; --help-all has every option, in groups, and the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from jaxrun.terminal import PROSE_WIDTH

_USAGE = """\
Usage: jaxrun [OPTIONS] PROGRAM [ARGS]...
       mpirun|srun ... jaxrun attach [OPTIONS] PROGRAM [ARGS]...
       jaxrun explain|stacks|top|profile [RUN_DIR]  jaxrun list|clean [DIR]  jaxrun doctor

Start PROGRAM as the processes of one JAX job, prove that it is the job asked for, and run it.
"""
ATTACH_USAGE = """\
Usage: mpirun|srun ... jaxrun attach [OPTIONS] PROGRAM [ARGS]...

Make of the processes that mpirun, srun or another has started one JAX job, and run PROGRAM in it.
"""
DOCTOR_USAGE = """\
Usage: jaxrun doctor [OPTIONS]

Examine the hosts, the network and the installation that a job with these options would use.
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
  jaxrun -n 4 train.py --lr 0.1         four processes; all that follows train.py belongs to it
  jaxrun -n 2 -d 4 -m package.train     a module in two processes of four devices each
  jaxrun --backend mpirun -H h1:4,h2:4 train.py   two hosts; in an allocation: --backend slurm
  jaxrun explain                        how the last job went, and where its start-up time went

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
  the program's own; of several that fail, that of the one whose fault it was; and
  2      the command line is wrong, or asks for what is not there; nothing was started
  65     the processes are not the job that was asked for; the program was not started
  69     a backend is missing or could not start
  70     a process broke the contract with the launcher
  75     preempted; the job may be resumed
  124    the job, or its start, took longer than its timeout
  128+n  a process died of signal n: 137 SIGKILL, 139 SIGSEGV; jaxrun: 130 Ctrl-C, 143 SIGTERM
"""
_NAMES_WIDTH = 32


class Option(click.Option):
    """An option that knows its group, and the names that other launchers have for it.

    main:          --help shows it
    aliases:       further names, which no page of help shows
    configurable:  its default may come from pyproject.toml or a variable
    """

    def __init__(
        self,
        *names: str,
        group: str,
        main: bool = False,
        aliases: Sequence[str] = (),
        configurable: bool = True,
        **attributes: Any,
    ) -> None:
        super().__init__(names, **attributes)
        self.group = group
        self.main = main
        self.aliases = tuple(aliases)
        self.configurable = configurable

    @property
    def long_name(self) -> str:
        """ "stall-timeout" of --stall-timeout; the letter alone of an option that has no long name."""
        return max(self.opts, key=len).lstrip("-")

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        if self.aliases:
            parser.add_option(obj=self, opts=list(self.aliases), dest=self.name, action="store", nargs=self.nargs)


class Command(click.Command):
    """A command with these two pages of help; all its options are of class Option."""

    def get_help(self, ctx: click.Context) -> str:
        main = [option for option in _options(self) if option.main]
        return (self.help or _USAGE) + _section(ctx, "Options", main) + _EXAMPLES_OF[self.name or ""].rstrip()


def all_help(ctx: click.Context) -> str:
    """Return the page with every option in its group, and every exit status."""
    groups: dict[str, list[Option]] = {}
    for option in _options(ctx.command):
        groups.setdefault(option.group, []).append(option)
    return (
        (ctx.command.help or _USAGE) + "".join(_section(ctx, *item) for item in groups.items()) + _EXIT_STATUS.rstrip()
    )


def _options(command: click.Command) -> list[Option]:
    return [param for param in command.params if isinstance(param, Option)]


def _section(ctx: click.Context, title: str, options: list[Option]) -> str:
    formatter = click.HelpFormatter(width=PROSE_WIDTH)
    with formatter.section(title):
        records = [record for option in options if (record := option.get_help_record(ctx))]
        formatter.write_dl(records, col_max=_NAMES_WIDTH)
    return "\n" + formatter.getvalue().strip("\n") + "\n"
