"""Matches the ranks' cross-process calls: are all about to make the same one?

A call is identified by its group of ranks and its number among the calls of that group. Ranks that wait for an answer
(strict mode) may proceed once the whole group has sent the call with the same program. There is a mismatch if two
programs differ, a rank that is needed has ended, or all ranks wait for each other. A mismatch is handled a moment
later, so that the calls of the other ranks are known by then.

A rank whose program is not compiled yet is about to make the call, too, unless its compilation fails: then another
program may get the same number. So programs that are not compiled differ only if a rank has lowered none of the
programs that the others have. Programs that exchange nothing are compared by ReplicatedPrograms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from msgspec import Struct, field

from jaxrun.controller.head.timers import Timer, Timers
from jaxrun.job_events.actions import Action, Send
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.worker_messages import Call, CallMismatch, Proceed

MISMATCH_SETTLE_S = 0.1  # once every rank of the group has arrived, has ended or waits elsewhere
_MISMATCH_TIMEOUT_S = 2.0  # for ranks that have not arrived: compiling may take them longer
_LOWERED_MISMATCH_TIMEOUT_S = 0.5  # the same, before anything is compiled
_MAX_PROGRAMS = 1024  # replicated programs that are remembered
_MAX_OPEN_SLOTS = 1024  # in record mode only some ranks send a call, because the others know its program already

SlotKey = tuple[str, int]  # group, number


class CallSlot(Struct):
    """One call of a group, and the programs that the ranks which have sent it are about to run.

    members:      the ranks of the group
    mismatch:     why the group will not make the call together, once that was sent to the waiting ranks
    is_matching:  whether all ranks that have sent the call are about to run the same program, as far as known
    lowered:      the ranks that still have to compile the program
    """

    key: SlotKey
    members: frozenset[int]
    calls: dict[int, Call] = field(default_factory=dict)
    mismatch: str = ""
    is_matching: bool = True
    lowered: set[int] = field(default_factory=set)
    _keys: set[str] = field(default_factory=set)  # of the programs that are compiled
    _codes: set[str] = field(default_factory=set)
    _codes_of_rank: dict[int, set[str]] = field(default_factory=dict)  # lowered or compiled, for this call
    _ranks_of_code: Counter[str] = field(default_factory=Counter)
    _has_common_code: bool = True

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(rank for rank, call in self.calls.items() if call.waits_for_answer)

    def add(self, call: Call) -> None:
        self.calls[call.rank] = call
        if call.is_compiled:
            self.lowered.discard(call.rank)
        else:
            self.lowered.add(call.rank)
        if call.is_compiled:
            self._keys.add(call.key)
            self._codes |= {call.code} - {""}
        if call.code:
            known = self._codes_of_rank.setdefault(call.rank, set())
            if call.code not in known:
                known.add(call.code)
                self._ranks_of_code[call.code] += 1
            self._has_common_code = any(self._ranks_of_code[code] == len(self._codes_of_rank) for code in known)
        self.is_matching = len(self._keys) <= 1 and len(self._codes) <= 1 and self._has_common_code

    def remove(self, ranks: Iterable[int]) -> None:
        """Remove ranks that compile the program now, and will send the call again."""
        for rank in ranks:
            del self.calls[rank]
            self.lowered.discard(rank)
            self._ranks_of_code.subtract(self._codes_of_rank.pop(rank, ()))


OnMismatch = Callable[[CallSlot, float], list[Action]]


class CallMatcher:
    """The calls of one job that not all ranks of their group have sent. Times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str], timers: Timers, then: OnMismatch) -> None:
        """`hosts` has every rank of the job; `then` is called for each mismatch when it is time to handle it."""
        self._hosts = hosts
        self._timers = timers
        self._then = then
        self._slots: dict[SlotKey, CallSlot] = {}
        self._ended: dict[int, Mapping[str, int] | None] = {}  # rank → its number of calls in each group, if known
        self._waiting: dict[int, Call] = {}

    @property
    def waiting(self) -> Mapping[int, Call]:
        """The ranks that wait for an answer, each with its call."""
        return self._waiting

    def add(self, call: Call, now: float) -> list[Action]:
        key = (call.group, call.number)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = CallSlot(key, parse_group(call.group, len(self._hosts)))
        if slot.mismatch:
            return [Send((call.rank,), CallMismatch(*key, slot.mismatch))] if call.waits_for_answer else []
        did_match = slot.is_matching
        slot.add(call)
        if call.waits_for_answer:
            self._waiting[call.rank] = call
        if not slot.is_matching or any(self._cannot_come(rank, slot) for rank in self._ended):
            self._add_mismatch(slot, now)
        elif not did_match:
            self._timers.cancel_one(Timer.MISMATCH, key)
        if self._is_mismatch(key):
            self._hasten_if_complete(slot, now)
        elif len(slot.calls) == len(slot.members):
            return self._proceed(slot)
        elif len(self._slots) > _MAX_OPEN_SLOTS:
            self._remove_oldest()
        return []

    def find(self, key: SlotKey) -> CallSlot | None:
        """Return the call, unless all ranks of its group have sent it."""
        return self._slots.get(key)

    def remove_rank(self, rank: int, made: Mapping[str, int] | None, now: float) -> None:
        """Note that a rank makes no more calls; `made`: its number of calls in each group, None if unknown."""
        self._ended[rank] = made
        for slot in self._slots.values():
            if self._cannot_come(rank, slot):
                self._add_mismatch(slot, now)

    def restore_rank(self, rank: int) -> None:
        """Note that a rank that had ended makes calls again; all calls that it has not made are forgotten."""
        self._ended.pop(rank, None)
        for key in [key for key, slot in self._slots.items() if rank in slot.members]:
            for other in self._slots.pop(key).waiting:
                self._waiting.pop(other, None)
            self._timers.cancel_one(Timer.MISMATCH, key)

    def find_compilations(self) -> list[CallSlot]:
        """Return the calls for which ranks are compiling a program, unless all ranks of their group are."""
        slots = self._slots.values()
        return [slot for slot in slots if slot.lowered and not slot.mismatch and len(slot.calls) < len(slot.members)]

    def has_ended(self, rank: int) -> bool:
        return rank in self._ended

    def calls_made(self, rank: int, group: str) -> int | None:
        """Return the number of calls of the group that a rank had made when it ended; None if unknown."""
        made = self._ended.get(rank)
        return made.get(group, 0) if made is not None else None

    def mark_all_waiting(self, now: float) -> None:
        """Note that every rank waits for others that never come: all calls in which ranks wait are mismatches."""
        for slot in self._slots.values():
            if slot.waiting:
                self._add_mismatch(slot, now)

    def resolve(self, slot: CallSlot, mismatch: str) -> list[Action]:
        """Send this text to the ranks that wait in the call, now or later."""
        slot.mismatch = mismatch
        actions = self._answer(slot.waiting, CallMismatch(*slot.key, mismatch))
        slot.calls.clear()
        slot.lowered.clear()
        return actions

    def _proceed(self, slot: CallSlot) -> list[Action]:
        """Let the group proceed, now that all its ranks have arrived: ranks with programs to compile go first."""
        if not slot.lowered:
            del self._slots[slot.key]
            return self._answer(slot.waiting, Proceed(*slot.key))
        if not slot.calls[next(iter(slot.lowered))].waits_for_answer:  # in record mode no other call waits, either
            return []
        first = tuple(rank for rank in slot.waiting if rank in slot.lowered)
        slot.remove(first)
        if not slot.calls:
            del self._slots[slot.key]
        return self._answer(first, Proceed(*slot.key))

    def _answer(self, ranks: tuple[int, ...], answer: Proceed | CallMismatch) -> list[Action]:
        for rank in ranks:
            self._waiting.pop(rank, None)
        return [Send(ranks, answer)] if ranks else []

    def _cannot_come(self, rank: int, slot: CallSlot) -> bool:
        """Whether the call needs this rank, which has ended without making it."""
        if rank in slot.calls or rank not in slot.members:
            return False
        made = self.calls_made(rank, slot.key[0])
        return made < slot.key[1] if made is not None else bool(slot.waiting)

    def _add_mismatch(self, slot: CallSlot, now: float) -> None:
        if slot.mismatch:
            return
        if not self._is_mismatch(slot.key):
            timeout = _LOWERED_MISMATCH_TIMEOUT_S if slot.lowered else _MISMATCH_TIMEOUT_S
            self._timers.set(Timer.MISMATCH, now + timeout, partial(self._handle_mismatch, slot.key), of=slot.key)
        self._hasten_if_complete(slot, now)

    def _hasten_if_complete(self, slot: CallSlot, now: float) -> None:
        if slot.members <= slot.calls.keys() | self._ended.keys() | self._waiting.keys():
            then = partial(self._handle_mismatch, slot.key)
            self._timers.advance(Timer.MISMATCH, now + MISMATCH_SETTLE_S, then, of=slot.key)

    def _is_mismatch(self, key: SlotKey) -> bool:
        """Whether the ranks differ in this call, and the mismatch has not been handled yet."""
        return self._timers.at(Timer.MISMATCH, of=key) is not None

    def _handle_mismatch(self, key: SlotKey, now: float) -> list[Action]:
        slot = self._slots.get(key)
        return self._then(slot, now) if slot is not None else []

    def _remove_oldest(self) -> None:
        """Forget the oldest call in which no rank waits."""
        idle = (key for key, slot in self._slots.items() if not slot.waiting and not self._is_mismatch(key))
        oldest = next(idle, None)
        if oldest is not None:
            del self._slots[oldest]


class ReplicatedPrograms:
    """The first calls, on all ranks, of programs of replicated values, which exchange nothing between ranks.

    A rank may run such a program alone, for example to print a loss. But if all ranks run one of the same name and
    shapes, for example to update parameters, it should be the same program.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        """`hosts` has every rank of the job."""
        self._hosts = hosts
        self._calls: dict[tuple[str, str, str], dict[int, dict[str, Call]]] = {}  # group, name, key → rank → code
        self._suspects: set[tuple[str, str, str]] = set()

    def add(self, call: Call) -> None:
        if call.code and len(self._calls) < _MAX_PROGRAMS:
            ranks = self._calls.setdefault((call.group, call.name, call.key), {})
            ranks.setdefault(call.rank, {}).setdefault(call.code, call)

    def pop_mismatches(self, *, is_last: bool = False) -> list[Mapping[int, Call]]:
        """Return the calls of programs that all ranks of their group have run, each differently. Each comes only once.

        A rank may still be about to run the others' program, so a mismatch must be seen twice, except the last time.
        """
        found = {key for key, ranks in self._calls.items() if self._differs(key[0], ranks)}
        certain = found if is_last else found & self._suspects
        self._suspects = found - certain
        return [{rank: next(iter(calls.values())) for rank, calls in self._calls.pop(key).items()} for key in certain]

    def _differs(self, group: str, ranks: Mapping[int, Mapping[str, Call]]) -> bool:
        has_all = ranks.keys() >= parse_group(group, len(self._hosts))
        return has_all and not set.intersection(*(set(calls) for calls in ranks.values()))
