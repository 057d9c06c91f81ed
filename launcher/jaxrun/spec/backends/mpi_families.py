"""The command line of each family of mpirun, made from one table entry per family. Pure.

A family is recognized by the output of --version, not by its path. Variables' values never stand on a command line,
where other users could read them: they travel in mpirun's environment, by name. All entries were tried across hosts,
with Open MPI 4.1.4, 4.1.8 and 5.0.11, MPICH 4.0.2 and 5.0.2, and Intel MPI 2021.18.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.protocol.hidden_fields import HidesFields

Words = tuple[str, ...]
HostCounts = tuple[tuple[str, int], ...]


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


class MpiFamily(Struct, frozen=True, kw_only=True):
    """One kind of mpirun, and how to express a MpirunRequest on its command line.

    engine:            the key in cluster_env.CLUSTER_ENVS of the variables that its processes get
    version_pattern:   matches the output of --version; the group is the version
    host_words:        the words that name the hosts, and nothing else
    placement_words:   the words for each block of ranks that place them as `host_counts` says
    directory_option:  the option for the working directory
    export_option:     the option that passes a variable on by its name; empty if all are passed on
    root_option:       the option that root must give
    unbind_words, unbind_env:  words and variables that keep mpirun from binding processes to single cores
    launcher_option:   the option for MpirunRequest.launcher; empty if it needs none
    sigterm_at_start:  LaunchCommand.sigterm_at_start
    binding_choices, placement_choices, launcher_choices:  options without dashes, parameters and variables with which
                       the user decides these instead
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
    sigterm_at_start: bool = True
    binding_choices: Words = ()
    placement_choices: Words = ()
    launcher_choices: Words = ()

    def version(self, text: str) -> str:
        """Return the version in the output `text` of --version; empty if the output is another family's."""
        match = re.search(self.version_pattern, text)
        return match[1] if match else ""


def identify_family(text: str) -> MpiFamily | None:
    """Return the family whose --version prints `text`; None if there is no such family."""
    return next((family for family in FAMILIES if family.version(text)), None)


def mpirun_argv(family: MpiFamily, path: str, request: MpirunRequest, program: Sequence[str]) -> Words:
    """Return the whole command line; each block of ranks ends with the program."""
    words = [path]
    if needs_root_option(family, request):
        words.append(family.root_option)
    if not user_chose(family.binding_choices, request):
        words += family.unbind_words
    if sets_launcher(family, request):
        words += [family.launcher_option, request.launcher]
    if family.export_option:
        words += [word for name in request.variables for word in (family.export_option, name)]
    user_words = request.user_words
    for block in _blocks(family, request):
        words += [*block, family.directory_option, request.directory, *user_words, *program, ":"]
        user_words = ()
    return tuple(words[:-1])


def needs_root_option(family: MpiFamily, request: MpirunRequest) -> bool:
    """Whether root runs mpirun without the option that root must give."""
    return request.as_root and bool(family.root_option) and not user_chose((family.root_option.lstrip("-"),), request)


def sets_launcher(family: MpiFamily, request: MpirunRequest) -> bool:
    """Whether the command line says how to reach the other hosts."""
    return bool(family.launcher_option and request.launcher) and not user_chose(family.launcher_choices, request)


def user_chose(names: Iterable[str], request: MpirunRequest) -> bool:
    """Whether the user has given one of `names`: options or, if there is an underscore, parameters and variables."""
    named = {*request.user_words, *request.environ}
    return any(name in (named if "_" in name else option_names(request.user_words)) for name in names)


def option_names(words: Iterable[str]) -> set[str]:
    """Return the names of the options among `words`: "map-by" for -map-by, --map-by and --map-by=node."""
    return {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}


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
    """Name a host for each rank: mpirun would sort hosts with slots, this machine first or in Slurm's order."""
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
    """Give each host a block of its own if the numbers differ: Intel MPI ignores numbers in a list of hosts."""
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
OPEN_MPI_5 = replace(
    OPEN_MPI_4,
    version_pattern=r"\((?:Open MPI|OpenRTE)\) ((?:[5-9]|[1-9][0-9]+)\.\S+)",
    placement_words=_open_mpi_5,
    binding_choices=(*_OPEN_MPI_BINDS, "hwloc_default_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"),
    placement_choices=(*_OPEN_MPI_PLACES, "rmaps_default_mapping_policy", "PRTE_MCA_rmaps_default_mapping_policy"),
)
# Hydra passes all variables on. With -genvlist, MPICH silently loses the last variable of its environment.
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
    # Until its child has a process group of its own, a hydra_pmi_proxy forwards a SIGTERM to itself, forever.
    sigterm_at_start=False,
    placement_choices=_HYDRA_PLACES,
    launcher_choices=_HYDRA_LAUNCHES,
)
FAMILIES = (OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL)
