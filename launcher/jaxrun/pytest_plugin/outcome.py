"""The outcome of one phase of a test, from the results of all its ranks.

| ranks                                                 | outcome                                                    |
|-------------------------------------------------------|------------------------------------------------------------|
| any failed or died for a reason of its own            | failed; the first of them in time leads                    |
| any failed as `xfail` expects                         | xfailed, whatever the others did that waited for it        |
| all passed where a strict `xfail` expects a failure   | failed                                                     |
| all skipped                                           | skipped                                                    |
| some skipped, others not                              | failed: the ranks disagree                                 |
| any was stuck, not over, or waited for a lost rank    | failed                                                     |
| all passed, but fell out of step                      | failed, or xfailed where a failure is expected             |
| all passed                                            | passed, or xpassed                                         |

If the test expects ranks to die (`dies=`), their deaths and the consequences for other ranks count as passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.protocol.pytest_messages import PHASES
from jaxrun.pytest_plugin.rank_results import CUT_OFF_STATES, PhaseState, RankResult
from jaxrun.text import format_ranks

_PASSED = (PhaseState.PASSED, PhaseState.XPASSED)
_HELD_UP = (*CUT_OFF_STATES, PhaseState.PEER_LOST)
# The rank whose class comes first here leads.
_PRECEDENCE = ("own failure", "expected", "strict", "consequence", "held up", "skipped", "passed")
_CLASSES = {PhaseState.XFAILED: "expected", PhaseState.XPASSED_STRICT: "strict", PhaseState.SKIPPED: "skipped"}


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """The outcome of one phase.

    outcome:  "passed", "failed" or "skipped", as in pytest's reports
    lead:     the rank whose report stands for all
    states:   by rank
    reason:   of a failure that is no single rank's
    """

    phase: str
    outcome: str
    lead: int
    states: Mapping[int, PhaseState]
    reason: str = ""


def decide_outcome(
    phase: str, results: Mapping[int, RankResult], dies: frozenset[int] = frozenset(), *, in_step: bool = True
) -> PhaseOutcome | None:
    """The outcome of a phase; None if no rank reached it.

    dies:     the ranks that the test expects to die
    in_step:  whether all ranks have made the same cross-process calls
    """
    states = _phase_states(phase, results)
    present = [rank for rank, state in states.items() if state is not PhaseState.ABSENT]
    if not present:
        return None
    died = frozenset(rank for rank in dies if results[rank].cut_off is PhaseState.DIED)
    if dies and died == dies:
        caused = [r for r in present if _caused_by_expected_death(states[r], results[r], phase, expected=r in dies)]
        states |= dict.fromkeys(caused, PhaseState.PASSED)
    lead = _choose_lead(phase, results, states, present)
    outcome, reason = _combine(states, present)
    if phase == "call" and outcome == "passed" and not in_step:
        failure_expected = PhaseState.XPASSED in states.values()
        outcome, reason = "skipped" if failure_expected else "failed", "the ranks fell out of step"
    alive = {rank for rank in dies - died if phase == "call" and states[rank] in _PASSED}
    if alive and outcome == "passed":
        outcome, reason = "failed", f"{format_ranks(alive)} {'was' if len(alive) == 1 else 'were'} to die, and did not"
    if _classify(states[lead], results[lead], phase) == "held up" and _fails_later(phase, results, dies):
        outcome, reason = "passed", ""
    return PhaseOutcome(phase, outcome, lead, states, reason)


def _phase_states(phase: str, results: Mapping[int, RankResult]) -> dict[int, PhaseState]:
    """The states of all ranks; a rank that was cut off in setup while another was in the call counts as in the call."""
    states = {rank: result.state(phase) for rank, result in results.items()}
    if phase != "teardown" and any(result.state("call") is not PhaseState.ABSENT for result in results.values()):
        for rank, result in results.items():
            if result.cut_off is not None and result.cut_off_in == "setup":
                states[rank] = result.cut_off if phase == "call" else PhaseState.ABSENT
    return states


def _fails_later(phase: str, results: Mapping[int, RankResult], dies: frozenset[int]) -> bool:
    """Whether a rank failed in a later phase, which is why others were held up in this one."""
    later = PHASES[PHASES.index(phase) + 1 :]
    return any(
        _classify(result.state(one), result, one) == "own failure"
        for rank, result in results.items()
        if rank not in dies
        for one in later
    )


def _caused_by_expected_death(state: PhaseState, result: RankResult, phase: str, *, expected: bool) -> bool:
    """Whether this is an `expected` death, or a consequence of one."""
    if expected:
        return state is PhaseState.DIED
    return state in _HELD_UP or result.is_consequence(phase)


def _choose_lead(
    phase: str, results: Mapping[int, RankResult], states: Mapping[int, PhaseState], present: list[int]
) -> int:
    """The rank with the first failure of its own; without one, the first rank whose state decides the outcome."""

    def order(rank: int) -> tuple[int, float, int]:
        result = results[rank]
        return _PRECEDENCE.index(_classify(states[rank], result, phase)), result.failed_at or 0.0, rank

    return min(present, key=order)


def _classify(state: PhaseState, result: RankResult, phase: str) -> str:
    if state in (PhaseState.FAILED, PhaseState.DIED):
        return "consequence" if result.is_consequence(phase) else "own failure"
    if state in _HELD_UP:
        return "held up"
    if state in _PASSED:
        return "passed"
    return _CLASSES.get(state, "absent")


def _combine(states: Mapping[int, PhaseState], present: list[int]) -> tuple[str, str]:
    """The outcome for the states of the ranks that reached the phase, and the reason if no single rank has one."""
    found = {states[rank] for rank in present}
    if found & {PhaseState.FAILED, PhaseState.DIED}:
        return "failed", ""
    if PhaseState.XFAILED in found:
        return "skipped", ""
    if PhaseState.XPASSED_STRICT in found:
        return "failed", ""
    if PhaseState.SKIPPED in found:
        if found == {PhaseState.SKIPPED}:
            return "skipped", ""
        skipped = [rank for rank in present if states[rank] is PhaseState.SKIPPED]
        others = [rank for rank in present if rank not in skipped]
        return "failed", f"the ranks disagree: {format_ranks(skipped)} skipped, {format_ranks(others)} did not"
    return ("failed" if found & set(_HELD_UP) else "passed"), ""
