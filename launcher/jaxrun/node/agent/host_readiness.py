"""Whether a host is ready for an attempt: the memory of its GPUs is free again, and it passes --host-check.

Both may take long, so an agent waits for them in a thread (task_thread.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from jaxrun.protocol.agent_messages import HostCheck

if TYPE_CHECKING:
    from jaxrun.node.agent.gpus import GpuMemory


class CheckTurn(Struct, frozen=True):
    """For whom --host-check runs: the attempt, and the first rank of the host."""

    attempt: int
    rank: int


class HostReadiness:
    """What one agent knows of its host's readiness, in all attempts of a job."""

    def __init__(self, environ: Mapping[str, str], host: str = "") -> None:
        """`environ` is the agent's; `host` is the name of its host, if that is simulated."""
        self._environ = environ
        self._host = host or os.uname().nodename
        self._gpu_memory: GpuMemory | None = None  # as it was before the first attempt

    def wait(
        self,
        check: HostCheck | None,
        turn: CheckTurn,
        notify: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> str | None:
        """Wait for the memory of the GPUs, then run the check, if there is one; `notify` gets a text if it takes long.

        Returns how the check failed; empty if it did not; None if it `is_stopped` before.
        """
        if self._gpu_memory is not None:
            self._gpu_memory.wait_until_free(notify, is_stopped)
        if check is None:
            return ""
        from jaxrun.node.agent.host_check import check_host

        return check_host(check, self._environ, is_stopped, host=self._host, rank=turn.rank, attempt=turn.attempt)

    def note_gpu_memory(self) -> None:
        """Note how much memory of the GPUs is in use before the first of several attempts. Repeatable."""
        if self._gpu_memory is None:
            from jaxrun.node.agent.gpus import GpuMemory

            self._gpu_memory = GpuMemory(self._environ)
