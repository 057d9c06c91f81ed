"""The network between GPU hosts: what doctor says to the recipes of sites, and a job in one line at its start."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from simulation import make_registry, report

from jaxrun.analysis.diagnosis.findings import Level
from jaxrun.frontends.doctor.doctor_report import judge
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.node.agent.fabric_probe import collect_fabric_facts
from jaxrun.protocol.probe_messages import FabricFacts, HostFacts

PLUGIN = "/opt/aws-ofi-nccl/lib/libnccl-net.so"
SLINGSHOT = FabricFacts(
    nics={f"cxi{number}": "cxi" for number in range(4)},
    interfaces=("lo", *(f"hsn{number}" for number in range(4))),
    gpus=("G0", "G1", "G2", "G3"),
    plugins=(PLUGIN,),
    plugin=PLUGIN,
)
NO_PLUGIN = replace(SLINGSHOT, plugins=(), plugin="")
INFINIBAND = replace(NO_PLUGIN, nics={"mlx5_0": "infiniband"}, interfaces=("lo", "ib0"))
ETHERNET = replace(NO_PLUGIN, nics={}, interfaces=("lo", "eth0"))
PERLMUTTER = {"NCCL_SOCKET_IFNAME": "hsn", "NCCL_NET": "AWS Libfabric", "NCCL_NET_GDR_LEVEL": "PHB",
    "FI_CXI_DISABLE_HOST_REGISTER": "1"}  # fmt: skip
ALPS = {"NCCL_NET": "AWS Libfabric", "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_PROTO": "^LL128", "NCCL_CROSS_NIC": "1",
    "FI_CXI_DISABLE_HOST_REGISTER": "1", "FI_CXI_RX_MATCH_MODE": "software", "FI_MR_CACHE_MONITOR": "userfaultfd",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072", "FI_CXI_DEFAULT_TX_SIZE": "32768",
    "MPICH_GPU_SUPPORT_ENABLED": "0"}  # fmt: skip
LISTED = "NCCL_NET=AWS Libfabric needs a net plugin, but the ranks would find no libnccl-net*.so"
NEEDED = "cxi0 needs a net plugin, but the ranks would find no libnccl-net*.so"
BY_MPI = "MPICH_GPU_SUPPORT_ENABLED=1: MPI on GPUs and NCCL can wait for each other forever"
BY_WRAPPER = "n1: its ranks see different GPUs: does a wrapper set CUDA_VISIBLE_DEVICES?"
BOTH = "n1, n2"


def at(facts, *hosts, **variables):
    """An observation of one rank on each of the hosts, which all find the same."""
    there = replace(facts, variables=variables)
    return Observation(facts={rank: HostFacts(rank, 0.0, host, fabric=there) for rank, host in enumerate(hosts)})


def on(facts, **variables):
    return at(facts, "n1", "n2", **variables)


def of_each_rank(facts, each, proxies=None, **variables):
    """Four ranks on a host: the fields of their facts, and variables, are those of `each`."""
    found = {}
    for rank, (gpus, own) in enumerate(each):
        there = replace(facts, gpus=gpus, variables={**variables, **own})
        found[rank] = HostFacts(rank, 0.0, "n1", proxies=proxies or {}, fabric=there)
    return Observation(facts=found)


def pinned():
    """The GPUs and variables of ranks that each see one GPU."""
    return [((f"G{rank}",), {}) for rank in range(4)]


def said(observation, check="fabric"):
    return [(one.level, one.text) for name, one in judge(observation) if name == check]


def wrong(observation):
    return [text for level, text in said(observation) if level is not Level.OK]


# The recipes that sites publish and what is wrong with each, by the words of doctor.
SITES = {
    "Perlmutter": (on(SLINGSHOT, **PERLMUTTER), []),
    "Perlmutter, module load nccl": (
        on(replace(SLINGSHOT, replaced_nccl="/opt/nccl/2.24/lib/libnccl.so.2"), **PERLMUTTER),
        [f"{BOTH}: LD_LIBRARY_PATH replaces the NCCL that was installed with JAX by /opt/nccl/2.24/lib/libnccl.so.2"],
    ),
    "Perlmutter, without the plugin": (on(NO_PLUGIN, **PERLMUTTER), [f"{BOTH}: {LISTED}"]),
    "Alps": (on(SLINGSHOT, **ALPS), []),
    "Alps, MPI on GPUs": (on(SLINGSHOT, **ALPS | {"MPICH_GPU_SUPPORT_ENABLED": "1"}), [f"{BOTH}: {BY_MPI}"]),
    "Polaris": (
        on(NO_PLUGIN, MPICH_GPU_SUPPORT_ENABLED="1"),
        [f"{BOTH}: {NEEDED}", f"{BOTH}: {BY_MPI}"],
    ),
    "Derecho": (
        of_each_rank(NO_PLUGIN, pinned(), MPICH_GPU_SUPPORT_ENABLED="1"),
        [f"n1: {NEEDED}", f"n1: {BY_MPI}", BY_WRAPPER],
    ),
    "Frontier": (
        of_each_rank(NO_PLUGIN, pinned(), SLURM_GPUS_PER_TASK="1"),
        [f"n1: {NEEDED}",
         "n1: its ranks see different GPUs: by --gpus-per-task, without NVLink"],
    ),
    "scripts that expand $SLURM_PROCID": (
        on(SLINGSHOT, JAX_PROCESS_INDEX="0", JAX_PROCESS_COUNT="2"),
        ["JAX_PROCESS_INDEX: 0 in all ranks, as $SLURM_PROCID is in a batch script",
         "JAX_PROCESS_COUNT: not read by JAX"],
    ),
}  # fmt: skip
# Other contradictions.
CASES = {
    "a plugin of another name": (
        on(replace(NO_PLUGIN, plugins=("/opt/lib/libnccl-net-ofi.so",))),
        [f"{BOTH}: NCCL looks for libnccl-net.so, but there is /opt/lib/libnccl-net-ofi.so"],
    ),
    "no plugin wanted": (
        on(replace(SLINGSHOT, plugin=""), NCCL_NET_PLUGIN="none"),
        [f"{BOTH}: NCCL looks for no net plugin, but there is {PLUGIN}"],
    ),
    "TCP by choice": (on(SLINGSHOT, NCCL_NET="Socket"), [f"{BOTH}: NCCL_NET=Socket: NCCL uses TCP in spite of cxi0"]),
    "InfiniBand by choice": (on(SLINGSHOT, NCCL_NET="IB"), [f"{BOTH}: NCCL_NET=IB, but there is no InfiniBand"]),
    "InfiniBand": (on(INFINIBAND, NCCL_SOCKET_IFNAME="ib,eth"), []),
    "no such interface": (
        on(INFINIBAND, NCCL_SOCKET_IFNAME="hsn"),
        [f"{BOTH}: NCCL_SOCKET_IFNAME=hsn names no interface of this host"],
    ),
    "no prefix": (
        on(INFINIBAND, NCCL_SOCKET_IFNAME="=ib"),
        [f"{BOTH}: NCCL_SOCKET_IFNAME==ib names no interface of this host"],
    ),
    "all but one": (on(INFINIBAND, NCCL_SOCKET_IFNAME="^lo"), []),
    "another provider": (
        on(SLINGSHOT, FI_PROVIDER="tcp"),
        [f"{BOTH}: FI_PROVIDER=tcp: libfabric does not use cxi0 then"],
    ),
    "variables of Slingshot elsewhere": (
        on(INFINIBAND, FI_CXI_DISABLE_HOST_REGISTER="1"),
        [f"{BOTH}: FI_CXI_DISABLE_HOST_REGISTER is set, but /sys/class/cxi has no NIC"],
    ),
    "hidden devices": (
        on(replace(NO_PLUGIN, nics={})),
        [f"{BOTH}: hsn0 exists, but neither /sys/class/cxi nor /sys/class/infiniband does: NCCL uses TCP"],
    ),
    "a plugin for Ethernet": (on(ETHERNET, NCCL_NET="AWS Libfabric"), [f"{BOTH}: {LISTED}"]),
    "hidden GPUs": (
        of_each_rank(SLINGSHOT, pinned()),
        [BY_WRAPPER],
    ),
    "ranks with ranks": (of_each_rank(SLINGSHOT, [(SLINGSHOT.gpus, {"JAX_PROCESS_ID": str(n)}) for n in (0, 1)]), []),
    "Ethernet": (on(ETHERNET), []),
}  # fmt: skip


@pytest.mark.parametrize(("observation", "texts"), [*SITES.values(), *CASES.values()], ids=[*SITES, *CASES])
def test_what_contradicts_the_fabric_is_named_with_its_hosts(observation, texts):
    assert wrong(observation) == texts


def test_nics_and_plugin_are_listed_if_all_is_well_and_nothing_if_hosts_are_not_connected_by_a_fabric():
    told = f"4 NICs (cxi0 to cxi3), net plugin {PLUGIN}"
    assert said(on(SLINGSHOT)) == said(at(SLINGSHOT, "n1")) == [(Level.OK, told)]
    assert said(on(INFINIBAND)) == [(Level.OK, "1 NIC (mlx5_0), no net plugin")]
    assert said(on(ETHERNET)) == [(Level.OK, "no fabric, so NCCL uses TCP")]
    assert said(at(ETHERNET, "n1")) == said(on(replace(SLINGSHOT, gpus=()))) == []


def test_a_proxy_of_frontier_is_reported_and_not_used():
    observation = of_each_rank(SLINGSHOT, pinned(), proxies={"all_proxy": "socks://proxy:3128"})
    told = "all_proxy=socks://proxy:3128; jaxrun's own connections bypass it"
    assert said(observation, "proxies") == [(Level.OK, told)]


def test_a_host_that_differs_is_named():
    facts = {0: HostFacts(0, 0.0, "n1", fabric=SLINGSHOT), 1: HostFacts(1, 0.0, "n2", fabric=NO_PLUGIN)}
    (_, told), (_, text) = said(Observation(facts=facts))
    assert told.endswith("on n1; 4 NICs (cxi0 to cxi3), no net plugin on n2") and text == f"n2: {NEEDED}"


def notes(*hosts, fabric=NO_PLUGIN, **wanted):
    registry = make_registry(len(hosts), platform="cuda", **wanted)
    for rank, host in enumerate(hosts):
        registry.add(report(rank, host, len(hosts), gpus=("G0", "G1"), fabric=fabric))
    return registry.assign().notes


def test_a_job_on_several_gpu_hosts_prints_one_line_about_the_fabric_at_its_start():
    told = f"fabric: 4 NICs (cxi0 to cxi3), no net plugin; h1, h2: {NEEDED}; jaxrun doctor says what to do"
    assert notes("h1", "h2") == notes("h1", "h1", "h2", "h2") == (told,)
    assert notes("h1", "h2", fabric=SLINGSHOT) == (f"fabric: 4 NICs (cxi0 to cxi3), net plugin {PLUGIN}",)
    assert notes("h1", "h1") == notes("h1", "h2", probe_hosts=True) == notes("h1", "h2", fabric=None) == ()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A directory with /sys and /etc of a host, and with an installed package of NCCL."""
    wheels = tmp_path / "wheels/nvidia/nccl/lib"
    for folder in (wheels, tmp_path / "etc", tmp_path / "sys/class/cxi/cxi0", tmp_path / "sys/class/infiniband/mlx5_0"):
        folder.mkdir(parents=True)
    (wheels / "libnccl.so.2").touch()
    monkeypatch.syspath_prepend(tmp_path / "wheels")
    return tmp_path


def library(path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return str(path)


def test_nics_are_found_with_their_kind(host):
    found = collect_fabric_facts({"NCCL_NET": "IB", "SECRET": "x"}, ("G0",), host)
    assert found.nics == {"cxi0": "cxi", "mlx5_0": "infiniband"}
    assert found.variables == {"NCCL_NET": "IB"} and found.gpus == ("G0",)
    assert "lo" in found.interfaces and collect_fabric_facts({}, (), host / "none").nics == {}


def test_the_plugin_is_looked_for_where_the_loader_looks_and_by_the_names_that_nccl_uses(host):
    def plugin(**environ):
        found = collect_fabric_facts(environ, (), host)
        return found.plugin, found.plugins, found.replaced_nccl

    assert plugin() == ("", (), "")
    (host / "etc/ld.so.cache").write_bytes(b"\0libnccl-net.so\0/usr/lib64/libnccl-net.so\0/usr/lib64/libz.so\0")
    assert plugin() == ("/usr/lib64/libnccl-net.so", ("/usr/lib64/libnccl-net.so",), "")
    first, second = library(host / "a/libnccl-net.so"), library(host / "b/libnccl-net-ofi.so")
    path = f"{host}/a::{host}/b"
    assert plugin(LD_LIBRARY_PATH=path)[:2] == (first, (first, second, "/usr/lib64/libnccl-net.so"))
    assert plugin(LD_LIBRARY_PATH=path, NCCL_NET_PLUGIN="ofi")[0] == second
    assert plugin(LD_LIBRARY_PATH=path, NCCL_NET_PLUGIN="libnccl-net.so")[0] == first
    assert plugin(NCCL_NET_PLUGIN=second)[0] == second
    assert plugin(NCCL_NET_PLUGIN="none")[0] == plugin(NCCL_NET_PLUGIN="other")[0] == ""
    other = library(host / "b/libnccl.so.2")
    assert plugin(LD_LIBRARY_PATH=path)[2] == other and plugin(LD_LIBRARY_PATH=str(host / "a"))[2] == ""
