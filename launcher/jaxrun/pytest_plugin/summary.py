"""The outcome of a phase in words: a table of the ranks, and one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.protocol.pytest_messages import PHASES
from jaxrun.pytest_plugin.outcome import PhaseOutcome
from jaxrun.pytest_plugin.rank_results import CUT_OFF_STATES, PhaseState, RankResult
from jaxrun.text import format_columns, format_ranks_on_hosts, format_seconds

_HEADLINE_LENGTH = 90  # characters in the table; the traceback below has the whole text
_NO_FAILURE = (PhaseState.PASSED, PhaseState.ABSENT)


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
