"""The outcome of one phase of a test, from the results of all its ranks, and the same in words.

The rank that comes first in the order of Standing leads: its standing decides. Of ranks that were cut off, those that
waited for others come last. Moreover the test fails

- if some ranks skipped and others did not, unless one failed for a reason of its own
- if all ranks passed, but fell out of step; if a failure is expected, this is the expected failure
- if all ranks passed, and one that was to die (`dies=`) did not

Expected deaths and their consequences for other ranks count as passed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

from msgspec import Struct

from jaxrun.frontends.pytest_plugin.rank_results import CUT_OFF_STATES, PhaseState, RankResult, RunResult
from jaxrun.protocol.pytest_messages import PHASES
from jaxrun.text import agree, format_columns, format_ranks, format_ranks_on_hosts, format_seconds

_HEADLINE_LENGTH = 90  # characters in the table; the traceback below has the whole text
_OUT_OF_STEP = "the ranks fell out of step"
_NO_FAILURE = (PhaseState.PASSED, PhaseState.ABSENT)


class Standing(enum.IntEnum):
    """How a rank fared, compared with others."""

    OWN_FAILURE = 0
    EXPECTED_FAILURE = 1
    STRICT_XPASS = 2
    CONSEQUENCE = 3  # of another rank's end
    HELD_UP = 4
    SKIPPED = 5
    PASSED = 6
    ABSENT = 7


_STANDINGS = {
    PhaseState.FAILED: Standing.OWN_FAILURE,
    PhaseState.DIED: Standing.OWN_FAILURE,
    PhaseState.XFAILED: Standing.EXPECTED_FAILURE,
    PhaseState.XPASSED_STRICT: Standing.STRICT_XPASS,
    PhaseState.SKIPPED: Standing.SKIPPED,
    PhaseState.PASSED: Standing.PASSED,
    PhaseState.XPASSED: Standing.PASSED,
    PhaseState.ABSENT: Standing.ABSENT,
}  # any other state: HELD_UP
# As in pytest's reports; any other standing: "failed".
_OUTCOMES = {Standing.EXPECTED_FAILURE: "skipped", Standing.SKIPPED: "skipped", Standing.PASSED: "passed"}


class PhaseOutcome(Struct, frozen=True):
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
    died = frozenset(rank for rank in dies if results[rank].cut_off is PhaseState.DIED)
    if died == dies:
        for rank in states:
            if dies and _belongs_to_deaths(states[rank], results[rank], phase, expected=rank in dies):
                states[rank] = PhaseState.PASSED
    standings = {rank: _standing(states[rank], results[rank], phase) for rank in states}
    lead = min(standings, key=lambda r: (standings[r], bool(results[r].waits_for), results[r].failed_at or 0.0, r))
    if standings[lead] is Standing.ABSENT:
        return None
    outcome, reason = _OUTCOMES.get(standings[lead], "failed"), ""
    if standings[lead] in (Standing.HELD_UP, Standing.SKIPPED) and (disagreement := _disagreement(standings)):
        outcome, reason = "failed", disagreement
    elif standings[lead] is Standing.PASSED and phase == "call":
        alive = [rank for rank in sorted(dies - died) if standings[rank] is Standing.PASSED]
        if not in_step:
            failure_expected = PhaseState.XPASSED in states.values()
            outcome, reason = "skipped" if failure_expected else "failed", _OUT_OF_STEP
        elif alive:
            outcome, reason = "failed", f"{format_ranks(alive)} {agree('was', len(alive))} to die, and did not"
    elif not in_step and states[lead] is PhaseState.STOPPED:  # by --lockstep fail
        reason = _OUT_OF_STEP
    if standings[lead] is Standing.HELD_UP and _fails_later(phase, results, dies):
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


def _standing(state: PhaseState, result: RankResult, phase: str) -> Standing:
    if state is PhaseState.FAILED and result.is_consequence(phase):
        return Standing.CONSEQUENCE
    return _STANDINGS.get(state, Standing.HELD_UP)


def _belongs_to_deaths(state: PhaseState, result: RankResult, phase: str, *, expected: bool) -> bool:
    """Whether this is an `expected` death, or a consequence of one."""
    if expected or state is PhaseState.DIED:
        return state is PhaseState.DIED
    return _standing(state, result, phase) in (Standing.CONSEQUENCE, Standing.HELD_UP)


def _disagreement(standings: Mapping[int, Standing]) -> str:
    """Which ranks skipped and which did not; empty unless there are both."""
    skipped = [rank for rank, standing in standings.items() if standing is Standing.SKIPPED]
    others = [rank for rank, standing in standings.items() if standing not in (Standing.SKIPPED, Standing.ABSENT)]
    if not (skipped and others):
        return ""
    return f"the ranks disagree: {format_ranks(skipped)} skipped, {format_ranks(others)} did not"


def _fails_later(phase: str, results: Mapping[int, RankResult], dies: frozenset[int]) -> bool:
    """Whether a rank failed in a later phase, which is why others were held up in this one."""
    later = PHASES[PHASES.index(phase) + 1 :]
    survivors = [result for rank, result in results.items() if rank not in dies]
    return any(_standing(one.state(then), one, then) is Standing.OWN_FAILURE for one in survivors for then in later)


# ---- in words: a table of the ranks, and one line


def format_table(outcome: PhaseOutcome, run: RunResult, gang: str, rerun: str = "") -> str:
    """A heading, a line for each group of ranks with the same state (the lead's first), notes and the rerun command.

    gang:   "4 processes x 1 device, local"
    rerun:  the command that runs this test alone
    """
    time = _format_time(run)
    lines = [f"[{gang}; {time}]" if time else f"[{gang}]"]
    rows = [
        (f"{format_ranks_on_hosts(ranks, run.hosts)}:", *_describe_rank(outcome, ranks[0], run.ranks))
        for ranks in group_ranks(outcome, run.ranks)
    ]
    lines += [*format_columns(rows), *([f"{outcome.reason}."] if outcome.reason else [])]
    lines += [*run.divergence.splitlines(), *run.notes]
    lines += [f"rerun: {rerun}"] if rerun else []
    return "\n".join(lines)


def group_ranks(outcome: PhaseOutcome, results: Mapping[int, RankResult]) -> list[list[int]]:
    """Groups of ranks to which the same happened, the lead's group first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(results, key=lambda rank: (rank != outcome.lead, rank)):
        groups.setdefault(_describe_rank(outcome, rank, results), []).append(rank)
    return [sorted(ranks) for ranks in groups.values()]


def format_one_line(outcome: PhaseOutcome, results: Mapping[int, RankResult]) -> str:
    """One line for pytest's short summary: `rank 1: assert 1 == 0`."""
    if outcome.reason:
        return outcome.reason
    ranks, state = group_ranks(outcome, results)[0], outcome.states[outcome.lead]
    text = results[outcome.lead].headline(outcome.phase)
    if state in CUT_OFF_STATES and state is not PhaseState.DIED:
        text = f"{state.value.lower()} {text}".strip()
    if len(ranks) == len(results):
        return f"all {len(results)} ranks: {text}" if len(results) > 1 else text
    return f"{format_ranks_on_hosts(ranks, {})}: {text}"


def _describe_rank(outcome: PhaseOutcome, rank: int, results: Mapping[int, RankResult]) -> tuple[str, str, str]:
    result, state, phase = results[rank], outcome.states[rank], outcome.phase
    if state in _NO_FAILURE and outcome.outcome == "failed":
        # The rank did not fail in this phase, but may have been cut off in another one, or have failed later.
        state, phase = next(
            (other for other in _other_states(result, phase) if other[0] not in _NO_FAILURE), (state, phase)
        )
    text = result.headline(phase)
    text = text if len(text) <= _HEADLINE_LENGTH else f"{text[: _HEADLINE_LENGTH - 2]} …"
    word = state.value + (f" in {phase}" if state is PhaseState.FAILED and phase != "call" else "")
    return word, text, result.place(phase)


def _other_states(result: RankResult, phase: str) -> Iterator[tuple[PhaseState, str]]:
    if result.cut_off is not None:
        yield result.cut_off, result.cut_off_in
    for later in PHASES[PHASES.index(phase) + 1 :]:
        yield result.state(later), later


def _format_time(run: RunResult) -> str:
    if run.timeout is not None:
        return f"not over after {format_seconds(run.timeout)}"
    times = [result.failed_at for result in run.ranks.values() if result.failed_at is not None]
    return f"first failure after {format_seconds(min(times))}" if times else ""
