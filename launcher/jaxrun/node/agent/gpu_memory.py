"""Waits between two attempts until the GPUs' memory is free again: a driver takes it from killed processes by and by.

Free means as free as before the first attempt, so that what others hold on a GPU that is shared delays nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from jaxrun.spec.job.devices import used_gpu_memory

_SLACK = 0.02  # of a GPU's memory: its driver's own share varies
_POLL_S = 0.05
_NOTICE_S = 2.0  # until people are told what is waited for
_LIMIT_S = 30.0  # then the next attempt is tried anyhow
_GIB = 2**30


class GpuMemory:
    """The memory of the GPUs that a job's workers see on this host."""

    def __init__(self, read: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """`read` returns the used and all bytes of each GPU, none where that is not known; noted as it is now."""
        self._read = read
        self._before = {gpu: used for gpu, (used, _) in read().items()}

    @classmethod
    def visible_with(cls, environ: Mapping[str, str]) -> GpuMemory:
        """That of the NVIDIA GPUs which `environ` leaves visible."""
        return cls(lambda: used_gpu_memory(environ))

    def wait_until_free(self, notify: Callable[[str], None], is_stopped: Callable[[], bool]) -> None:
        """Wait, at most half a minute, and not once the job is stopped; `notify` is called with what takes long."""
        began, told = time.monotonic(), False
        while self._before and (held := self._held()) and not is_stopped():
            waited = time.monotonic() - began
            if waited > _LIMIT_S:
                notify(f"still not free after {_LIMIT_S:.0f} s: {held}; the next attempt is started all the same")
                return
            if waited > _NOTICE_S and not told:
                told = True
                notify(f"waiting until the GPU memory of the attempt before is free: {held}")
            time.sleep(_POLL_S)

    def _held(self) -> str:
        """What is not free yet: `12.3 GiB of GPU-…`; empty where all is."""
        held: dict[str, int] = {}
        for gpu, (used, total) in self._read().items():
            more = used - self._before.get(gpu, used)
            if more > _SLACK * total:
                held[gpu] = more
        return ", ".join(f"{count / _GIB:.1f} GiB of {gpu}" for gpu, count in held.items())
