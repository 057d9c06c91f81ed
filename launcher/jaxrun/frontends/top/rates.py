"""How fast a job goes: cross-process calls per second, now and over the last minutes. No I/O."""

from __future__ import annotations

from collections import deque
from statistics import median

from jaxrun.analysis.diagnosis.snapshot import Overview
from jaxrun.protocol.flight_file import NOTHING

_KEPT = 400
_NOW_S = 10.0  # over which the present rate is taken
_BAR_S = 2.0  # the same for one bar of the sparkline
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.:-=+*#"  # for terminals that know no other letters


class CallRates:
    """The calls that a rank, the median of them, had made at each time that the job was looked at."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, overview: Overview) -> None:
        recorded = [flight for flight in overview.flights.values() if flight.level != NOTHING]
        if not recorded:
            return
        made = median(sum(flight.call_counts.values()) for flight in recorded)
        if self._made and made < self._made[-1][1]:
            self._made.clear()  # another attempt
        self._made.append((overview.time, made))

    def per_second(self) -> float | None:
        """Calls per second now; None where that is not known."""
        return self._rate(len(self._made) - 1, _NOW_S)

    def history(self) -> list[float]:
        """Calls per second at each time, the last one last."""
        rates = (self._rate(index, _BAR_S) for index in range(1, len(self._made)))
        return [rate for rate in rates if rate is not None]

    def _rate(self, index: int, over_s: float) -> float | None:
        if index < 1:
            return None
        at, made = self._made[index]
        first = index - 1
        while first > 0 and at - self._made[first - 1][0] <= over_s:
            first -= 1
        then, before = self._made[first]
        return (made - before) / (at - then) if at > then else None


def sparkline(values: list[float], width: int, bars: str = BARS) -> str:
    """The last values as at most `width` bars, the highest for the largest of them."""
    shown = values[-width:] if width > 0 else []
    largest = max(shown, default=0.0)
    if largest <= 0.0:
        return bars[0] * len(shown)
    return "".join(bars[round(value / largest * (len(bars) - 1))] for value in shown)


def format_pace(calls_per_second: float | None, calls_per_step: int) -> str:
    """`12.3 steps/s`, `a step in 25 s`; by calls where it is not known what a step is."""
    if calls_per_second is None:
        return ""
    noun = "step" if calls_per_step else "call"
    rate = calls_per_second / (calls_per_step or 1)
    if rate <= 0.0:
        return f"no {noun}s"
    if rate < 0.095:
        return f"a {noun} in {1 / rate:.0f} s"
    return f"{rate:.0f} {noun}s/s" if rate >= 99.5 else f"{rate:.3g} {noun}s/s"
