"""How far each rank has come in a test, whether the ranks are in step, and what became of each, phase by phase."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrun.analysis.diagnosis.consequences import find_consequence
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.pytest_messages import PEER_LOST, PHASES, Gather
from jaxrun.text import format_ranks

_STRICT_XPASS = "[XPASS(strict)]"  # how pytest's report of a strict xfail that passed begins


class PhaseState(enum.Enum):
    """The state of one rank in one phase; the value is the word in the table."""

    FAILED = "FAILED"
    DIED = "DIED"
    STUCK = "STUCK"
    BUSY = "NOT OVER"
    STOPPED = "STOPPED"
    PEER_LOST = "WAITED"
    XPASSED_STRICT = "XPASS(strict)"
    XFAILED = "xfailed"
    SKIPPED = "skipped"
    XPASSED = "xpassed"
    PASSED = "passed"
    ABSENT = "not reached"


# The states without a report from the rank itself.
CUT_OFF_STATES = frozenset((PhaseState.DIED, PhaseState.STUCK, PhaseState.BUSY, PhaseState.STOPPED))


@dataclass(slots=True)
class RankProgress:
    """How far one rank has come in the test.

    reports:          pytest's reports by phase
    calls, chains:    cross-process calls by group, from RunFinished; calls is None until the rank has finished
    failed_at, finished_at, disconnected_at:  times; None until it happens
    gather:           the gather that the rank waits in
    """

    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: Mapping[str, int] | None = None
    chains: Mapping[str, int] = field(default_factory=dict)
    failed_at: float | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None
    gather: Gather | None = None

    @property
    def done(self) -> bool:
        return self.calls is not None or self.disconnected_at is not None

    @property
    def failed(self) -> bool:
        return self.failed_at is not None or self.disconnected_at is not None


@dataclass(frozen=True, slots=True)
class RankResult:
    """What became of one rank.

    reports:    pytest's reports by phase
    cut_off:    a state of CUT_OFF_STATES if the rank did not finish the test, else None
    detail:     of the cut-off: "of SIGKILL (9)", or where the rank was
    failed_at:  seconds into the test until the first failure or the cut-off; None without one
    captured:   output that pytest had captured before the cut-off, by stream
    """

    reports: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    cut_off: PhaseState | None = None
    detail: str = ""
    failed_at: float | None = None
    captured: Mapping[str, str] = field(default_factory=dict)

    @property
    def cut_off_in(self) -> str:
        """The phase in which the rank was cut off; empty if it was not."""
        if self.cut_off is None:
            return ""
        setup = self.reports.get("setup")
        if setup is not None and setup["outcome"] != "passed":
            return "teardown"
        return next((phase for phase in PHASES if phase not in self.reports), "teardown")

    def state(self, phase: str) -> PhaseState:
        if self.cut_off is not None and self.cut_off_in == phase:
            return self.cut_off
        report = self.reports.get(phase)
        return PhaseState.ABSENT if report is None else _state(report)

    def headline(self, phase: str) -> str:
        """One line about the rank in this phase; empty if it passed."""
        state, report = self.state(phase), self.reports.get(phase)
        if self.cut_off is not None and report is None:
            return self.detail
        if report is None or state in (PhaseState.PASSED, PhaseState.XPASSED):
            return ""
        if state is PhaseState.PEER_LOST:
            return str(report[PEER_LOST])
        if state in (PhaseState.SKIPPED, PhaseState.XFAILED):
            return str(report.get("wasxfail") or _skip_reason(report))
        return _failure_message(report).partition("\n")[0]

    def place(self, phase: str) -> str:
        """Where the failure was raised: `test_x.py:14`; empty if it was not."""
        crash = _crash(self.reports.get(phase, {}))
        return f"{str(crash['path']).rpartition('/')[2]}:{crash['lineno']}" if crash else ""

    def is_consequence(self, phase: str) -> bool:
        """Whether the failure is of a kind that the end of another rank causes."""
        report = self.reports.get(phase)
        failed = report is not None and self.state(phase) is PhaseState.FAILED
        return failed and bool(find_consequence(_failure_message(report or {})))


# ---- whether the ranks are in step


def in_step(ranks: Mapping[int, RankProgress]) -> bool:
    """Whether all ranks of each group have made the same number of cross-process calls."""
    counts = {number: rank.calls or {} for number, rank in ranks.items()}
    groups = {group for made in counts.values() for group in made}
    return all(len({counts[rank].get(group, 0) for rank in parse_group(group, len(ranks))}) <= 1 for group in groups)


def may_be_out_of_step(ranks: Mapping[int, RankProgress]) -> bool:
    """Whether all ranks have finished without a failure, but not all of them seem to have made the same calls."""
    if any(rank.failed or not rank.done for rank in ranks.values()):
        return False
    groups = {group for rank in ranks.values() for group in rank.chains}
    known = ([ranks[number].chains.get(group) for number in parse_group(group, len(ranks))] for group in groups)
    return not in_step(ranks) or any(len({*chains} - {None}) > 1 for chains in known)


def find_abandoned_rank(ranks: Mapping[int, RankProgress], flights: Mapping[int, Flight]) -> str:
    """A sentence about a rank that waits for ever in a call with a rank that finished without it; "" if none.

    `flights`: the flight recorders of the ranks.
    """
    finished = {number: rank.calls for number, rank in ranks.items() if rank.calls is not None}
    for number in (number for number, rank in ranks.items() if not rank.done):
        flight = flights.get(number, Flight())
        for group in {call.group for call in (flight.last_call, flight.pending) if call is not None}:
            reached = flight.last_number(group)
            members = parse_group(group, len(ranks)) & finished.keys()
            without = [rank for rank in members if finished[rank].get(group, 0) < reached]
            if without:
                call = f"is in cross-process call #{reached} of ranks {group}"
                return f"rank {number} {call}, and {format_ranks(without)} finished the test without it"
    return ""


# ---- what pytest's reports say


def _state(report: Mapping[str, Any]) -> PhaseState:
    outcome, expected = report["outcome"], "wasxfail" in report
    if outcome == "skipped":
        return PhaseState.XFAILED if expected else PhaseState.SKIPPED
    if outcome == "passed":
        return PhaseState.XPASSED if expected else PhaseState.PASSED
    if report.get(PEER_LOST):
        return PhaseState.PEER_LOST
    longrepr = report.get("longrepr")
    strict = isinstance(longrepr, str) and longrepr.startswith(_STRICT_XPASS)
    return PhaseState.XPASSED_STRICT if strict else PhaseState.FAILED


def _failure_message(report: Mapping[str, Any]) -> str:
    crash = _crash(report)
    if crash:
        return str(crash["message"])
    longrepr = report.get("longrepr")
    text = longrepr if isinstance(longrepr, str) else ""
    # For a missing fixture, pytest's text begins with source lines; the error is the line that begins with "E ".
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[0] if errors else text


def _crash(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """pytest's path, line number and message of a failure; None without them."""
    longrepr = report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return crash if report.get("outcome") == "failed" else None


def _skip_reason(report: Mapping[str, Any]) -> str:
    longrepr = report.get("longrepr")  # (file, line, "Skipped: no gpu")
    text = str(longrepr[2]) if isinstance(longrepr, (list, tuple)) and len(longrepr) == 3 else str(longrepr or "")
    return text.removeprefix("Skipped: ")
