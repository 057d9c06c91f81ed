"""Open MPI 4 and 5: its mpirun, the variables of its ranks, and its words.

Tried across hosts with 4.1.4, 4.1.8 and 5.0.11. mpirun ends everything as soon as one process ends with an error.
"""

from __future__ import annotations

from msgspec.structs import replace

from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.spec.engines.engine import Engine, LaunchOutput, RankVariables
from jaxrun.spec.engines.mpirun_words import HostCounts, Mpirun, MpirunRequest, Words, joined

_BINDS = ("bind-to", "bind-to-core", "bind-to-socket", "cpu-set", "cpu-list", "rankfile", "rf")
_PLACES = ("map-by", "npernode", "N", "ppr", "pernode", "npersocket", "bynode", "byslot", "rankfile", "rf")
# How Open MPI 4 and 5 write a rank: [[12345,1],3], [prterun-h1-12345@1,3].
_RANK_IN_OUTPUT = lazy_pattern(r"Process name: \[\S*,(\d{1,9})\]")


def _hosts(counts: HostCounts) -> Words:
    return ("--host", joined(counts))


def _place_4(request: MpirunRequest) -> tuple[Words, ...]:
    """Name a host for each rank: mpirun would sort hosts with slots, this machine first or in Slurm's order."""
    if not request.host_counts:
        return _place_5(request)
    each = ",".join(name for name, count in request.host_counts for _ in range(count))
    return (("-n", str(request.processes), "--host", each, "--map-by", "seq:oversubscribe"),)


def _place_5(request: MpirunRequest) -> tuple[Words, ...]:
    hosts = _hosts(request.host_counts) if request.host_counts else ()
    by = f"ppr:{request.per_host}:node" if request.per_host else "slot"
    return (("-n", str(request.processes), *hosts, "--map-by", f"{by}:oversubscribe"),)


def _read_output(text: str) -> LaunchOutput:
    return LaunchOutput(text.splitlines(), named_ranks=[int(number) for number in _RANK_IN_OUTPUT.findall(text)])


MPIRUN_4 = Mpirun(
    version_pattern=r"\((?:Open MPI|OpenRTE)\) ([1-4]\.\S+)",
    host_words=_hosts,
    placement_words=_place_4,
    directory_option="--wdir",
    export_option="-x",
    root_option="--allow-run-as-root",
    unbind_words=("--bind-to", "none"),
    binding_choices=(*_BINDS, "hwloc_base_binding_policy", "OMPI_MCA_hwloc_base_binding_policy"),
    placement_choices=(*_PLACES, "rmaps_base_mapping_policy", "OMPI_MCA_rmaps_base_mapping_policy"),
)
MPIRUN_5 = replace(
    MPIRUN_4,
    version_pattern=r"\((?:Open MPI|OpenRTE)\) ((?:[5-9]|[1-9][0-9]+)\.\S+)",
    placement_words=_place_5,
    binding_choices=(*_BINDS, "hwloc_default_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"),
    placement_choices=(*_PLACES, "rmaps_default_mapping_policy", "PRTE_MCA_rmaps_default_mapping_policy"),
)
OPEN_MPI = Engine(
    key="open-mpi",
    title="Open MPI",
    command="mpirun",
    ranks=RankVariables(rank="OMPI_COMM_WORLD_RANK", size="OMPI_COMM_WORLD_SIZE", job=("PMIX_NAMESPACE",)),
    mpirun=(MPIRUN_4, MPIRUN_5),
    agents_stay=True,
    read_output=_read_output,
)
