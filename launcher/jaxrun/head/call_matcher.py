"""Matches the ranks' cross-process calls: are all about to make the same one?

A call is identified by its group of ranks and its number among the calls of that group. Ranks that wait for an answer
(strict mode) may proceed once the whole group has sent the call with the same program. There is a mismatch where two
programs differ, a rank that is needed has ended, or all ranks wait for each other; it is handled a moment later, so
that the calls of the other ranks are known as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.head.actions import Action, Send
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.worker_messages import Call, CallMismatch, Proceed

MISMATCH_SETTLE_S = 0.1  # once every rank of the group has come, has ended or waits elsewhere
_MISMATCH_TIMEOUT_S = 2.0  # for the ranks that have not: compiling may take them longer
_MAX_OPEN_SLOTS = 1024  # in record mode only some ranks send a call, where the others know its program already

SlotKey = tuple[str, int]  # group, number


@dataclass(slots=True)
class CallSlot:
    """One call of a group, and what those of its ranks that have come are about to do.

    mismatch:  why the group will not make the call together, once that was sent to those that wait
    """

    key: SlotKey
    calls: dict[int, Call] = field(default_factory=dict)
    mismatch: str = ""
    _programs: set[str] = field(default_factory=set)
    _codes: set[str] = field(default_factory=set)

    @property
    def members(self) -> frozenset[int]:
        return parse_group(self.key[0])

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(rank for rank, call in self.calls.items() if call.waits_for_answer)

    @property
    def is_matching(self) -> bool:
        """Whether all ranks that have come are about to run the same program, as far as that is known."""
        return len(self._programs) <= 1 and len(self._codes) <= 1

    def add(self, call: Call) -> None:
        self.calls[call.rank] = call
        self._programs.add(call.key)
        self._codes |= {call.code} - {""}


class CallMatcher:
    """The calls of one job that not all ranks of their group have sent. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._slots: dict[SlotKey, CallSlot] = {}
        self._ended: dict[int, Mapping[str, int] | None] = {}  # rank → its number of calls in each group, if known
        self._waiting: dict[int, Call] = {}
        self._mismatches: dict[SlotKey, float] = {}  # → when it is to be handled

    @property
    def waiting(self) -> Mapping[int, Call]:
        """The ranks that wait for an answer, and to which call."""
        return self._waiting

    def add(self, call: Call, now: float) -> list[Action]:
        """A rank is about to make this call."""
        key = (call.group, call.number)
        slot = self._slots.setdefault(key, CallSlot(key))
        if slot.mismatch:
            return [Send((call.rank,), CallMismatch(*key, slot.mismatch))] if call.waits_for_answer else []
        slot.add(call)
        if call.waits_for_answer:
            self._waiting[call.rank] = call
        if not slot.is_matching or any(self._cannot_come(rank, slot) for rank in self._ended):
            self._add_mismatch(slot, now)
        if key in self._mismatches:
            self._hasten_if_complete(slot, now)
        elif len(slot.calls) == len(slot.members):
            del self._slots[key]
            return self._answer(slot, Proceed(*key))
        elif len(self._slots) > _MAX_OPEN_SLOTS:
            self._remove_oldest()
        return []

    def remove_rank(self, rank: int, made: Mapping[str, int] | None, now: float) -> None:
        """A rank makes no more calls; `made`: how many it has made in each group, None where that is not known."""
        self._ended[rank] = made
        for slot in self._slots.values():
            if self._cannot_come(rank, slot):
                self._add_mismatch(slot, now)

    def has_ended(self, rank: int) -> bool:
        return rank in self._ended

    def calls_made(self, rank: int, group: str) -> int | None:
        """The number of calls of the group that a rank had made when it ended; None where that is not known."""
        made = self._ended.get(rank)
        return made.get(group, 0) if made is not None else None

    def mark_all_waiting(self, now: float) -> None:
        """Every rank waits for others, and none of these comes: all calls that ranks wait in are mismatches."""
        for slot in self._slots.values():
            if slot.waiting:
                self._add_mismatch(slot, now)

    def deadline(self) -> float | None:
        return min(self._mismatches.values(), default=None)

    def expire_all(self) -> None:
        """Let all mismatches be handled at once."""
        self._mismatches = dict.fromkeys(self._mismatches, 0.0)

    def pop_expired(self, now: float) -> list[CallSlot]:
        """The mismatches whose time has come."""
        expired = [key for key, at in self._mismatches.items() if at <= now]
        for key in expired:
            del self._mismatches[key]
        return [self._slots[key] for key in expired if key in self._slots]

    def resolve(self, slot: CallSlot, mismatch: str) -> list[Action]:
        """Send this text to the ranks that wait in the call, now or later."""
        slot.mismatch = mismatch
        actions = self._answer(slot, CallMismatch(*slot.key, mismatch))
        slot.calls.clear()
        return actions

    def _answer(self, slot: CallSlot, answer: Proceed | CallMismatch) -> list[Action]:
        waiting = slot.waiting
        for rank in waiting:
            self._waiting.pop(rank, None)
        return [Send(waiting, answer)] if waiting else []

    def _cannot_come(self, rank: int, slot: CallSlot) -> bool:
        """Whether the call needs this rank, which has ended without it."""
        if rank in slot.calls or rank not in slot.members:
            return False
        made = self.calls_made(rank, slot.key[0])
        return made < slot.key[1] if made is not None else bool(slot.waiting)

    def _add_mismatch(self, slot: CallSlot, now: float) -> None:
        if not slot.mismatch:
            self._mismatches.setdefault(slot.key, now + _MISMATCH_TIMEOUT_S)
            self._hasten_if_complete(slot, now)

    def _hasten_if_complete(self, slot: CallSlot, now: float) -> None:
        if slot.members <= slot.calls.keys() | self._ended.keys() | self._waiting.keys():
            self._mismatches[slot.key] = min(self._mismatches[slot.key], now + MISMATCH_SETTLE_S)

    def _remove_oldest(self) -> None:
        """Forget the oldest call in which no rank waits."""
        idle = (key for key, slot in self._slots.items() if not slot.waiting and key not in self._mismatches)
        oldest = next(idle, None)
        if oldest is not None:
            del self._slots[oldest]
