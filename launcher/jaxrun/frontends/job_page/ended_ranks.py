"""How the ranks of a job ended, from its trace, as `jaxrun top` shows ranks that run; and its rate of calls. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from jaxrun.analysis.diagnosis.consequences import Fate
from jaxrun.analysis.diagnosis.doing import Doing, StandingOut
from jaxrun.analysis.lockstep.profile_plan import step_length
from jaxrun.frontends.top.samples import RankSample
from jaxrun.frontends.top.view import Pace, View
from jaxrun.records.history.job_trace import AttemptTrace, JobTrace, RankTrace
from jaxrun.text import format_status

_STEP_CALLS = 64  # the last calls, which show how many a step has
_MAX_POINTS = 150  # of the curve, for each attempt
_MIN_POINT_S = 0.25
_POINT_CALLS = 10  # at least, on average
_MAX_DETAIL = 120  # characters of an error

Rates = Sequence[tuple[float, float]]  # seconds since the job began, calls per second


def ended_view(trace: JobTrace, name: str, seen: View | None = None) -> View:
    """Return the last attempt's ranks as they ended; `seen` is what was last known of them while they ran."""
    last = trace.attempts[-1]
    known = {sample.rank: sample for sample in seen.samples} if seen is not None else {}
    samples = tuple(_sample(part, trace, known.get(rank)) for rank, part in sorted(last.ranks.items()))
    calls = _calls_of(last)[-_STEP_CALLS:]
    return View(
        name=name,
        phase="over" if trace.outcome else "",
        attempt=last.number,
        seconds=trace.end - trace.start,
        samples=samples,
        pace=Pace(per_step=step_length([(call.name, call.place) for call in calls])),
        hosts=seen.hosts if seen is not None else (),
    )


def call_rates(trace: JobTrace) -> list[tuple[float, float]]:
    """Return how many calls per second a rank made, over the time in which its calls are known."""
    rates: list[tuple[float, float]] = []
    for attempt in trace.attempts:
        times = sorted(call.entered or call.left for call in _calls_of(attempt))
        if len(times) < 2 * _POINT_CALLS or times[-1] == times[0]:
            continue
        span = times[-1] - times[0]
        width = max(_MIN_POINT_S, span / _MAX_POINTS, span / len(times) * _POINT_CALLS)
        counts = [0] * (int(span / width) + 1)
        for time in times:
            counts[int((time - times[0]) / width)] += 1
        began = times[0] - trace.start
        rates.append((round(began, 3), 0.0))
        rates += [(round(began + (at + 0.5) * width, 3), round(n / width, 3)) for at, n in enumerate(counts[:-1])]
        rates.append((round(times[-1] - trace.start, 3), 0.0))
    return rates


def longest(one: Rates, other: Rates) -> Rates:
    """Return the curve that covers more time."""
    return max(one, other, key=lambda rates: sum(after[0] - before[0] for before, after in pairwise(rates)))


def _calls_of(attempt: AttemptTrace) -> Sequence:  # type: ignore[type-arg]
    return max((part.calls for part in attempt.ranks.values()), key=len, default=())


def _sample(part: RankTrace, trace: JobTrace, seen: RankSample | None) -> RankSample:
    doing, state = _end(part, trace.culprits, trace.fates)
    return RankSample(
        rank=part.rank,
        host=part.host,
        state=state,
        doing=doing,
        standing_out=StandingOut.FAILED if doing is Doing.FAILED else StandingOut.LIKE_OTHERS,
        number=part.calls[-1].number if part.calls else None,
        memory_bytes=part.peak_memory_bytes or (seen.memory_bytes if seen is not None else None),
        gpu_bytes=seen.gpu_bytes if seen is not None else None,
    )


def _end(part: RankTrace, culprits: Sequence[int], fates: Mapping[int, str]) -> tuple[Doing, str]:
    failure = next((mark for mark in part.marks if mark.is_failure), None)
    if part.rank in culprits and failure is not None:
        detail = f": {failure.detail[:_MAX_DETAIL]}" if failure.detail else ""
        return Doing.FAILED, f"{failure.name}{detail}"
    if part.rank in culprits:
        return Doing.FAILED, "failed" if not part.status else format_status(part.status)
    if part.rank in fates:
        fate = fates[part.rank]
        return Doing.FINISHED if fate == Fate.FINISHED else Doing.ENDED, fate
    if part.status is None:
        return Doing.IDLE, "no end is recorded"
    return (Doing.ENDED, format_status(part.status)) if part.status else (Doing.FINISHED, "finished")
