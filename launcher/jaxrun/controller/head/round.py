"""A question that is put to several parties, ranks or agents: their answers are collected, and then something follows.

Who asks sends the question itself. The round is over when nobody is missing any more or, if it has a deadline, then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from jaxrun.controller.head.timers import Timer, Timers
from jaxrun.job_events.actions import Action

Party = TypeVar("Party", bound=Hashable)
Said = TypeVar("Said")


class Round(Generic[Party, Said]):
    """One round of answers. Who has added the last one ends the round.

    asked:    all parties
    missing:  those whose answers are awaited
    answers:  by party, in the order in which they came
    """

    def __init__(
        self, asked: Iterable[Party], then: Callable[[Mapping[Party, Said], float], list[Action]] = lambda *_: []
    ) -> None:
        """`then` is called once with the answers, when the round is over."""
        self.asked = tuple(asked)
        self.missing = set(self.asked)
        self.answers: dict[Party, Said] = {}
        self._then = then
        self._cancel: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether all have answered, or will not."""
        return not self.missing

    def limit(self, timers: Timers, kind: Timer, at: float, *, of: Hashable) -> None:
        """End the round at this time at the latest, by this timer."""
        timers.set(kind, at, self.end, of=of)
        self._cancel = lambda: timers.cancel_one(kind, of)

    def add(self, party: Party, answer: Said) -> bool:
        """Add an answer, unless nobody waits for it; returns whether it was the last one."""
        if party not in self.missing:
            return False
        self.answers[party] = answer
        return self.remove(party)

    def remove(self, party: Party) -> bool:
        """Stop waiting for this party, which cannot answer any more; returns whether it was the last one."""
        if party not in self.missing:
            return False
        self.missing.remove(party)
        return not self.missing

    def end(self, now: float) -> list[Action]:
        """Continue with the answers that have come: all of them, or those before the deadline."""
        self.missing.clear()
        self._cancel()
        return self._then(self.answers, now)
