"""Reports by which network NCCL sends to other hosts, which it logs when it makes its first communicator."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import NcclNetwork
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected

_LOG_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_POLL_INTERVAL_S = 0.5
# A provider is that of libfabric, where NCCL's plugin for it comes first.
NETWORK = re.compile(rb"(?:NET/OFI Selected [Pp]rovider is ([^\s,]+)[^\0]*?)?NCCL INFO Using network (.+)\n")


def watch(env: WorkerEnv, channel: AgentChannel, platform: str) -> None:
    """In a job with GPUs on several hosts, let the first rank of each report it, unless the user has NCCL's log."""
    if platform != "gpu" or env.local_rank or env.local_size == env.size or any(map(os.environ.get, _LOG_VARIABLES)):
        return
    log = os.memfd_create("jaxrun-nccl")
    values = ("INFO", f"/proc/{os.getpid()}/fd/{log}", "INIT,NET")
    os.environ.update(zip(_LOG_VARIABLES, values, strict=True))
    threading.Thread(target=_report, args=(env.rank, channel, log), name="jaxrun-nccl", daemon=True).start()


def _report(rank: int, channel: AgentChannel, log: int) -> None:
    with contextlib.suppress(OSError, AgentDisconnected):  # a program may close descriptors that are not its own
        while (found := NETWORK.search(os.pread(log, os.fstat(log).st_size, 0))) is None:
            time.sleep(_POLL_INTERVAL_S)
        provider, network = (text.decode(errors="replace").strip() for text in found.groups(b""))
        channel.send(NcclNetwork(rank, time.time(), network, provider))
