"""Looks at ranks that run: on demand, to decide whether they are stuck, and whether they are still in step.

Each look has a purpose, which its answer carries; what is seen may end the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxrun.head.early_exit import EarlyExit
from jaxrun.head.events import Action, Ending, Keep, Limits, Say, StacksTaken
from jaxrun.head.lockstep import Lockstep
from jaxrun.head.stall import Stall
from jaxrun.verdict.look import Look
from jaxrun.verdict.stacks import STACKS_FILE

_NOTHING_YET = "no rank has stacks to show yet"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look has led to: things to do, and why the job ends, if it does."""

    actions: tuple[Action, ...] = ()
    ending: Ending | None = None


class Looks:
    """Those of one job. Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str], limits: Limits, lockstep: Lockstep, now: float) -> None:
        self._hosts = hosts
        self._limits = limits
        self._lockstep = lockstep
        self._early: EarlyExit | None = None
        self._stall: Stall | None = None
        self._alarms = {"timeout": now + limits.job} if limits.job is not None else {}
        self._over = False

    def begin(self, now: float) -> None:
        """The program runs."""
        if self._limits.stall:
            self._stall = Stall(self._limits.stall, now)
            self._alarms["stall"] = now + self._stall.every
        self._set("lockstep", self._lockstep.next_look(), now)

    def finished(self, now: float) -> None:
        """Somebody's program has ended while others work."""
        if self._early is None:
            self._early = EarlyExit(now, sees_calls=self._lockstep.on)
            self._alarms["early"] = now + self._early.next_look

    def end(self) -> None:
        """The job is being ended: no more looks."""
        self._over = True
        self._alarms.clear()

    def deadline(self) -> float | None:
        return min(self._alarms.values(), default=None)

    def due(self, now: float) -> list[str]:
        """The purposes of the looks that are to be taken now."""
        due = [purpose for purpose, at in self._alarms.items() if at <= now]
        for purpose in due:
            del self._alarms[purpose]
        return due

    def take(self, taken: StacksTaken, finished: Iterable[int], now: float) -> Seen:
        """What to do about an answer; `finished` are the ranks whose program has ended."""
        judged = self._lockstep.saw(taken, now)
        if self._over and taken.purpose in ("timeout", "stall", "early"):
            return Seen()
        match taken.purpose:
            case "show":
                return Seen((Say(self._look(taken, finished, now).in_words() or _NOTHING_YET),))
            case "keep" | "native":
                return Seen((Keep(STACKS_FILE, self._look(taken, finished, now).to_json()), *judged))
            case "timeout":
                return Seen(ending=self._ending("timeout", taken, now))
            case "stall":
                return self._look_for_stall(taken, finished, now)
            case "early":
                return self._look_for_early_exit(taken, finished, now)
            case "lockstep":
                self._set("lockstep", self._lockstep.next_look(), now)
        return Seen(tuple(judged))

    def _look_for_stall(self, taken: StacksTaken, finished: Iterable[int], now: float) -> Seen:
        assert self._stall is not None
        stall, idle = self._stall, self._stall.look(taken, now)
        if idle >= stall.limit:
            return Seen(ending=self._ending("stall", taken, now))
        self._alarms["stall"] = now + min(stall.every, stall.limit - idle)
        if stall.warned or idle < stall.limit / 2:
            return Seen()
        stall.warned = True
        limit = f"the job is stopped after {stall.limit:g} s of it (--stall-timeout)"
        text = f"no output, no call and no CPU time in any rank for {idle:.0f} s; {limit}"
        return Seen((Say(f"{text} · {self._look(taken, finished, now).in_words()}"),))

    def _look_for_early_exit(self, taken: StacksTaken, finished: Iterable[int], now: float) -> Seen:
        assert self._early is not None
        left_behind = self._lockstep.left_behind(set(finished)) is not None
        if self._early.look(taken, now, left_behind=left_behind):
            return Seen(ending=self._ending("early-exit", taken, now))
        self._alarms["early"] = now + self._early.next_look
        return Seen()

    def _ending(self, reason: str, taken: StacksTaken, now: float) -> Ending:
        return Ending(reason, (), dumps=taken.dumps, waits=taken.waits, flights=self._lockstep.texts, decided_at=now)

    def _look(self, taken: StacksTaken, finished: Iterable[int], now: float) -> Look:
        natives = taken.natives if taken.purpose == "native" else None
        flights = self._lockstep.texts
        return Look(now, self._hosts, taken.dumps, taken.waits, flights, tuple(sorted(finished)), natives)

    def _set(self, purpose: str, pause: float | None, now: float) -> None:
        if pause is not None and not self._over:
            self._alarms[purpose] = now + pause
