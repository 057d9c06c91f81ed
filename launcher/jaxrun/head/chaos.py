"""When the faults on order are due, and whom they are done to: a state machine without I/O.

They come from --chaos or from the Python process that the launcher works for. What then happens to the job is what
would happen if they had come by themselves; only the verdict knows better.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxrun.head.events import Action, Inflict, Say, Spared
from jaxrun.head.roster import Roster
from jaxrun.planning.chaos import CHAOS, Fault
from jaxrun.ranks import locate, spell
from jaxrun.verdict.ends import Dealt
from jaxrun.verdict.faults import IS, ordered


class Chaos:
    """The faults of one job. Times are seconds since the epoch."""

    def __init__(self, faults: Sequence[Fault], roster: Roster) -> None:
        self._waiting = sorted(faults, key=lambda fault: fault.after)
        self._roster = roster
        self._began: float | None = None

    def begin(self, now: float) -> None:
        """The program runs."""
        self._began = now

    def deadline(self) -> float | None:
        if self._began is None or not self._waiting:
            return None
        return self._began + self._waiting[0].after

    def due(self, now: float) -> list[Action]:
        """What is to be done because its time has come."""
        actions: list[Action] = []
        while (deadline := self.deadline()) is not None and deadline <= now:
            fault = self._waiting.pop(0)
            actions += self.order(fault.kind, [rank for span in fault.ranks for rank in span], CHAOS, now)
        return actions

    def order(self, kind: str, ranks: Collection[int], by: str, now: float) -> list[Action]:
        """Do this to those of the ranks that live; `by`: who asks for it."""
        dealt = Dealt(kind, now, by)
        live = self._roster.live
        met = tuple(sorted(set(ranks).intersection(live)))
        missed = set(ranks).difference(live)
        for rank in met:
            self._roster.dealt(rank, dealt)
        actions: list[Action] = []
        if missed:
            it = "it does not run" if len(missed) == 1 else "they do not run"
            actions.append(Say(f"{spell(missed)} cannot be {ordered(dealt)}: {it}"))
        if met:
            are = "is" if len(met) == 1 else "are"
            actions += [Say(f"{locate(met, self._roster.hosts)} {are} {ordered(dealt)}"), Inflict(met, kind)]
        return actions

    def spared(self, spared: Spared) -> list[Action]:
        """It could not be done."""
        self._roster.spared(spared.rank, spared.kind)
        who = locate([spared.rank], self._roster.hosts)
        return [Say(f"{who} could not be {IS[spared.kind]}: {spared.text}; the job goes on")]

    def left(self) -> list[Action]:
        """The job has ended well: whoever has ordered faults should know of those that were none."""
        texts = ", ".join(map(str, self._waiting))
        return [Say(f"the job was over before {CHAOS} {texts}")] if texts else []
