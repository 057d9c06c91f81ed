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

from jaxrun.contract.testing import PHASES
from jaxrun.pytest_plugin.parts import CUT_OFF, Part, State
from jaxrun.ranks import spell

_PASSED = (State.PASSED, State.XPASSED)
_HINDERED = (*CUT_OFF, State.FORSAKEN)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one phase.

    outcome:  "passed", "failed" or "skipped", as pytest has it
    lead:     the rank whose report stands for all
    states:   by rank
    why:      of a failure that no rank by itself has
    """

    phase: str
    outcome: str
    lead: int
    states: Mapping[int, State]
    why: str = ""


def judge(
    phase: str, parts: Mapping[int, Part], dies: frozenset[int] = frozenset(), *, in_step: bool = True
) -> Outcome | None:
    """The outcome; None if no rank came to this phase.

    dies:     the ranks whose death belongs to the test
    in_step:  whether all have made the same cross-process calls
    """
    states = _states(phase, parts)
    present = [rank for rank, state in states.items() if state is not State.ABSENT]
    if not present:
        return None
    died = frozenset(rank for rank in dies if parts[rank].end is State.DIED)
    if dies and died == dies:
        states |= {rank: State.PASSED for rank in present if _by_that(states[rank], parts[rank], phase, rank in dies)}
    lead = _lead(phase, parts, states, present)
    outcome, why = _decide(states, present)
    alive = {rank for rank in dies - died if phase == "call" and states[rank] in _PASSED}
    if phase == "call" and not in_step and outcome == "passed":
        expected = State.XPASSED in states.values()
        outcome, why = "skipped" if expected else "failed", "the ranks fell out of step"
    if alive and outcome == "passed":
        outcome, why = "failed", f"{spell(alive)} {'was' if len(alive) == 1 else 'were'} to die, and did not"
    if _kind(states[lead], parts[lead], phase) == "hindered" and _fails_later(phase, parts, dies):
        outcome, why = "passed", ""
    return Outcome(phase, outcome, lead, states, why)


def _states(phase: str, parts: Mapping[int, Part]) -> dict[int, State]:
    """As the ranks have them; but who was cut off in setup, while others were in the call, counts as in the call."""
    states = {rank: part.state(phase) for rank, part in parts.items()}
    if phase != "teardown" and any(part.state("call") is not State.ABSENT for part in parts.values()):
        early = {rank: part.end for rank, part in parts.items() if part.end and part.cut_off_in == "setup"}
        states |= {rank: end if phase == "call" else State.ABSENT for rank, end in early.items()}
    return states


def _fails_later(phase: str, parts: Mapping[int, Part], dies: frozenset[int]) -> bool:
    """Whether a rank that had come further failed there, and so is why others did not come through this phase."""
    later = PHASES[PHASES.index(phase) + 1 :]
    return any(
        _kind(part.state(one), part, one) == "own" for rank, part in parts.items() if rank not in dies for one in later
    )


def _by_that(state: State, part: Part, phase: str, dies: bool) -> bool:
    """Whether it is what a death that belongs to the test brings about."""
    if dies:
        return state is State.DIED
    return state in _HINDERED or part.is_consequence(phase)


def _lead(phase: str, parts: Mapping[int, Part], states: Mapping[int, State], present: list[int]) -> int:
    """The rank whose own failure came first; else the first that has a report of what all have."""

    def order(rank: int) -> tuple[int, float, int]:
        at = parts[rank].at
        return _WEIGHT.index(_kind(states[rank], parts[rank], phase)), at if at is not None else 0.0, rank

    return min(present, key=order)


_OTHERS = {State.XFAILED: "expected", State.UNEXPECTED: "strict", State.SKIPPED: "skipped"}
_WEIGHT = ("own", "expected", "strict", "victim", "hindered", "skipped", "passed")


def _kind(state: State, part: Part, phase: str) -> str:
    if state in (State.FAILED, State.DIED):
        return "victim" if part.is_consequence(phase) else "own"
    if state in _HINDERED:
        return "hindered"
    if state in _PASSED:
        return "passed"
    return _OTHERS.get(state, "absent")


def _decide(states: Mapping[int, State], present: list[int]) -> tuple[str, str]:
    found = {states[rank] for rank in present}
    if found & {State.FAILED, State.DIED}:
        return "failed", ""
    if State.XFAILED in found:
        return "skipped", ""
    if State.UNEXPECTED in found:
        return "failed", ""
    if State.SKIPPED in found:
        if found == {State.SKIPPED}:
            return "skipped", ""
        skipped = [rank for rank in present if states[rank] is State.SKIPPED]
        others = [rank for rank in present if rank not in skipped]
        return "failed", f"the ranks disagree: {spell(skipped)} skipped, {spell(others)} did not"
    if found & set(_HINDERED):
        return "failed", ""
    return "passed", ""
