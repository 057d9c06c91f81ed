"""What became of each rank in a test, and in which state that leaves each phase of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrun.diagnosis.consequences import describe_consequence
from jaxrun.protocol.pytest_messages import PEER_LOST, PHASES

_STRICT = "[XPASS(strict)]"


class PhaseState(enum.Enum):
    """Of one rank in one phase; the value is what the table says."""

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


# Those without a report of the rank's own.
CUT_OFF_STATES = frozenset((PhaseState.DIED, PhaseState.STUCK, PhaseState.BUSY, PhaseState.STOPPED))


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank's part.

    reports:  of pytest's, by phase
    end:      None if its test was over, else a state of CUT_OFF
    what:     of the end: "killed by SIGKILL (9)", or where it stood
    at:       seconds into the test until its first failure or its end; None without one
    printed:  what had been captured of it when it was cut off, by stream
    """

    reports: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    cut_off: PhaseState | None = None
    detail: str = ""
    failed_at: float | None = None
    captured: Mapping[str, str] = field(default_factory=dict)

    @property
    def cut_off_in(self) -> str:
        """The phase in which it was cut off; empty if it was not."""
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
        """In a few words, what there is to say of it in this phase."""
        state, report = self.state(phase), self.reports.get(phase)
        if self.cut_off is not None and report is None:
            return self.detail
        if report is None or state in (PhaseState.PASSED, PhaseState.XPASSED):
            return ""
        if state is PhaseState.PEER_LOST:
            return str(report[PEER_LOST])
        if state in (PhaseState.SKIPPED, PhaseState.XFAILED):
            return str(report.get("wasxfail") or _reason(report))
        return message(report).partition("\n")[0]

    def place(self, phase: str) -> str:
        """`test_x.py:14`, where its failure was raised; empty without one."""
        crash = _crash(self.reports.get(phase, {}))
        return f"{str(crash['path']).rpartition('/')[2]}:{crash['lineno']}" if crash else ""

    def is_consequence(self, phase: str) -> bool:
        """Whether its failure is of a kind that others' ends bring about."""
        report = self.reports.get(phase)
        return (
            self.state(phase) is PhaseState.FAILED
            and report is not None
            and bool(describe_consequence(message(report)))
        )


def message(report: Mapping[str, Any]) -> str:
    """What a failure says."""
    crash = _crash(report)
    if crash:
        return str(crash["message"])
    longrepr = report.get("longrepr")
    text = longrepr if isinstance(longrepr, str) else ""
    # Of a fixture that is not there pytest says so below a piece of source.
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[0] if errors else text


def _crash(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    longrepr = report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return crash if report.get("outcome") == "failed" else None


def _reason(report: Mapping[str, Any]) -> str:
    """Of a skip: (file, line, "Skipped: no gpu")."""
    longrepr = report.get("longrepr")
    text = str(longrepr[2]) if isinstance(longrepr, (list, tuple)) and len(longrepr) == 3 else str(longrepr or "")
    return text.removeprefix("Skipped: ")


def _state(report: Mapping[str, Any]) -> PhaseState:
    outcome, expected = report["outcome"], "wasxfail" in report
    if outcome == "skipped":
        return PhaseState.XFAILED if expected else PhaseState.SKIPPED
    if outcome == "passed":
        return PhaseState.XPASSED if expected else PhaseState.PASSED
    if report.get(PEER_LOST):
        return PhaseState.PEER_LOST
    longrepr = report.get("longrepr")
    strict = isinstance(longrepr, str) and longrepr.startswith(_STRICT)
    return PhaseState.XPASSED_STRICT if strict else PhaseState.FAILED
