"""What each kind of mpirun wants to be told: a table for each, and the command line made from it. All of it is pure.

A kind is known by what its --version says, as a path says nothing. Values of variables stand on no command line, where
other users could read them: they travel in mpirun's environment, by name. What is said here of a kind has been tried
across hosts with Open MPI 4.1.4, 4.1.8 and 5.0.11, MPICH 4.0.2 and 5.0.2, and Intel MPI 2021.18.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Words = tuple[str, ...]
HostCounts = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MpirunRequest:
    """What an mpirun is to start.

    processes:  of them all
    counts:     the hosts in the order of the ranks, with the processes of each; empty where mpirun knows its hosts
    per_host:   processes on every host; None where that differs, or nobody said
    directory:  where the processes start
    names:      the variables that must reach them
    root:       mpirun is run by root
    launcher:   how to reach the other hosts, "slurm" or "ssh"; empty for mpirun's own choice
    more:       the user's own words for mpirun
    given:      the environment, in which the user may have made choices too
    """

    processes: int
    host_counts: HostCounts = ()
    per_host: int | None = None
    directory: str
    variables: Words = ()
    as_root: bool = False
    launcher: str = ""
    user_words: Words = ()
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiFamily:
    """One kind of mpirun.

    engine:     the key of its variables in surroundings.ENGINES
    says:       what its --version says, the version being the group
    listed:     the words that name the hosts, and no more
    placed:     the words for each block of ranks that put them where `counts` says
    directory:  the option for the working directory
    export:     the option that passes a variable on by its name; empty where all are passed on
    as_root:    the option that root must give
    unbound, unbound_env:  the words and the variables that keep processes off single cores
    launcher:   the option for Request.launcher; empty where it needs none
    binds, places, launches:  options without their dashes, parameters and variables by which the user chooses instead
    """

    title: str
    engine: str
    version_pattern: str
    host_words: Callable[[HostCounts], Words]
    placement_words: Callable[[MpirunRequest], tuple[Words, ...]]
    directory_option: str
    export_option: str = ""
    root_option: str = ""
    unbind_words: Words = ()
    unbind_env: Mapping[str, str] = field(default_factory=dict)
    launcher_option: str = ""
    binding_choices: Words = ()
    placement_choices: Words = ()
    launcher_choices: Words = ()

    def version(self, text: str) -> str:
        """The version that is said in `text`; empty where that is not this family's."""
        match = re.search(self.version_pattern, text)
        return match[1] if match else ""


def identify_family(text: str) -> MpiFamily | None:
    """The family whose --version says `text`."""
    return next((family for family in FAMILIES if family.version(text)), None)


def mpirun_argv(family: MpiFamily, path: str, request: MpirunRequest, program: Sequence[str]) -> Words:
    """The whole command line; where there is more than one block, each has the program at its end."""
    words = [path]
    if needs_root_option(family, request):
        words.append(family.root_option)
    if not user_chose(family.binding_choices, request):
        words += family.unbind_words
    if sets_launcher(family, request):
        words += [family.launcher_option, request.launcher]
    if family.export_option:
        words += [word for name in request.variables for word in (family.export_option, name)]
    more = request.user_words
    for block in _blocks(family, request):
        words += [*block, family.directory_option, request.directory, *more, *program, ":"]
        more = ()
    return tuple(words[:-1])


def needs_root_option(family: MpiFamily, request: MpirunRequest) -> bool:
    """Whether root needs an option, and has not given it."""
    return request.as_root and bool(family.root_option) and not user_chose((family.root_option.lstrip("-"),), request)


def sets_launcher(family: MpiFamily, request: MpirunRequest) -> bool:
    """Whether it is told how to reach the other hosts."""
    return bool(family.launcher_option and request.launcher) and not user_chose(family.launcher_choices, request)


def user_chose(names: Iterable[str], request: MpirunRequest) -> bool:
    """Whether the user has made one of these choices; a name with an underline is a parameter's or a variable's."""
    named = {*request.user_words, *request.environ}
    return any(name in (named if "_" in name else option_names(request.user_words)) for name in names)


def option_names(more: Iterable[str]) -> set[str]:
    """The names of the options among these words of the user's: "map-by" for -map-by, --map-by and --map-by=node."""
    return {word.lstrip("-").partition("=")[0] for word in more if word.startswith("-")}


def _blocks(family: MpiFamily, request: MpirunRequest) -> tuple[Words, ...]:
    if not user_chose(family.placement_choices, request):
        return family.placement_words(request)
    hosts = family.host_words(request.host_counts) if request.host_counts else ()
    return (("-n", str(request.processes), *hosts),)


def _joined(counts: HostCounts) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts)


def _open_mpi_hosts(counts: HostCounts) -> Words:
    return ("--host", _joined(counts))


def _open_mpi_4(request: MpirunRequest) -> tuple[Words, ...]:
    """By a host for each rank: a list of hosts with slots it sorts, this machine first or as Slurm lists them."""
    if not request.host_counts:
        return _open_mpi_5(request)
    each = ",".join(name for name, count in request.host_counts for _ in range(count))
    return (("-n", str(request.processes), "--host", each, "--map-by", "seq:oversubscribe"),)


def _open_mpi_5(request: MpirunRequest) -> tuple[Words, ...]:
    hosts = _open_mpi_hosts(request.host_counts) if request.host_counts else ()
    by = f"ppr:{request.per_host}:node" if request.per_host else "slot"
    return (("-n", str(request.processes), *hosts, "--map-by", f"{by}:oversubscribe"),)


def _mpich_hosts(counts: HostCounts) -> Words:
    return ("-hosts", _joined(counts))


def _mpich(request: MpirunRequest) -> tuple[Words, ...]:
    hosts = _mpich_hosts(request.host_counts) if request.host_counts else _per_host(request)
    return (("-n", str(request.processes), *hosts),)


def _intel_hosts(counts: HostCounts) -> Words:
    return ("-hosts", ",".join(name for name, _ in counts))


def _intel(request: MpirunRequest) -> tuple[Words, ...]:
    """It takes no notice of numbers in a list of hosts: where they differ, each host has a block of its own."""
    if request.host_counts and request.per_host is None:
        return tuple(("-n", str(count), "-host", name) for name, count in request.host_counts)
    hosts = _intel_hosts(request.host_counts) if request.host_counts else ()
    return (("-n", str(request.processes), *hosts, *_per_host(request)),)


def _per_host(request: MpirunRequest) -> Words:
    return ("-ppn", str(request.per_host)) if request.per_host else ()


_OPEN_MPI_BINDS = ("bind-to", "bind-to-core", "bind-to-socket", "cpu-set", "cpu-list", "rankfile", "rf")
_OPEN_MPI_PLACES = ("map-by", "npernode", "N", "ppr", "pernode", "npersocket", "bynode", "byslot", "rankfile", "rf")
_HYDRA_PLACES = ("ppn", "perhost", "map-by", "rankmap", "rr", "grr", "order-nodes")
_HYDRA_LAUNCHES = ("launcher", "bootstrap", "rmk", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP")

OPEN_MPI_4 = MpiFamily(
    title="Open MPI",
    engine="open-mpi",
    version_pattern=r"\((?:Open MPI|OpenRTE)\) ([1-4]\.\S+)",
    host_words=_open_mpi_hosts,
    placement_words=_open_mpi_4,
    directory_option="--wdir",
    export_option="-x",
    root_option="--allow-run-as-root",
    unbind_words=("--bind-to", "none"),
    binding_choices=(*_OPEN_MPI_BINDS, "hwloc_base_binding_policy", "OMPI_MCA_hwloc_base_binding_policy"),
    placement_choices=(*_OPEN_MPI_PLACES, "rmaps_base_mapping_policy", "OMPI_MCA_rmaps_base_mapping_policy"),
)
OPEN_MPI_5 = MpiFamily(
    title="Open MPI",
    engine="open-mpi",
    version_pattern=r"\((?:Open MPI|OpenRTE)\) ((?:[5-9]|[1-9][0-9]+)\.\S+)",
    host_words=_open_mpi_hosts,
    placement_words=_open_mpi_5,
    directory_option="--wdir",
    export_option="-x",
    root_option="--allow-run-as-root",
    unbind_words=("--bind-to", "none"),
    binding_choices=(*_OPEN_MPI_BINDS, "hwloc_default_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"),
    placement_choices=(*_OPEN_MPI_PLACES, "rmaps_default_mapping_policy", "PRTE_MCA_rmaps_default_mapping_policy"),
)
# Hydra passes all variables on. With -genvlist MPICH loses the last one of its environment, without a word.
MPICH = MpiFamily(
    title="MPICH",
    engine="hydra",
    version_pattern=r"HYDRA build details:\s+Version:\s+(\S+)",
    host_words=_mpich_hosts,
    placement_words=_mpich,
    directory_option="-wdir",
    launcher_option="-launcher",
    placement_choices=_HYDRA_PLACES,
    launcher_choices=_HYDRA_LAUNCHES,
)
INTEL = MpiFamily(
    title="Intel MPI",
    engine="hydra",
    version_pattern=r"Intel\(R\) MPI Library.*Version (\S+)",
    host_words=_intel_hosts,
    placement_words=_intel,
    directory_option="-wdir",
    unbind_env={"I_MPI_PIN": "0"},
    binding_choices=(
        "bind-to",
        "cpu-bind",
        "I_MPI_PIN",
        "I_MPI_PIN_CELL",
        "I_MPI_PIN_DOMAIN",
        "I_MPI_PIN_PROCESSOR_LIST",
    ),
    launcher_option="-launcher",
    placement_choices=_HYDRA_PLACES,
    launcher_choices=_HYDRA_LAUNCHES,
)
FAMILIES = (OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL)
