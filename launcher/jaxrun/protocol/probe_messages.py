"""How agents report their hosts before a job that asks for it (`jaxrun doctor`), and measure the way to each other.

    agent                                     head
    HostFacts             ──────────▶                           (after AgentReport, from every agent)
                          ◀──────────    MeasurePeers           (to one agent of each host, once all have reported)
    PeerResults           ──────────▶                           (then the workers are started)

They belong to the messages of agent_messages.py. Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What an agent finds on its host. Sizes are bytes, limits are -1 where there is none.

    port, cookie:    where it answers the other hosts, and what they must say first; port 0 for none
    versions:        of Python, jaxrun and what JAX consists of, by the name of the package
    python:          the path of the interpreter
    own_addresses:   to which the host's own name leads; empty if to none
    interfaces:      "eth0 10.1.0.4"
    proxies:         variables of the environment that name a proxy
    limits:          soft limits: "nofile", "nproc", "memlock"; "nofile hard"
    memory:          "total", "available" and "limit" of the cgroup
    shared_memory:   the size of /dev/shm
    disks:           free bytes by directory; disk_errors: why nothing can be written there
    cores:           that the agent may use; all_cores: that the host has
    gpus:            names of NVIDIA's, with the bytes of their memory, and those that are used; -1 where not known
    nvidia_driver:   its version; nvidia_trouble: why it does not tell of GPUs
    rdma:            whether the host has InfiniBand or RoCE devices
    sees_run_dir:    whether the job's run directory is there
    """

    rank: int
    time: float
    host: str
    port: int = 0
    cookie: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    own_addresses: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    proxies: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    shared_memory: int = 0
    disks: Mapping[str, int] = field(default_factory=dict)
    disk_errors: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    all_cores: int = 0
    gpus: tuple[str, ...] = ()
    gpu_bytes: tuple[int, ...] = ()
    gpu_used_bytes: tuple[int, ...] = ()
    nvidia_driver: str = ""
    nvidia_trouble: str = ""
    rdma: bool = False
    sees_run_dir: bool = True


@dataclass(frozen=True, slots=True)
class MeasurePeers:
    """Measure the way to these agents, by rank: "host:port", the cookie that each wants, and the host's name."""

    addresses: Mapping[int, str]
    cookies: Mapping[int, str]
    hosts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class PeerResults:
    """What was measured to each peer, by rank; a peer that cannot be reached is only in `errors`.

    round_trip:     seconds, the least of several
    bytes_per_s:    one connection; missing where time was short
    unknown_names:  hosts whose name leads nowhere here
    """

    rank: int
    errors: Mapping[int, str]
    round_trip: Mapping[int, float]
    bytes_per_s: Mapping[int, float]
    unknown_names: tuple[str, ...] = ()
