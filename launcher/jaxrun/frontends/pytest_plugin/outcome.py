"""The outcome of one phase of a test, from the results of all its ranks, and the same in words.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.frontends.pytest_plugin.rank_results import CUT_OFF_STATES, PhaseState, RankResult
from jaxrun.protocol.pytest_messages import PHASES
from jaxrun.text import format_columns, format_ranks, format_ranks_on_hosts, format_seconds

_HEADLINE_LENGTH = 90  # characters in the table; the traceback below has the whole text
_NO_FAILURE = (PhaseState.PASSED, PhaseState.ABSENT)
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


# ---- in words: a table of the ranks, and one line


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Where and how a test was run.

    gang:        "4 processes x 1 device, local"
    hosts:       by rank
    divergence:  how the ranks fell out of step, in several lines; empty if they did not
    notes:       more lines, such as the launcher's
    rerun:       the command that runs this test alone
    timeout:     the time limit that was reached, in seconds; None if none was
    """

    gang: str
    hosts: Mapping[int, str]
    divergence: str = ""
    notes: Sequence[str] = ()
    rerun: str = ""
    timeout: float | None = None


def format_table(outcome: PhaseOutcome, results: Mapping[int, RankResult], context: ReportContext) -> str:
    """A heading, a line for each group of ranks with the same state (the lead's first), notes and the rerun command."""
    time = _format_time(results, context)
    lines = [f"[{context.gang}; {time}]" if time else f"[{context.gang}]"]
    rows = [
        (f"{format_ranks_on_hosts(ranks, context.hosts)}:", *_describe_rank(outcome, ranks[0], results))
        for ranks in group_ranks(outcome, results)
    ]
    lines += [*format_columns(rows), *([f"{outcome.reason}."] if outcome.reason else [])]
    lines += [*context.divergence.splitlines(), *context.notes]
    lines += [f"rerun: {context.rerun}"] if context.rerun else []
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
    if state in CUT_OFF_STATES:
        text = f"{state.value.lower()} {text}".strip()
    if len(ranks) == len(results):
        return f"all {len(results)} ranks: {text}" if len(results) > 1 else text
    return f"{format_ranks_on_hosts(ranks, {})}: {text}"


def _describe_rank(outcome: PhaseOutcome, rank: int, results: Mapping[int, RankResult]) -> tuple[str, str, str]:
    """The state of a rank, its headline and its place."""
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


def _format_time(results: Mapping[int, RankResult], context: ReportContext) -> str:
    if context.timeout is not None:
        return f"not over after {format_seconds(context.timeout)}"
    times = [result.failed_at for result in results.values() if result.failed_at is not None]
    return f"first failure after {format_seconds(min(times))}" if times else ""
