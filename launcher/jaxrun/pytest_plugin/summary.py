"""What became of the ranks in a phase of a test, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.protocol.pytest_messages import PHASES
from jaxrun.pytest_plugin.outcome import PhaseOutcome
from jaxrun.pytest_plugin.rank_results import CUT_OFF_STATES, PhaseState, RankResult
from jaxrun.text import format_columns, format_ranks_on_hosts, format_seconds

_HEADLINE_LENGTH = 90  # characters; the whole of it stands below
_FINE = (PhaseState.PASSED, PhaseState.ABSENT)


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Where a test was run.

    shape:   "4 processes x 1 device, local"
    hosts:   of the ranks
    apart:   how the ranks fell out of step, in several lines; empty if they did not
    notes:   more lines, such as what was done to the gang
    rerun:   the command that runs this test alone
    limit:   the time limit that was reached, in seconds; None if none was
    """

    shape: str
    hosts: Mapping[int, str]
    divergence: str = ""
    notes: Sequence[str] = ()
    rerun: str = ""
    timeout: float | None = None


def format_table(outcome: PhaseOutcome, parts: Mapping[int, RankResult], scene: ReportContext) -> str:
    """A heading, a line for each group of ranks that fared alike, the lead's first, and what to do."""
    when = _format_time(parts, scene)
    lines = [f"[{scene.shape}; {when}]" if when else f"[{scene.shape}]"]
    rows = [
        (f"{format_ranks_on_hosts(ranks, scene.hosts)}:", *_describe_rank(outcome, ranks[0], parts))
        for ranks in group_ranks(outcome, parts)
    ]
    lines += [*format_columns(rows), *([f"{outcome.reason}."] if outcome.reason else [])]
    lines += [*scene.divergence.splitlines(), *scene.notes]
    lines += [f"rerun: {scene.rerun}"] if scene.rerun else []
    return "\n".join(lines)


def group_ranks(outcome: PhaseOutcome, parts: Mapping[int, RankResult]) -> list[list[int]]:
    """The ranks that fared alike, the lead's first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(parts, key=lambda rank: (rank != outcome.lead, rank)):
        alike.setdefault(_describe_rank(outcome, rank, parts), []).append(rank)
    return [sorted(ranks) for ranks in alike.values()]


def format_one_line(outcome: PhaseOutcome, parts: Mapping[int, RankResult]) -> str:
    """In one line, for pytest's short summary: `rank 1: assert 1 == 0`."""
    if outcome.reason:
        return outcome.reason
    ranks = group_ranks(outcome, parts)[0]
    state, part = outcome.states[outcome.lead], parts[outcome.lead]
    text = part.headline(outcome.phase)
    if state in CUT_OFF_STATES:
        text = f"{state.value.lower()} {text}".strip()
    if len(ranks) == len(parts):
        return f"all {len(parts)} ranks: {text}" if len(parts) > 1 else text
    return f"{format_ranks_on_hosts(ranks, {})}: {text}"


def _describe_rank(outcome: PhaseOutcome, rank: int, parts: Mapping[int, RankResult]) -> tuple[str, str, str]:
    """What became of a rank, about what, and where."""
    part, state, phase = parts[rank], outcome.states[rank], outcome.phase
    if state in _FINE and outcome.outcome == "failed":
        # Others failed in this phase; it may have been cut off before or after, or have failed after.
        state, phase = next(((s, p) for s, p in _other_states(part, phase) if s not in _FINE), (state, phase))
    text = part.headline(phase)
    text = text if len(text) <= _HEADLINE_LENGTH else f"{text[: _HEADLINE_LENGTH - 2]} …"
    word = state.value + (f" in {phase}" if state is PhaseState.FAILED and phase != "call" else "")
    return word, text, part.place(phase)


def _other_states(part: RankResult, phase: str) -> Iterator[tuple[PhaseState, str]]:
    if part.cut_off is not None:
        yield part.cut_off, part.cut_off_in
    for later in PHASES[PHASES.index(phase) + 1 :]:
        yield part.state(later), later


def _format_time(parts: Mapping[int, RankResult], scene: ReportContext) -> str:
    if scene.timeout is not None:
        return f"not over after {format_seconds(scene.timeout)}"
    times = [part.failed_at for part in parts.values() if part.failed_at is not None]
    return f"first failure after {format_seconds(min(times))}" if times else ""
