"""The NVIDIA GPUs of an agent's workers: how busy they are, and whether the memory of an ended attempt is free again.

The driver may take a second to answer, or never do so: nobody waits for it beyond a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.spec.job.devices import CUDA_VISIBLE_VARIABLE, visible_devices
from jaxrun.spec.job.nvml import NvmlQuestion, NvmlReading, ask_nvml

_INTERVAL_S = 2.0  # at least, between two questions
_KNOWN_S = 10.0  # how long an answer is valid, from the question on
_ANSWER_S = 5.0  # after which the driver is considered stuck
_SLACK = 0.02  # of a GPU's memory: its driver's own share varies
_POLL_S = 0.05
_NOTICE_S = 2.0  # before a notice says what we wait for
_LIMIT_S = 30.0  # after which the next attempt is tried anyhow
_GIB = 2**30

GpuLoad = tuple[float, int]  # (per cent, bytes in use); -1 if unknown


class GpuWatch:
    """The load of the GPUs of one agent's workers; nothing is read while nobody asks, or if there are no GPUs."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._ordinals = {worker.rank: worker.local_device_ids for worker in setup.workers if worker.local_device_ids}
        self._environ = setup.environ
        self._question: NvmlQuestion | None = None
        self._asked_at = float("-inf")
        self._known_at = float("-inf")
        self._loads: dict[int, GpuLoad] = {}

    def load_by_rank(self) -> Mapping[int, GpuLoad]:
        """Return the known load of each rank's GPUs: average use, and all their used memory.

        It is the driver's answer to an earlier call.
        """
        if not self._ordinals:
            return {}
        now = time.monotonic()
        if self._question is not None and (reading := self._question.wait(0)) is not None:
            visible = self._environ.get(CUDA_VISIBLE_VARIABLE)
            self._loads, self._known_at = loads_of_ranks(reading, visible, self._ordinals), self._asked_at
            self._question = None
        if self._question is None and now >= self._asked_at + _INTERVAL_S:
            self._question, self._asked_at = NvmlQuestion(), now
        return self._loads if now < self._known_at + _KNOWN_S else {}

    def close(self) -> None:
        """Wait a while for the thread that asks: a process with threads must not fork."""
        if self._question is not None:
            self._question.wait(_ANSWER_S)


def loads_of_ranks(
    reading: NvmlReading, visible: str | None, ordinals: Mapping[int, Iterable[int]]
) -> dict[int, GpuLoad]:
    """Return how busy the GPUs of each rank are, and how much of their memory is used.

    visible:   the value of CUDA_VISIBLE_DEVICES; None if it is not set
    ordinals:  of each rank's GPUs among the visible ones
    """
    seen = [uuid for uuid, _ in visible_devices(reading.cards, visible)]
    found: dict[int, GpuLoad] = {}
    for rank, own in ordinals.items():
        usages = [reading.usage[seen[ordinal]] for ordinal in own if ordinal < len(seen)]
        percents = [usage.busy_percent for usage in usages if usage.busy_percent >= 0]
        used = [usage.used_bytes for usage in usages if usage.used_bytes >= 0]
        found[rank] = sum(percents) / len(percents) if percents else -1.0, sum(used) if used else -1
    return found


class GpuMemory:
    """Waits between attempts until the GPUs' memory is free: a driver frees the memory of killed processes gradually.

    Free means as free as before the first attempt, so other users of a shared GPU delay nobody.
    """

    def __init__(
        self, environ: Mapping[str, str], ask: Callable[[], NvmlReading] = lambda: ask_nvml(_ANSWER_S)
    ) -> None:
        """`environ` selects the GPUs; memory that is used now belongs to others."""
        self._visible = environ.get(CUDA_VISIBLE_VARIABLE)
        self._ask = ask
        self._before = {gpu: used for gpu, (used, _) in self._read().items()}

    def wait_until_free(self, notify: Callable[[str], None], is_stopped: Callable[[], bool]) -> None:
        """Wait, at most half a minute, and not once the job is stopped; `notify` gets a text if it takes long."""
        began, told = time.monotonic(), False
        while self._before and (held := self._held()) and not is_stopped():
            waited = time.monotonic() - began
            if waited > _LIMIT_S:
                notify(
                    f"GPU memory is still not free after {_LIMIT_S:.0f} s: {held}; the next attempt starts nevertheless"
                )
                return
            if waited > _NOTICE_S and not told:
                told = True
                notify(f"waiting until the GPU memory of the previous attempt is free: {held}")
            time.sleep(_POLL_S)

    def _held(self) -> str:
        """Return what is not free yet: `12.3 GiB of GPU-…`; empty if everything is."""
        held: dict[str, int] = {}
        for gpu, (used, total) in self._read().items():
            more = used - self._before.get(gpu, used)
            if more > _SLACK * total:
                held[gpu] = more
        return ", ".join(f"{count / _GIB:.1f} GiB of {gpu}" for gpu, count in held.items())

    def _read(self) -> dict[str, tuple[int, int]]:
        """Return the used and all bytes of each GPU that reports them."""
        reading = self._ask()
        usages = {uuid: reading.usage[uuid] for uuid, _ in visible_devices(reading.cards, self._visible)}
        return {uuid: (usage.used_bytes, usage.all_bytes) for uuid, usage in usages.items() if usage.used_bytes >= 0}
