"""When a rank wrote output: in a few bursts, however much and however long it writes."""

from __future__ import annotations

Burst = tuple[float, float, float]  # start and end, in seconds since the epoch, and bytes

MAX_BURSTS = 64
_PAUSE_S = 0.1  # what is written within this time of the last belongs to the same burst


class OutputBursts:
    """Joins what is written shortly after each other; where that makes too many bursts, after longer pauses, too."""

    def __init__(self) -> None:
        self._bursts: list[Burst] = []
        self._pause_s = _PAUSE_S

    @property
    def bursts(self) -> tuple[Burst, ...]:
        return tuple(self._bursts)

    def add(self, now: float, count: int) -> None:
        """So many bytes have been written."""
        self._append((now, now, float(count)))
        while len(self._bursts) > MAX_BURSTS:
            self._pause_s *= 2
            bursts, self._bursts = self._bursts, []
            for burst in bursts:
                self._append(burst)

    def _append(self, burst: Burst) -> None:
        if self._bursts and burst[0] - self._bursts[-1][1] <= self._pause_s:
            start, _, count = self._bursts.pop()
            burst = (start, burst[1], count + burst[2])
        self._bursts.append(burst)
