"""An engine: a product that starts processes on hosts (Open MPI, Slurm, OpenSSH …), and all that jaxrun knows of it.

Each engine is one Engine, made in one file of this directory. Nothing outside that file compares keys of engines: what
differs between products is a field. All fields but the key and the title have defaults, for a product without that
part: a scheduler that starts no ranks by itself has no `ranks`, a cloud has only `hosts`. What must be known of an
engine before its file is imported stands in its row of the table (`__init__`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from jaxrun.protocol.agent_id import AgentId

if TYPE_CHECKING:
    import re

    from jaxrun.spec.engines.host_variables import HostVariables
    from jaxrun.spec.engines.mpirun_words import Mpirun

Environ = Mapping[str, str]
CommandLines = Iterable[Sequence[str]]


class RankVariables(Struct, frozen=True, kw_only=True):
    """The variables by which the processes of an engine know their rank.

    rank, size:  the variables with the numbers
    markers:     variables besides the rank that must be set, to distinguish the engine's processes from others
    job:         variables whose values together are the same in all ranks of a job, and differ between jobs
    job_above:   the same, from the command lines of the processes above, the parent first; empty if it is not there
    head:        the variable with "host:port" on rank 0's host; empty if there is none
    applies:     whether these variables, if set, are meant for this process
    inherited:   whether this process only inherits them, by the command lines of the processes above
    check:       raises UsageError if no job can run where the engine has set these variables
    hint:        what to type in a process that is within a job of the engine, but is no rank; empty if it is not
    """

    rank: str
    size: str
    markers: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    job_above: Callable[[CommandLines], str] = lambda command_lines: ""
    head: str = ""
    applies: Callable[[Environ], bool] = lambda environ: True
    inherited: Callable[[CommandLines], bool] = lambda command_lines: False
    check: Callable[[Environ], None] = lambda environ: None
    hint: Callable[[Environ], str] = lambda environ: ""

    def are_set(self, environ: Environ) -> bool:
        """Whether the engine started the process with the environment `environ`."""
        return all(name in environ for name in (self.rank, *self.markers)) and self.applies(environ)


class CancelCommand(Struct, frozen=True):
    """Ends all processes that an engine has started together, when its launch command can no longer do so.

    argv:       the command, to which the launch id reported by an agent is appended
    title:      what people call the thing it ends, in front of the launch id: "Slurm's step"
    launch_id:  the engine's name for the processes that it started together with the process of this environment
    too_late:   texts of its errors that say that these processes have ended already
    """

    argv: tuple[str, ...]
    title: str
    launch_id: Callable[[Environ], str]
    too_late: tuple[str, ...] = ()


class AbortWire(Struct, frozen=True):
    """How a rank tells the engine to kill all ranks at once, as MPI_Abort does.

    fd_variable:  the variable with the number of the descriptor to write to; if it is not set, there is no such wire
    message:      what to write, with the exit status
    """

    fd_variable: str
    message: Callable[[int], bytes]


PMI_1 = AbortWire("PMI_FD", lambda status: b"cmd=abort exitcode=%d\n" % status)


class LaunchOutput(Struct, frozen=True):
    """What a launch command has printed, as its engine reads it.

    lines:          what is meant for people
    failed_agents:  the agents that could not be started
    named_ranks:    the ranks about which the command complains
    hint:           how to learn why an agent has failed, where the command does not say so; else empty
    """

    lines: Sequence[str]
    failed_agents: frozenset[AgentId] = frozenset()
    named_ranks: Sequence[int] = ()
    hint: str = ""


def read_plain_output(text: str) -> LaunchOutput:
    """Read the output of an engine that says nothing in words that jaxrun knows."""
    return LaunchOutput(text.splitlines())


def read_starter_output(text: str) -> LaunchOutput:
    """Read the output of the starter (node/ssh), which says in a line of its own which agents have failed."""
    from jaxrun.protocol.ssh_start import split_failed_agents

    lines, failed = split_failed_agents(text)
    return LaunchOutput(lines, frozenset(failed))


class Engine(Struct, frozen=True, kw_only=True):
    """A product that starts processes.

    key:               its row in the table; JAXRUN_ENGINE tells it to agents
    title:             its name for people
    command:           what people type to start all processes of a job, to which they add -n; empty if there is none
    ranks:             how its processes know their rank; None if they do not
    hosts:             how the one process that it starts on each host knows its host; None if it does not
    slots:             the hosts of this process's job with the slots of each, in -H's notation, "h1:4,h2:4", which
                       --backend mpirun and ssh use without -H; empty outside of a job of this scheduler
    mpi_launcher:      what mpirun calls the way to reach these hosts from within a job of this scheduler; empty if its
                       own choice is right
    mpi_env:           variables for an mpirun within a job of this scheduler
    mpirun:            the command lines of its mpirun, by version; () if it is no MPI

    How its launch command, which starts the agents, behaves and ends:

    passes_stdin:      whether standard input reaches any rank, or all, as --stdin says; else only rank 0
    sigterm_at_start:  whether it handles a SIGTERM safely while it starts the agents; else it gets SIGKILL then
    agents_stay:       whether agents outlive it in a job that is to survive the loss of hosts; else it survives, too
    explains_itself:   whether its output says in jaxrun's own words why agents did not start
    read_output:       reads its output
    abort_words:       matches what a rank prints at MPI_Abort, with the exit status as group 1, if the engine then
                       kills all agents before they can report; None if agents can
    cancel:            ends the agents if it was killed; None if they end with it, or by themselves
    abort:             the wire by which a rank makes it kill all others; None if there is none
    starts_ranks_again: whether whatever starts its processes can start one alone again, while the others run: a
                       person, or a cluster
    """

    key: str
    title: str
    command: str = ""
    ranks: RankVariables | None = None
    hosts: HostVariables | None = None
    slots: Callable[[Environ], str] = lambda environ: ""
    mpi_launcher: Callable[[Sequence[str], Environ], str] = lambda hosts, environ: ""
    mpi_env: Callable[[Environ], Mapping[str, str]] = lambda environ: {}
    mpirun: tuple[Mpirun, ...] = ()
    passes_stdin: bool = False
    sigterm_at_start: bool = True
    agents_stay: bool = False
    explains_itself: bool = False
    read_output: Callable[[str], LaunchOutput] = field(default=read_plain_output)
    abort_words: re.Pattern[str] | None = None
    cancel: CancelCommand | None = None
    abort: AbortWire | None = None
    starts_ranks_again: bool = False
