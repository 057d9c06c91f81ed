"""Are the ranks about to make the same cross-process call? Fed with their Calls; no I/O.

A call is known by its group of ranks and its number among the calls of that group. Ranks that wait (strict mode) are
let go once all of the group have come with the same program. Where two differ, or one that is needed has gone, or all
wait for each other, that is a conflict: it is settled a moment later, so that the others' calls are known, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.head.actions import Action, Send
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.worker_messages import Call, CallMismatch, Proceed

MISMATCH_SETTLE_S = 0.1  # seconds from a conflict until it is settled, once all ranks have come or gone
_MISMATCH_TIMEOUT_S = (
    2.0  # seconds until it is settled without those that have not: compiling takes them unequally long
)
_MAX_OPEN_SLOTS = 1024  # calls that only some ranks have told of, as the others knew the program before

SlotKey = tuple[str, int]  # group, number


@dataclass(slots=True)
class CallSlot:
    """One call of a group: what each of its ranks that has come is about to do.

    settled:  what the ranks are told when it is known that they will not make it together
    """

    key: SlotKey
    calls: dict[int, Call] = field(default_factory=dict)
    _programs: set[str] = field(default_factory=set)
    _codes: set[str] = field(default_factory=set)
    mismatch: str = ""

    @property
    def members(self) -> frozenset[int]:
        return parse_group(self.key[0])

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(rank for rank, call in self.calls.items() if call.waits_for_answer)

    @property
    def is_matching(self) -> bool:
        """Whether all who have come are about to run the same program, as far as that is known."""
        return len(self._programs) <= 1 and len(self._codes) <= 1

    def add(self, call: Call) -> None:
        self.calls[call.rank] = call
        self._programs.add(call.key)
        self._codes |= {call.code} - {""}


class CallMatcher:
    """All calls of one job that are not agreed on yet."""

    def __init__(self) -> None:
        self._slots: dict[SlotKey, CallSlot] = {}
        self._gone: dict[int, Mapping[str, int] | None] = {}
        self._waiting: dict[int, Call] = {}
        self._conflicts: dict[SlotKey, float] = {}  # when each is due

    @property
    def waiting(self) -> Mapping[int, Call]:
        """The ranks that wait now, and for which call."""
        return self._waiting

    def add(self, call: Call, now: float) -> list[Action]:
        """A rank is about to make this call."""
        key = (call.group, call.number)
        meeting = self._slots.setdefault(key, CallSlot(key))
        if meeting.mismatch:
            return [Send((call.rank,), CallMismatch(*key, meeting.mismatch))] if call.waits_for_answer else []
        meeting.add(call)
        if call.waits_for_answer:
            self._waiting[call.rank] = call
        if not meeting.is_matching or any(self._never_comes(rank, meeting) for rank in self._gone):
            self._conflict(meeting, now)
        if meeting.key in self._conflicts:
            self._hasten(meeting, now)
        elif len(meeting.calls) == len(meeting.members):
            del self._slots[key]
            return self._release(meeting, Proceed(*key))
        elif len(self._slots) > _MAX_OPEN_SLOTS:
            self._forget_oldest()
        return []

    def remove_rank(self, rank: int, made: Mapping[str, int] | None, now: float) -> None:
        """This rank makes no more calls: those who wait for it wait in vain.

        `made`: by group, how many it has made; None where that is not known.
        """
        self._gone[rank] = made
        for meeting in self._slots.values():
            if self._never_comes(rank, meeting):
                self._conflict(meeting, now)

    def is_gone(self, rank: int) -> bool:
        return rank in self._gone

    def calls_made(self, rank: int, group: str) -> int | None:
        """How many calls of the group a rank has made that is gone; None where that is not known."""
        made = self._gone.get(rank)
        return made.get(group, 0) if made is not None else None

    def mark_all_waiting(self, now: float) -> None:
        """Note a conflict: every rank waits for others, and none of them comes."""
        for meeting in self._slots.values():
            if meeting.waiting:
                self._conflict(meeting, now)

    def deadline(self) -> float | None:
        return min(self._conflicts.values(), default=None)

    def expire_all(self) -> None:
        """All that are due at some time are due now."""
        self._conflicts = dict.fromkeys(self._conflicts, 0.0)

    def pop_expired(self, now: float) -> list[CallSlot]:
        """The conflicts that have waited long enough: each is to be given to `settle`, if it still is one."""
        due = [key for key, at in self._conflicts.items() if at <= now]
        for key in due:
            del self._conflicts[key]
        return [self._slots[key] for key in due if key in self._slots]

    def resolve(self, meeting: CallSlot, text: str) -> list[Action]:
        """Tell this text to the ranks that wait, now or later."""
        meeting.mismatch = text
        actions = self._release(meeting, CallMismatch(*meeting.key, text))
        meeting.calls.clear()
        return actions

    def _release(self, meeting: CallSlot, answer: Proceed | CallMismatch) -> list[Action]:
        waiting = meeting.waiting
        for rank in waiting:
            self._waiting.pop(rank, None)
        return [Send(waiting, answer)] if waiting else []

    def _never_comes(self, rank: int, meeting: CallSlot) -> bool:
        """Whether the rank, which is gone, was needed there."""
        if rank in meeting.calls or rank not in meeting.members:
            return False
        made = self.calls_made(rank, meeting.key[0])
        return made < meeting.key[1] if made is not None else bool(meeting.waiting)

    def _conflict(self, meeting: CallSlot, now: float) -> None:
        if not meeting.mismatch:
            self._conflicts.setdefault(meeting.key, now + _MISMATCH_TIMEOUT_S)
            self._hasten(meeting, now)

    def _hasten(self, meeting: CallSlot, now: float) -> None:
        """There is nobody to wait for once each rank has come, has gone, or waits in another call."""
        if meeting.members <= meeting.calls.keys() | self._gone.keys() | self._waiting.keys():
            self._conflicts[meeting.key] = min(self._conflicts[meeting.key], now + MISMATCH_SETTLE_S)

    def _forget_oldest(self) -> None:
        idle = (key for key, meeting in self._slots.items() if not meeting.waiting and key not in self._conflicts)
        oldest = next(idle, None)
        if oldest is not None:
            del self._slots[oldest]
