"""What became of each rank in a test, phase by phase, and of the test as a whole."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.consequences import find_consequence
from jaxrun.protocol.pytest_messages import PEER_LOST, PHASES

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


class RankResult(Struct, frozen=True):
    """What became of one rank.

    reports:    pytest's reports by phase
    cut_off:    a state of CUT_OFF_STATES if the rank did not finish the test, else None
    detail:     of the cut-off: "killed by SIGKILL (9)", or where the rank was
    failed_at:  seconds into the test until the first failure or the cut-off; None without one
    captured:   output that pytest had captured before the cut-off, by stream
    waits_for:  where it was cut off as it waited for other ranks: those that had not come to the same call
    """

    reports: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    cut_off: PhaseState | None = None
    detail: str = ""
    failed_at: float | None = None
    captured: Mapping[str, str] = field(default_factory=dict)
    waits_for: tuple[int, ...] = ()

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
        if report is None:
            return self.detail
        if state in (PhaseState.PASSED, PhaseState.XPASSED):
            return ""
        if state is PhaseState.PEER_LOST:
            return str(report[PEER_LOST])
        if state in (PhaseState.SKIPPED, PhaseState.XFAILED):
            return str(report.get("wasxfail") or _skip_reason(report))
        return _failure_message(report).partition("\n")[0]

    def place(self, phase: str) -> str:
        """The place where the failure was raised: `test_x.py:14`; empty if there was none."""
        crash = _crash(self.reports.get(phase, {}))
        return f"{str(crash['path']).rpartition('/')[2]}:{crash['lineno']}" if crash else ""

    def is_consequence(self, phase: str) -> bool:
        """Whether the failure is of a kind that the end of another rank causes."""
        return self.state(phase) is PhaseState.FAILED and bool(find_consequence(_failure_message(self.reports[phase])))


class RunResult(Struct, frozen=True):
    """How a test went.

    ranks:       what became of each rank
    hosts:       by rank
    span:        when it began and ended, in seconds since the epoch
    timeout:     the time limit that was reached, in seconds; None if none was
    reusable:    whether the session can run another test
    divergence:  how the ranks fell out of step, in several lines; empty if they did not
    notes:       more lines for the report, such as the launcher's
    """

    ranks: Mapping[int, RankResult]
    hosts: Mapping[int, str]
    span: tuple[float, float] = (0.0, 0.0)
    timeout: float | None = None
    reusable: bool = True
    divergence: str = ""
    notes: tuple[str, ...] = ()


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
