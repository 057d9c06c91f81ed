"""The command line of an mpirun, made from its description. Pure.

An mpirun is recognized by the output of --version, not by its path. Variables' values never stand on a command line,
where other users could read them: they travel in mpirun's environment, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field

from jaxrun.protocol.hidden_fields import HidesFields

Words = tuple[str, ...]
HostCounts = tuple[tuple[str, int], ...]
_HOST_OPTIONS = frozenset({"host", "hosts", "H", "hostfile", "machinefile", "default-hostfile", "f"})


class MpirunRequest(HidesFields, frozen=True, kw_only=True):
    """What an mpirun should start.

    processes:    number of processes on all hosts together
    host_counts:  the hosts in the order of the ranks, with the processes of each; empty if mpirun knows its hosts
    per_host:     processes on every host; None if hosts differ, or nobody gave a number
    directory:    where the processes start
    variables:    the names of the variables that must reach the processes
    as_root:      whether root runs mpirun
    launcher:     how to reach the other hosts, "slurm" or "ssh"; empty for mpirun's own choice
    user_words:   the user's own words for mpirun
    environ:      the environment, in which the user may have made choices, too
    """

    hidden = frozenset({"environ"})

    processes: int
    host_counts: HostCounts = ()
    per_host: int | None = None
    directory: str
    variables: Words = ()
    as_root: bool = False
    launcher: str = ""
    user_words: Words = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class Mpirun(Struct, frozen=True, kw_only=True):
    """One kind of mpirun, and how to express a MpirunRequest on its command line.

    version_pattern:   matches the output of --version; the group is the version
    host_words:        the words that name the hosts, and nothing else
    placement_words:   the words for each block of ranks that place them as `host_counts` says
    directory_option:  the option for the working directory
    export_option:     the option that passes a variable on by its name; empty if all are passed on
    root_option:       the option that root must give
    unbind_words, unbind_env:  words and variables that keep mpirun from binding processes to single cores
    launcher_option:   the option for MpirunRequest.launcher; empty if it needs none
    program:           the program to run instead of the one at this path, which may be a script that runs another
    own_env:           variables that the program at this path needs, by the environment
    binding_choices, placement_choices, launcher_choices:  options without dashes, parameters and variables with which
                       the user decides these instead
    """

    version_pattern: str
    host_words: Callable[[HostCounts], Words]
    placement_words: Callable[[MpirunRequest], tuple[Words, ...]]
    directory_option: str
    export_option: str = ""
    root_option: str = ""
    unbind_words: Words = ()
    unbind_env: Mapping[str, str] = field(default_factory=dict)
    launcher_option: str = ""
    program: Callable[[str], str] = lambda path: path
    own_env: Callable[[str, Mapping[str, str]], Mapping[str, str]] = lambda path, environ: {}
    binding_choices: Words = ()
    placement_choices: Words = ()
    launcher_choices: Words = ()

    def version(self, text: str) -> str:
        """Return the version in the output `text` of --version; empty if the output is another mpirun's."""
        match = re.search(self.version_pattern, text)
        return match[1] if match else ""


def mpirun_argv(mpirun: Mpirun, path: str, request: MpirunRequest, program: Sequence[str]) -> Words:
    """Return the whole command line; each block of ranks ends with the program."""
    words = [path]
    if needs_root_option(mpirun, request):
        words.append(mpirun.root_option)
    if not user_chose(mpirun.binding_choices, request):
        words += mpirun.unbind_words
    if sets_launcher(mpirun, request):
        words += [mpirun.launcher_option, request.launcher]
    if mpirun.export_option:
        words += [word for name in request.variables for word in (mpirun.export_option, name)]
    user_words = request.user_words
    for block in _blocks(mpirun, request):
        words += [*block, mpirun.directory_option, request.directory, *user_words, *program, ":"]
        user_words = ()
    return tuple(words[:-1])


def needs_root_option(mpirun: Mpirun, request: MpirunRequest) -> bool:
    """Whether root runs mpirun without the option that root must give."""
    return request.as_root and bool(mpirun.root_option) and not user_chose((mpirun.root_option.lstrip("-"),), request)


def sets_launcher(mpirun: Mpirun, request: MpirunRequest) -> bool:
    """Whether the command line says how to reach the other hosts."""
    return bool(mpirun.launcher_option and request.launcher) and not user_chose(mpirun.launcher_choices, request)


def user_chose(names: Iterable[str], request: MpirunRequest) -> bool:
    """Whether the user has given one of `names`: options or, if there is an underscore, parameters and variables."""
    named = {*request.user_words, *request.environ}
    return any(name in (named if "_" in name else option_names(request.user_words)) for name in names)


def option_names(words: Iterable[str]) -> set[str]:
    """Return the names of the options among `words`: "map-by" for -map-by, --map-by and --map-by=node."""
    return {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}


def names_hosts(words: Iterable[str]) -> bool:
    """Whether the user's own words for mpirun name its hosts."""
    return bool(option_names(words) & _HOST_OPTIONS)


def _blocks(mpirun: Mpirun, request: MpirunRequest) -> tuple[Words, ...]:
    if not user_chose(mpirun.placement_choices, request):
        return mpirun.placement_words(request)
    hosts = mpirun.host_words(request.host_counts) if request.host_counts else ()
    return (("-n", str(request.processes), *hosts),)


def joined(counts: HostCounts) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts)
