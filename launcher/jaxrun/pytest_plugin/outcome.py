"""The outcome of one phase of a test, from the parts of all its ranks.

| ranks                                                 | outcome                                                    |
|-------------------------------------------------------|------------------------------------------------------------|
| any failed or died for a reason of its own            | failed; the first of them in time leads                    |
| any failed as `xfail` expects                         | xfailed, whatever the others did that waited for it        |
| all passed where a strict `xfail` expects a failure   | failed                                                     |
| all skipped                                           | skipped                                                    |
| some skipped, others not                              | failed: the ranks disagree                                 |
| any was stuck, not over, or waited in vain            | failed                                                     |
| all passed, but fell out of step                      | failed, or xfailed where a failure is expected             |
| all passed                                            | passed, or xpassed                                         |

Where the test says that ranks die, their deaths count as passed, and so does what these do to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.protocol.pytest_messages import PHASES
from jaxrun.pytest_plugin.rank_results import CUT_OFF_STATES, PhaseState, RankResult
from jaxrun.text import format_ranks

_PASSED = (PhaseState.PASSED, PhaseState.XPASSED)
_HELD_UP = (*CUT_OFF_STATES, PhaseState.PEER_LOST)


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """Of one phase.

    outcome:  "passed", "failed" or "skipped", as pytest has it
    lead:     the rank whose report stands for all
    states:   by rank
    why:      of a failure that no rank by itself has
    """

    phase: str
    outcome: str
    lead: int
    states: Mapping[int, PhaseState]
    reason: str = ""


def decide_outcome(
    phase: str, parts: Mapping[int, RankResult], dies: frozenset[int] = frozenset(), *, in_step: bool = True
) -> PhaseOutcome | None:
    """The outcome; None if no rank came to this phase.

    dies:     the ranks whose death belongs to the test
    in_step:  whether all have made the same cross-process calls
    """
    states = _states(phase, parts)
    present = [rank for rank, state in states.items() if state is not PhaseState.ABSENT]
    if not present:
        return None
    died = frozenset(rank for rank in dies if parts[rank].cut_off is PhaseState.DIED)
    if dies and died == dies:
        states |= {
            rank: PhaseState.PASSED
            for rank in present
            if _caused_by_expected_death(states[rank], parts[rank], phase, rank in dies)
        }
    lead = _choose_lead(phase, parts, states, present)
    outcome, why = _decide(states, present)
    alive = {rank for rank in dies - died if phase == "call" and states[rank] in _PASSED}
    if phase == "call" and not in_step and outcome == "passed":
        expected = PhaseState.XPASSED in states.values()
        outcome, why = "skipped" if expected else "failed", "the ranks fell out of step"
    if alive and outcome == "passed":
        outcome, why = "failed", f"{format_ranks(alive)} {'was' if len(alive) == 1 else 'were'} to die, and did not"
    if _classify(states[lead], parts[lead], phase) == "hindered" and _fails_later(phase, parts, dies):
        outcome, why = "passed", ""
    return PhaseOutcome(phase, outcome, lead, states, why)


def _states(phase: str, parts: Mapping[int, RankResult]) -> dict[int, PhaseState]:
    """As the ranks have them; but who was cut off in setup, while others were in the call, counts as in the call."""
    states = {rank: part.state(phase) for rank, part in parts.items()}
    if phase != "teardown" and any(part.state("call") is not PhaseState.ABSENT for part in parts.values()):
        early = {rank: part.cut_off for rank, part in parts.items() if part.cut_off and part.cut_off_in == "setup"}
        states |= {rank: end if phase == "call" else PhaseState.ABSENT for rank, end in early.items()}
    return states


def _fails_later(phase: str, parts: Mapping[int, RankResult], dies: frozenset[int]) -> bool:
    """Whether a rank that had come further failed there, and so is why others did not come through this phase."""
    later = PHASES[PHASES.index(phase) + 1 :]
    return any(
        _classify(part.state(one), part, one) == "own"
        for rank, part in parts.items()
        if rank not in dies
        for one in later
    )


def _caused_by_expected_death(state: PhaseState, part: RankResult, phase: str, dies: bool) -> bool:
    """Whether it is what a death that belongs to the test brings about."""
    if dies:
        return state is PhaseState.DIED
    return state in _HELD_UP or part.is_consequence(phase)


def _choose_lead(
    phase: str, parts: Mapping[int, RankResult], states: Mapping[int, PhaseState], present: list[int]
) -> int:
    """The rank whose own failure came first; else the first that has a report of what all have."""

    def order(rank: int) -> tuple[int, float, int]:
        at = parts[rank].failed_at
        return _PRECEDENCE.index(_classify(states[rank], parts[rank], phase)), at if at is not None else 0.0, rank

    return min(present, key=order)


_OTHERS = {PhaseState.XFAILED: "expected", PhaseState.XPASSED_STRICT: "strict", PhaseState.SKIPPED: "skipped"}
_PRECEDENCE = ("own", "expected", "strict", "victim", "hindered", "skipped", "passed")


def _classify(state: PhaseState, part: RankResult, phase: str) -> str:
    if state in (PhaseState.FAILED, PhaseState.DIED):
        return "victim" if part.is_consequence(phase) else "own"
    if state in _HELD_UP:
        return "hindered"
    if state in _PASSED:
        return "passed"
    return _OTHERS.get(state, "absent")


def _decide(states: Mapping[int, PhaseState], present: list[int]) -> tuple[str, str]:
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
    if found & set(_HELD_UP):
        return "failed", ""
    return "passed", ""
