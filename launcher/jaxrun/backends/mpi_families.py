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
Counts = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
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
    counts: Counts = ()
    per_host: int | None = None
    directory: str
    names: Words = ()
    root: bool = False
    launcher: str = ""
    more: Words = ()
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
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
    says: str
    listed: Callable[[Counts], Words]
    placed: Callable[[Request], tuple[Words, ...]]
    directory: str
    export: str = ""
    as_root: str = ""
    unbound: Words = ()
    unbound_env: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    binds: Words = ()
    places: Words = ()
    launches: Words = ()

    def version(self, text: str) -> str:
        """The version that is said in `text`; empty where that is not this family's."""
        match = re.search(self.says, text)
        return match[1] if match else ""


def identify(text: str) -> Family | None:
    """The family whose --version says `text`."""
    return next((family for family in FAMILIES if family.version(text)), None)


def command(family: Family, path: str, request: Request, program: Sequence[str]) -> Words:
    """The whole command line; where there is more than one block, each has the program at its end."""
    words = [path]
    if wants_root(family, request):
        words.append(family.as_root)
    if not chosen(family.binds, request):
        words += family.unbound
    if uses_launcher(family, request):
        words += [family.launcher, request.launcher]
    if family.export:
        words += [word for name in request.names for word in (family.export, name)]
    more = request.more
    for block in _blocks(family, request):
        words += [*block, family.directory, request.directory, *more, *program, ":"]
        more = ()
    return tuple(words[:-1])


def wants_root(family: Family, request: Request) -> bool:
    """Whether root needs an option, and has not given it."""
    return request.root and bool(family.as_root) and not chosen((family.as_root.lstrip("-"),), request)


def uses_launcher(family: Family, request: Request) -> bool:
    """Whether it is told how to reach the other hosts."""
    return bool(family.launcher and request.launcher) and not chosen(family.launches, request)


def chosen(names: Iterable[str], request: Request) -> bool:
    """Whether the user has made one of these choices; a name with an underline is a parameter's or a variable's."""
    named = {*request.more, *request.given}
    return any(name in (named if "_" in name else options(request.more)) for name in names)


def options(more: Iterable[str]) -> set[str]:
    """The names of the options among these words of the user's: "map-by" for -map-by, --map-by and --map-by=node."""
    return {word.lstrip("-").partition("=")[0] for word in more if word.startswith("-")}


def _blocks(family: Family, request: Request) -> tuple[Words, ...]:
    if not chosen(family.places, request):
        return family.placed(request)
    hosts = family.listed(request.counts) if request.counts else ()
    return (("-n", str(request.processes), *hosts),)


def _joined(counts: Counts) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts)


def _open_mpi_hosts(counts: Counts) -> Words:
    return ("--host", _joined(counts))


def _open_mpi_4(request: Request) -> tuple[Words, ...]:
    """By a host for each rank: a list of hosts with slots it sorts, this machine first or as Slurm lists them."""
    if not request.counts:
        return _open_mpi_5(request)
    each = ",".join(name for name, count in request.counts for _ in range(count))
    return (("-n", str(request.processes), "--host", each, "--map-by", "seq:oversubscribe"),)


def _open_mpi_5(request: Request) -> tuple[Words, ...]:
    hosts = _open_mpi_hosts(request.counts) if request.counts else ()
    by = f"ppr:{request.per_host}:node" if request.per_host else "slot"
    return (("-n", str(request.processes), *hosts, "--map-by", f"{by}:oversubscribe"),)


def _mpich_hosts(counts: Counts) -> Words:
    return ("-hosts", _joined(counts))


def _mpich(request: Request) -> tuple[Words, ...]:
    hosts = _mpich_hosts(request.counts) if request.counts else _per_host(request)
    return (("-n", str(request.processes), *hosts),)


def _intel_hosts(counts: Counts) -> Words:
    return ("-hosts", ",".join(name for name, _ in counts))


def _intel(request: Request) -> tuple[Words, ...]:
    """It takes no notice of numbers in a list of hosts: where they differ, each host has a block of its own."""
    if request.counts and request.per_host is None:
        return tuple(("-n", str(count), "-host", name) for name, count in request.counts)
    hosts = _intel_hosts(request.counts) if request.counts else ()
    return (("-n", str(request.processes), *hosts, *_per_host(request)),)


def _per_host(request: Request) -> Words:
    return ("-ppn", str(request.per_host)) if request.per_host else ()


_OPEN_MPI_BINDS = ("bind-to", "bind-to-core", "bind-to-socket", "cpu-set", "cpu-list", "rankfile", "rf")
_OPEN_MPI_PLACES = ("map-by", "npernode", "N", "ppr", "pernode", "npersocket", "bynode", "byslot", "rankfile", "rf")
_HYDRA_PLACES = ("ppn", "perhost", "map-by", "rankmap", "rr", "grr", "order-nodes")
_HYDRA_LAUNCHES = ("launcher", "bootstrap", "rmk", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP")

OPEN_MPI_4 = Family(
    title="Open MPI",
    engine="open-mpi",
    says=r"\((?:Open MPI|OpenRTE)\) ([1-4]\.\S+)",
    listed=_open_mpi_hosts,
    placed=_open_mpi_4,
    directory="--wdir",
    export="-x",
    as_root="--allow-run-as-root",
    unbound=("--bind-to", "none"),
    binds=(*_OPEN_MPI_BINDS, "hwloc_base_binding_policy", "OMPI_MCA_hwloc_base_binding_policy"),
    places=(*_OPEN_MPI_PLACES, "rmaps_base_mapping_policy", "OMPI_MCA_rmaps_base_mapping_policy"),
)
OPEN_MPI_5 = Family(
    title="Open MPI",
    engine="open-mpi",
    says=r"\((?:Open MPI|OpenRTE)\) ((?:[5-9]|[1-9][0-9]+)\.\S+)",
    listed=_open_mpi_hosts,
    placed=_open_mpi_5,
    directory="--wdir",
    export="-x",
    as_root="--allow-run-as-root",
    unbound=("--bind-to", "none"),
    binds=(*_OPEN_MPI_BINDS, "hwloc_default_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"),
    places=(*_OPEN_MPI_PLACES, "rmaps_default_mapping_policy", "PRTE_MCA_rmaps_default_mapping_policy"),
)
# Hydra passes all variables on. With -genvlist MPICH loses the last one of its environment, without a word.
MPICH = Family(
    title="MPICH",
    engine="hydra",
    says=r"HYDRA build details:\s+Version:\s+(\S+)",
    listed=_mpich_hosts,
    placed=_mpich,
    directory="-wdir",
    launcher="-launcher",
    places=_HYDRA_PLACES,
    launches=_HYDRA_LAUNCHES,
)
INTEL = Family(
    title="Intel MPI",
    engine="hydra",
    says=r"Intel\(R\) MPI Library.*Version (\S+)",
    listed=_intel_hosts,
    placed=_intel,
    directory="-wdir",
    unbound_env={"I_MPI_PIN": "0"},
    binds=("bind-to", "cpu-bind", "I_MPI_PIN", "I_MPI_PIN_CELL", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST"),
    launcher="-launcher",
    places=_HYDRA_PLACES,
    launches=_HYDRA_LAUNCHES,
)
FAMILIES = (OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL)
