"""Reports the network that NCCL uses between hosts, from NCCL's log of its first communicator."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime.own_threads import start_thread

_LOG_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_POLL_INTERVAL_S = 0.5
_DEVICES = Path("/sys/class")
_NICS = ("cxi/*", "infiniband/*", "net/hsn[0-9]*")  # NICs of fabrics that can do better than TCP
# The first group is libfabric's provider, which NCCL's plugin for libfabric logs first.
NETWORK = re.compile(rb"(?:NET/OFI Selected [Pp]rovider is ([^\s,]+)[^\0]*?)?NCCL INFO Using network (.+)\n")


def watch(env: WorkerEnv, platform: str) -> None:
    """Let rank 0 report the network in a job with GPUs on several hosts, unless the user has asked for NCCL's log."""
    if platform != "gpu" or env.rank or env.local_size == env.size or any(map(os.environ.get, _LOG_VARIABLES)):
        return
    log = os.memfd_create("jaxrun-nccl")
    values = ("INFO", f"/proc/{os.getpid()}/fd/{log}", "INIT,NET")
    os.environ.update(zip(_LOG_VARIABLES, values, strict=True))
    start_thread(_report, "jaxrun-nccl", log)


def _report(log: int) -> None:
    with contextlib.suppress(OSError):  # a program may close descriptors that are not its own
        while (found := NETWORK.search(os.pread(log, os.fstat(log).st_size, 0))) is None:
            time.sleep(_POLL_INTERVAL_S)
        provider, network = (text.decode(errors="replace").strip() for text in found.groups(b""))
        print(f"jaxrun: {describe_network(network, provider)}", file=sys.stderr, flush=True)


def describe_network(network: str, provider: str, devices: Path = _DEVICES) -> str:
    """Return the line about the network that NCCL uses, with a warning if it is TCP although the host has a fabric."""
    shown = f"NCCL's network between hosts: {network}{provider and f' ({provider})'}"
    nics = [nic.name for pattern in _NICS for nic in sorted(devices.glob(pattern))]
    is_tcp = network == "Socket" or provider.startswith(("tcp", "sockets"))
    return f"warning: {shown}, TCP beside {nics[0]}; jaxrun doctor may say why" if is_tcp and nics else shown
