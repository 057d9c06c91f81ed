"""Checks whether NCCL will find the fast network of the hosts, and which variables keep NCCL or JAX from using it.

Pure. `jaxrun doctor` prints the findings, and so does, in one line, the start of a job with GPUs on several hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxrun.analysis.diagnosis.findings import Finding, describe_values, ok, warning
from jaxrun.protocol.probe_messages import FabricFacts
from jaxrun.text import plural

CXI, INFINIBAND = "cxi", "infiniband"  # kinds of NICs; NCCL needs a plugin for the first
_FABRIC_INTERFACE = re.compile("hsn[0-9]")
_VARIABLES = re.compile("(NCCL|FI|JAX)_.*|SLURM_GPUS_PER_TASK|MPICH_GPU_SUPPORT_ENABLED|LD_LIBRARY_PATH")
# Set in scripts for JAX, which never reads them.
_UNREAD = (
    "JAX_PROCESS_INDEX", "JAX_LOCAL_PROCESS_INDEX", "JAX_NODE_RANK", "JAX_PROCESS_COUNT",
    "JAX_COORDINATOR_ADDR", "JAX_DIST_ADDR", "JAX_DIST_PORT", "JAX_USE_PJRT_CUDA_DEVICE",
)  # fmt: skip
_OF_EACH_RANK = ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX", "JAX_LOCAL_PROCESS_INDEX", "JAX_NODE_RANK")

Reports = Sequence[tuple[str, FabricFacts]]  # (host, facts) for each agent, the first rank's first
Problem = tuple[str, str]  # what is wrong, and what to do about it


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide by which network NCCL sends, and those that the checks look at."""
    return {name: value for name, value in environ.items() if _VARIABLES.fullmatch(name)}


def plugin_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names under which NCCL looks for a net plugin, in NCCL's order; a path counts as a name."""
    chosen = environ.get("NCCL_NET_PLUGIN", "")
    if chosen == "none":
        return ()
    named = [(one, f"libnccl-net-{one}.so", f"librccl-net-{one}.so") for one in chosen.split(",") if one]
    return tuple(name for names in named for name in names) or ("libnccl-net.so", "librccl-net.so")


def check_fabric(reports: Reports) -> Iterator[Finding]:
    """Yield what NCCL has for the network between hosts with GPUs, and problems of it and of the ranks' variables."""
    hosts = {host: facts for host, facts in reversed(reports) if facts.gpus}
    if len(hosts) > 1 or any(facts.nics for facts in hosts.values()):
        yield ok(describe_values({host: _describe(facts) for host, facts in sorted(hosts.items())}))
        yield from _by_host((host, problem) for host in sorted(hosts) for problem in _check_host(hosts[host]))
    values = [facts.variables for _, facts in reports]
    expanded = [name for name in _OF_EACH_RANK if len(values) > 1 and {of.get(name) for of in values} == {"0"}]
    if expanded:
        text = f"{', '.join(expanded)}: 0 in all ranks, as $SLURM_PROCID is in a batch script"
        yield warning(text, "leave out: jaxrun tells JAX the rank of each process")
    if unread := [name for name in _UNREAD if name not in expanded and any(name in of for of in values)]:
        yield warning(f"{', '.join(unread)}: not read by JAX", "leave out: jaxrun tells JAX ranks and coordinator")
    yield from _by_host(_check_gpus(reports))


def _by_host(problems: Iterable[tuple[str, Problem]]) -> Iterator[Finding]:
    hosts: dict[Problem, dict[str, None]] = {}
    for host, problem in problems:
        hosts.setdefault(problem, {})[host] = None
    return (warning(f"{', '.join(named)}: {text}", advice) for (text, advice), named in hosts.items())


def _describe(facts: FabricFacts) -> str:
    """Write, for example, `4 NICs (cxi0 to cxi3), net plugin /opt/lib/libnccl-net.so`."""
    names = _fabric_names(facts)
    if not names:
        return "no fabric, so NCCL uses TCP"
    shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{plural(len(names), 'NIC')} ({shown}), {f'net plugin {facts.plugin}' if facts.plugin else 'no net plugin'}"


def _fabric_names(facts: FabricFacts) -> list[str]:
    return sorted(facts.nics) or [name for name in facts.interfaces if _FABRIC_INTERFACE.fullmatch(name)]


def _check_host(facts: FabricFacts) -> Iterator[Problem]:
    given, names, kinds = facts.variables, _fabric_names(facts), set(facts.nics.values())
    network, provider = given.get("NCCL_NET", ""), given.get("FI_PROVIDER", "")
    yield from _check_plugin(facts)
    if names and not facts.nics:
        text = f"{names[0]} exists, but neither /sys/class/cxi nor /sys/class/infiniband does: NCCL uses TCP"
        yield text, "does a container hide the devices of the fabric?"
    if names and network.lower() == "socket":
        yield f"NCCL_NET={network}: NCCL uses TCP in spite of {names[0]}", "leave NCCL_NET out"
    if network.lower() == "ib" and INFINIBAND not in kinds:
        yield f"NCCL_NET={network}, but there is no InfiniBand", "leave NCCL_NET out"
    wanted = given.get("NCCL_SOCKET_IFNAME", "")
    if wanted and not _selects(wanted, facts.interfaces):
        there = ", ".join(facts.interfaces)
        yield f"NCCL_SOCKET_IFNAME={wanted} names no interface of this host", f"one of {there}, or leave it out"
    if CXI in kinds and provider and CXI not in provider:
        yield f"FI_PROVIDER={provider}: libfabric does not use {names[0]} then", f"--env FI_PROVIDER={CXI}"
    for_cxi = [name for name in given if name.startswith("FI_CXI_") or (name, provider) == ("FI_PROVIDER", CXI)]
    if for_cxi and CXI not in kinds:
        yield f"{for_cxi[0]} is set, but /sys/class/cxi has no NIC", "leave it out where there is no Slingshot"
    if facts.replaced_nccl:
        text = f"LD_LIBRARY_PATH replaces the NCCL that was installed with JAX by {facts.replaced_nccl}"
        yield text, "put only the directory of the net plugin on it"
    if given.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        text = "MPICH_GPU_SUPPORT_ENABLED=1: MPI on GPUs and NCCL can wait for each other forever"
        yield text, "--env MPICH_GPU_SUPPORT_ENABLED=0, unless the program sends GPU arrays by MPI"


def _check_plugin(facts: FabricFacts) -> Iterator[Problem]:
    """Check that a plugin is where NCCL looks for it, if the NICs need one or NCCL_NET names one."""
    network, names = facts.variables.get("NCCL_NET", ""), plugin_names(facts.variables)
    wanted = next((name for name, kind in sorted(facts.nics.items()) if kind == CXI), "")
    if network.lower() not in ("", "ib", "socket"):
        wanted = f"NCCL_NET={network}"
    if facts.plugin or not wanted:
        return
    if facts.plugins:
        suffix = re.search(r"lib[nr]ccl-net-(.+?)\.so", facts.plugins[0])
        advice = f"--env NCCL_NET_PLUGIN={suffix[1]}" if suffix else "leave NCCL_NET_PLUGIN out"
        yield f"NCCL looks for {names[0] if names else 'no net plugin'}, but there is {facts.plugins[0]}", advice
    else:
        text = f"{wanted} needs a net plugin, but the ranks would find no libnccl-net*.so"
        yield text, "--env LD_LIBRARY_PATH=DIR of the plugin, which is aws-ofi-nccl for Slingshot"


def _selects(value: str, there: Iterable[str]) -> bool:
    """Whether NCCL's list selects any of these names: "hsn,eth" are prefixes, "=eth0" a name, "^lo" all others."""
    but, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    wanted = [entry.partition(":")[0] for entry in value.split(",") if entry]
    return any(but != any(name == one if exact else name.startswith(one) for one in wanted) for name in there)


def _check_gpus(ranks: Reports) -> Iterator[tuple[str, Problem]]:
    """Check on each host whether its ranks see different GPUs."""
    for host in dict.fromkeys(host for host, _ in ranks):
        there = [facts for at, facts in ranks if at == host]
        if len({facts.gpus for facts in there}) > 1:
            by_slurm = "SLURM_GPUS_PER_TASK" in there[0].variables
            why = "by --gpus-per-task, without NVLink" if by_slurm else "does a wrapper set CUDA_VISIBLE_DEVICES?"
            advice = "--gpus-per-node=N --gpu-bind=none for srun, and no wrapper: jaxrun divides the GPUs"
            yield host, (f"its ranks see different GPUs: {why}", advice)
