"""Sums up how long a rank compiles, saves and restores, from the stages in its flight recorder; no second counts twice.

A stage may be inside another, and is noted when it has ended. Of time that is in several stages, compiling counts
first, then saving, then restoring.
"""

from __future__ import annotations

from bisect import bisect_left

from jaxrun.protocol.flight import CompilationStage
from jaxrun.protocol.flight_file import RESTORE_STATE, SAVE

_KEPT_SPANS = 256  # the latest, for stages that end later, and for overlaps


class UnionOfSpans:
    """The length of the union of spans of time, in seconds, which are added in about the order of their ends."""

    def __init__(self) -> None:
        self._earlier = 0.0  # the length of spans that are not kept
        self._spans: list[tuple[float, float]] = []  # disjoint, in order

    def add(self, since: float, until: float) -> None:
        if not since < until:
            return
        at = bisect_left(self._spans, (since, since))
        while at and self._spans[at - 1][1] >= since:
            at -= 1
        following = at
        while following < len(self._spans) and self._spans[following][0] <= until:
            since, until = min(since, self._spans[following][0]), max(until, self._spans[following][1])
            following += 1
        self._spans[at:following] = [(since, until)]
        if len(self._spans) > _KEPT_SPANS:
            began, ended = self._spans.pop(0)
            self._earlier += ended - began

    def seconds(self) -> float:
        return self._earlier + sum(until - since for since, until in self._spans)

    def overlap(self, since: float, until: float) -> float:
        """Return for how many seconds of this time there are spans, as far as they are kept."""
        return sum(max(0.0, min(until, ended) - max(since, began)) for began, ended in self._spans)


class StageTimes:
    """The stages of one rank."""

    def __init__(self) -> None:
        self._compiling, self._or_saving, self._all = UnionOfSpans(), UnionOfSpans(), UnionOfSpans()

    def add(self, stage: CompilationStage) -> None:
        self._all.add(stage.since, stage.until)
        if stage.stage != RESTORE_STATE:
            self._or_saving.add(stage.since, stage.until)
        if stage.stage not in (RESTORE_STATE, SAVE):
            self._compiling.add(stage.since, stage.until)

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds of compiling, saving, and restoring."""
        compiling, or_saving = self._compiling.seconds(), self._or_saving.seconds()
        return compiling, max(0.0, or_saving - compiling), max(0.0, self._all.seconds() - or_saving)

    def overlap(self, since: float, until: float) -> float:
        """Return for how many seconds of this time the rank was in any stage."""
        return self._all.overlap(since, until)
