"""What has happened in one test so far, and what is to be done about it: a state machine without I/O.

It is fed with what the ranks say, and answers with orders. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrun.contract.testing import (
    Asks,
    Debug,
    Failing,
    Fault,
    Finished,
    Forsaken,
    FromRank,
    Gather,
    Gathered,
    Phase,
    Says,
    Warned,
)
from jaxrun.lockstep.flight import Flight, members
from jaxrun.pytest_plugin.orders import Inflict, Order, Read, Record, Show, Tell
from jaxrun.ranks import spell


@dataclass(slots=True)
class Progress:
    """How far one rank has come; `failed`, `finished` and `gone`: when."""

    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: Mapping[str, int] | None = None
    histories: Mapping[str, int] = field(default_factory=dict)
    failed: float | None = None
    finished: float | None = None
    gone: float | None = None
    waits: Gather | None = None

    @property
    def over(self) -> bool:
        return self.calls is not None or self.gone is not None


class Course:
    """`debug`: the rank that may be debugged when it fails; -1: the first to fail; None: none."""

    def __init__(self, size: int, debug: int | None = None) -> None:
        self.ranks = {rank: Progress() for rank in range(size)}
        self.debugging: int | None = None
        self._debug = debug
        self._faults: set[Fault] = set()
        self._warnings: set[Warned] = set()
        self._held: list[tuple[int, Says | Asks | Failing]] = []

    @property
    def over(self) -> bool:
        return all(rank.over for rank in self.ranks.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have neither finished nor gone."""
        return tuple(number for number, rank in self.ranks.items() if not rank.over)

    @property
    def failed(self) -> float | None:
        """When the first failure or death was."""
        times = [time for rank in self.ranks.values() for time in (rank.failed, rank.gone) if time is not None]
        return min(times, default=None)

    @property
    def finished(self) -> float | None:
        """When the last of those that have finished did."""
        return max((rank.finished for rank in self.ranks.values() if rank.finished is not None), default=None)

    @property
    def in_step(self) -> bool:
        """Whether all ranks have made as many cross-process calls, each group of them its own."""
        counts = [rank.calls or {} for rank in self.ranks.values()]
        groups = {group for made in counts for group in made}
        return all(len({counts[rank].get(group, 0) for rank in members(group)}) <= 1 for group in groups)

    @property
    def is_doubtful(self) -> bool:
        """Whether all have come to the end of their test, and yet not all seem to have made the same calls."""
        if self.failed is not None or not self.over:
            return False
        groups = {group for rank in self.ranks.values() for group in rank.histories}
        known = ([self.ranks[rank].histories.get(group) for rank in members(group)] for group in groups)
        return not self.in_step or any(len({*histories} - {None}) > 1 for histories in known)

    def deserted(self, flights: Mapping[int, Flight]) -> str:
        """Who makes a call with a rank that has finished without it, and so waits for ever; empty if nobody does.

        `flights`: what the recorders of the ranks hold.
        """
        finished = {number: rank.calls for number, rank in self.ranks.items() if rank.calls is not None}
        for number in self.missing:
            flight = flights.get(number, Flight())
            for group in {call.group for call in (flight.last, flight.pending) if call is not None}:
                reached = flight.reached(group)
                without = [one for one in members(group) if one in finished and finished[one].get(group, 0) < reached]
                if without:
                    call = f"is in cross-process call #{reached} of ranks {group}"
                    return f"rank {number} {call}, and {spell(without)} finished the test without it"
        return ""

    def said(self, number: int, message: FromRank, now: float) -> Iterator[Order]:
        """A rank has said something; yields what to do about it, which is to be done at once."""
        if isinstance(message, (Says, Asks, Failing)):
            yield from self._debugger(number, message)
            return
        if self.debugging == number:
            yield from self._debugged()
        rank = self.ranks[number]
        match message:
            case Phase(report):
                rank.reports[report["when"]] = report
                if report["outcome"] == "failed" and rank.failed is None:
                    rank.failed = now
            case Gather():
                rank.waits = message
                yield from self._meet()
            case Fault() if message not in self._faults:
                self._faults.add(message)
                yield Inflict(message)
            case Warned() if message not in self._warnings:
                self._warnings.add(message)
                yield Record(message)
            case Finished(calls, histories):
                rank.calls, rank.histories, rank.finished = calls, histories, now
                yield from self._meet()

    def gone(self, number: int, now: float) -> Iterator[Order]:
        """A rank's connection has ended."""
        self.ranks[number].gone = now
        if self.debugging == number:
            yield from self._debugged()
        yield from self._meet()

    # ---- ranks that wait for each other

    def _meet(self) -> Iterator[Order]:
        waiting = {number: rank.waits for number, rank in self.ranks.items() if rank.waits and not rank.over}
        if not waiting:
            return
        why = self._why_not(waiting)
        if not why and len(waiting) < len(self.ranks):
            return
        for number in waiting:
            self.ranks[number].waits = None
        if why:
            yield Tell(Forsaken(why), tuple(waiting))
            return
        values = tuple(gather.value for gather in waiting.values())
        root = next(iter(waiting.values())).root
        yield Tell(Gathered(values if root < 0 else (values[root],)), tuple(waiting))

    def _why_not(self, waiting: Mapping[int, Gather]) -> str:
        """Why these will never meet; empty if they may."""
        gone = [number for number, rank in self.ranks.items() if rank.gone is not None]
        if gone:
            return f"{spell(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        for number, rank in self.ranks.items():
            if rank.calls is not None:
                return f"rank {number} {_ending(rank)}"
        places: dict[str, list[int]] = {}
        for number, gather in waiting.items():
            places.setdefault(gather.where, []).append(number)
        if len(waiting) == len(self.ranks) and len(places) > 1:
            return ", ".join(
                f"{spell(ranks)} {'is' if len(ranks) == 1 else 'are'} at {at}" for at, ranks in places.items()
            )
        return ""

    # ---- debuggers: one at a time

    def _debugger(self, number: int, message: Says | Asks | Failing) -> Iterator[Order]:
        if self.debugging not in (None, number):
            self._held.append((number, message))
            return
        match message:
            case Failing(error):
                yes = self._debug in (-1, number)
                if yes:
                    self._debug, self.debugging = None, number  # one rank of a test
                    yield Show(number, f"{error}\n")
                yield Tell(Debug(yes), (number,))
            case Says(text):
                self.debugging = number
                yield Show(number, text)
            case Asks():
                self.debugging = number
                yield Read(number)

    def _debugged(self) -> Iterator[Order]:
        """The debugger has been left: others have their turn."""
        self.debugging = None
        held, self._held = self._held, []
        for number, message in held:
            yield from self._debugger(number, message)


def _ending(rank: Progress) -> str:
    outcomes = {report["outcome"] for report in rank.reports.values()}
    return "has failed" if "failed" in outcomes else "has skipped" if "skipped" in outcomes else "has finished its test"
