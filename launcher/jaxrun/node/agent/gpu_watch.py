"""How busy the GPUs of an agent's workers are, while somebody asks: by nvidia-smi, for which nobody waits.

It takes up to a second. So each call starts it if the last one is over, and returns what that one has said.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jaxrun.spec.job.devices import CUDA_VISIBLE_VARIABLE, GpuCard, visible_devices
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from subprocess import Popen

_COMMAND = ("nvidia-smi", "--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_INTERVAL_S = 2.0  # at least, between two starts
_KNOWN_S = 10.0  # for which an answer is good
_MIB = 2**20

GpuUsage = tuple[float, int]  # per cent, and bytes that are used; -1 where that is not known


class GpuWatch:
    """The GPUs of the workers of one plan; nothing is read where they have none."""

    def __init__(self, plan: Plan) -> None:
        self._ordinals = {worker.rank: worker.local_device_ids for worker in plan.workers if worker.local_device_ids}
        self._set_env = plan.set_env
        self._process: Popen[bytes] | None = None
        self._output = b""
        self._started_at = float("-inf")
        self._answered_at = float("-inf")
        self._usage: dict[int, GpuUsage] = {}

    def usage_by_rank(self) -> Mapping[int, GpuUsage]:
        """Return what is known of each rank's GPUs: how busy they are on average, and all their used memory."""
        if not self._ordinals:
            return {}
        now = time.monotonic()
        self._read(now)
        if self._process is None and now >= self._started_at + _INTERVAL_S:
            self._start(now)
        return self._usage if now < self._answered_at + _KNOWN_S else {}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start(self, now: float) -> None:
        import subprocess

        self._started_at, self._output = now, b""
        with contextlib.suppress(OSError):  # there is none
            environ = {**os.environ, **self._set_env}
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(_COMMAND, env=environ, stdin=null, stdout=subprocess.PIPE, stderr=null)
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)

    def _read(self, now: float) -> None:
        if self._process is None:
            return
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 65536):
                self._output += data
            self._end()
            visible = {**os.environ, **self._set_env}.get(CUDA_VISIBLE_VARIABLE)
            self._usage = usage_of_ranks(self._output.decode(errors="replace"), visible, self._ordinals)
            self._answered_at = now

    def _end(self) -> None:
        """Its exit is noticed with those of the workers."""
        process, self._process = self._process, None
        if process is not None and process.stdout is not None:
            process.stdout.close()
            process.poll()


def usage_of_ranks(text: str, visible: str | None, ordinals: Mapping[int, Iterable[int]]) -> dict[int, GpuUsage]:
    """What lines such as `GPU-5d5b, 97, 1024` say of the GPUs of each rank.

    visible:   the value of CUDA_VISIBLE_DEVICES; None where it is not set
    ordinals:  of each rank's GPUs among the visible ones
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    cards = {row[0]: (_number(row[1]), _number(row[2])) for row in rows if len(row) == 3}
    seen = [uuid for uuid, _ in visible_devices(tuple(GpuCard(uuid, "") for uuid in cards), visible)]
    found: dict[int, GpuUsage] = {}
    for rank, own in ordinals.items():
        uses = [cards[seen[ordinal]] for ordinal in own if ordinal < len(seen)]
        percents = [percent for percent, _ in uses if percent >= 0]
        mebibytes = [used for _, used in uses if used >= 0]
        percent = sum(percents) / len(percents) if percents else -1.0
        found[rank] = percent, int(sum(mebibytes) * _MIB) if mebibytes else -1
    return found


def _number(text: str) -> float:
    """-1 for `[N/A]`, as of a GPU that is divided."""
    try:
        return float(text)
    except ValueError:
        return -1.0
