"""The messages with which agents report their hosts before a job (`jaxrun doctor`), and try to connect to each other.

    agent                                     head
    HostFacts             ──────────▶                           (after AgentReport, from every agent)
                          ◀──────────    ProbePeers             (to one agent of each host, once all have reported)
    PeerResults           ──────────▶

They belong to the messages of agent_messages.py. Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.bounds import Port
from jaxrun.protocol.codec import Message


class Gpus(Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs that a process sees, by ordinal.

    source:   what counted them, "NVML"
    visible:  the setting that limits them, "CUDA_VISIBLE_DEVICES=2,3"; empty if there is none
    ids:      UUIDs, unique on their host
    cores:    the cores next to each, in the kernel's format, "0-31,64-95"; empty if the kernel does not say
    trouble:  why they could not be counted; empty if they could
    """

    names: tuple[str, ...] = ()
    source: str = ""
    visible: str = ""
    ids: tuple[str, ...] = ()
    trouble: str = ""
    cores: tuple[str, ...] = ()


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """The resources of this machine that a job may use.

    cores:        the cores that this process may run on, hardware threads of one core side by side
    all_cores:    number of cores of the machine
    gpus:         the visible GPUs by platform ("cuda", "rocm"); a platform that was not probed is left out
    tpu:          whether there are TPU chips
    cuda_plugin:  whether JAX's plugin for CUDA is installed
    """

    host: str
    cores: tuple[int, ...]
    gpus: Mapping[str, Gpus] = field(default_factory=dict)
    tpu: bool = False
    cuda_plugin: bool = True
    all_cores: int = 0

    @property
    def platform(self) -> str:
        """The platform of the GPUs that are visible, or would be; empty if none were looked for."""
        return next((name for name, gpus in self.gpus.items() if gpus.names), next(iter(self.gpus), ""))

    @property
    def seen_gpus(self) -> Gpus:
        return self.gpus.get(self.platform, Gpus())


class GpuFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU; the bytes of its memory are -1 if unknown."""

    name: str
    used_bytes: int
    all_bytes: int


class FabricFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that decide by which network NCCL sends from a rank to other hosts.

    nics:            kind of each NIC by name: "cxi" (Slingshot) or "infiniband" (RoCE, too)
    interfaces:      network interfaces that are up and have an address: "hsn0"
    gpus:            ids of the GPUs that the rank sees
    plugins:         paths of the net plugins where the loader looks; plugin: the one that NCCL loads, empty for none
    replaced_nccl:   the libnccl.so.2 on LD_LIBRARY_PATH that replaces the installed one; empty for none
    variables:       the relevant variables of the environment
    """

    nics: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    plugin: str = ""
    replaced_nccl: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


class HostFacts(Message, frozen=True):
    """What an agent finds on its host. Sizes are in bytes; a limit of -1 means that there is none.

    port:            the port where it answers the other hosts; 0 for none
    versions:        of Python, jaxrun and JAX's packages, by the name of the package
    python:          the path of the interpreter
    name_addresses:   the addresses of the host's own name; empty if it has none
    addresses:       the host's addresses, each with its network interface: {"10.1.0.4": "eth0"}
    proxies:         variables of the environment that name a proxy
    limits:          soft limits: "nofile", "nproc", "memlock"; "nofile hard"
    memory:          "total", "available" and "limit" of the cgroup
    shared_memory:   the size of /dev/shm
    disks:           free bytes by directory; disk_errors: why nothing can be written there
    cores:           number of cores that the agent may use; all_cores: of the host
    gpus:            NVIDIA GPUs
    nvidia_driver:   its version; nvidia_trouble: why it did not list GPUs
    fabric:          what decides by which network NCCL sends
    sees_run_dir:    whether the job's run directory exists there
    """

    agent: AgentId
    time: float
    host: str
    port: Port = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    name_addresses: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)
    proxies: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    shared_memory: int = 0
    disks: Mapping[str, int] = field(default_factory=dict)
    disk_errors: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    all_cores: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    nvidia_driver: str = ""
    nvidia_trouble: str = ""
    fabric: FabricFacts = field(default_factory=FabricFacts)
    sees_run_dir: bool = True


class ProbePeers(Message, frozen=True):
    """Connect to these agents: "host:port" and the host's name for each."""

    addresses: Mapping[AgentId, str]
    hosts: Mapping[AgentId, str]


class PeerResults(Message, frozen=True):
    """The result of connecting to the other agents.

    interfaces:     the network interface by which each was reached, "eth0"
    errors:         why the rest could not be reached
    unknown_names:  hosts whose name does not resolve here
    """

    agent: AgentId
    interfaces: Mapping[AgentId, str]
    errors: Mapping[AgentId, str]
    unknown_names: tuple[str, ...] = ()
