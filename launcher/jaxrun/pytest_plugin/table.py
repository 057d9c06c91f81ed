"""What became of the ranks in a phase of a test, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.contract.testing import PHASES
from jaxrun.pytest_plugin.outcome import Outcome
from jaxrun.pytest_plugin.parts import CUT_OFF, Part, State
from jaxrun.ranks import locate
from jaxrun.wording import columns, seconds

_HEADLINE = 90  # characters; the whole of it stands below
_FINE = (State.PASSED, State.ABSENT)


@dataclass(frozen=True, slots=True)
class Scene:
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
    apart: str = ""
    notes: Sequence[str] = ()
    rerun: str = ""
    limit: float | None = None


def table(outcome: Outcome, parts: Mapping[int, Part], scene: Scene) -> str:
    """A heading, a line for each group of ranks that fared alike, the lead's first, and what to do."""
    when = _when(parts, scene)
    lines = [f"[{scene.shape}; {when}]" if when else f"[{scene.shape}]"]
    rows = [(f"{locate(ranks, scene.hosts)}:", *_fate(outcome, ranks[0], parts)) for ranks in groups(outcome, parts)]
    lines += [*columns(rows), *([f"{outcome.why}."] if outcome.why else [])]
    lines += [*scene.apart.splitlines(), *scene.notes]
    lines += [f"rerun: {scene.rerun}"] if scene.rerun else []
    return "\n".join(lines)


def groups(outcome: Outcome, parts: Mapping[int, Part]) -> list[list[int]]:
    """The ranks that fared alike, the lead's first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(parts, key=lambda rank: (rank != outcome.lead, rank)):
        alike.setdefault(_fate(outcome, rank, parts), []).append(rank)
    return [sorted(ranks) for ranks in alike.values()]


def summary(outcome: Outcome, parts: Mapping[int, Part]) -> str:
    """In one line, for pytest's short summary: `rank 1: assert 1 == 0`."""
    if outcome.why:
        return outcome.why
    ranks = groups(outcome, parts)[0]
    state, part = outcome.states[outcome.lead], parts[outcome.lead]
    text = part.headline(outcome.phase)
    if state in CUT_OFF:
        text = f"{state.value.lower()} {text}".strip()
    if len(ranks) == len(parts):
        return f"all {len(parts)} ranks: {text}" if len(parts) > 1 else text
    return f"{locate(ranks, {})}: {text}"


def _fate(outcome: Outcome, rank: int, parts: Mapping[int, Part]) -> tuple[str, str, str]:
    """What became of a rank, about what, and where."""
    part, state, phase = parts[rank], outcome.states[rank], outcome.phase
    if state in _FINE and outcome.outcome == "failed":
        # Others failed in this phase; it may have been cut off before or after, or have failed after.
        state, phase = next(((s, p) for s, p in _elsewhere(part, phase) if s not in _FINE), (state, phase))
    text = part.headline(phase)
    text = text if len(text) <= _HEADLINE else f"{text[: _HEADLINE - 2]} …"
    word = state.value + (f" in {phase}" if state is State.FAILED and phase != "call" else "")
    return word, text, part.place(phase)


def _elsewhere(part: Part, phase: str) -> Iterator[tuple[State, str]]:
    if part.end is not None:
        yield part.end, part.cut_off_in
    for later in PHASES[PHASES.index(phase) + 1 :]:
        yield part.state(later), later


def _when(parts: Mapping[int, Part], scene: Scene) -> str:
    if scene.limit is not None:
        return f"not over after {seconds(scene.limit)}"
    times = [part.at for part in parts.values() if part.at is not None]
    return f"first failure after {seconds(min(times))}" if times else ""
