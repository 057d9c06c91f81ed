"""What a mode of lockstep costs: from the samples of the jobs to summaries. Times are in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxrun.protocol.flight_file import LOCKSTEP_OFF, LOCKSTEP_RECORD, LOCKSTEP_STRICT

AGAIN = f"{LOCKSTEP_OFF} again"
MODES = (LOCKSTEP_OFF, LOCKSTEP_RECORD, LOCKSTEP_STRICT, AGAIN)
EACH_CALL, ONCE = ("local", "global", "psum", "state"), ("first", "start")
# What record may add to a call; 0: nothing that can be measured.
GOALS = {"local": 0.0, "global": 2e-6, "psum": 2e-6, "state": 2e-6}
FEWEST_ROUNDS = 3  # what two rounds say in agreement is chance too often

YES, NO, NOISE = "yes", "no", "noise"


@dataclass(frozen=True)
class Sample:
    """One job: by kind of call, the least and the median of what a call took, over the blocks of all ranks.

    `ratio` is the median of calls against the calls of `pace` beside them, whose own median that is; only for kinds
    that have a pace. `wrong` is empty if the job ended well and its ranks recorded what the mode says.
    """

    mode: str
    size: int
    round: int
    least: Mapping[str, float] = field(default_factory=dict)
    median: Mapping[str, float] = field(default_factory=dict)
    ratio: Mapping[str, float] = field(default_factory=dict)
    pace: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Extra:
    """What a mode adds: in the median of the rounds, in the least and in the most of them."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Summary:
    """A kind of call in one mode and size, over the good rounds.

    `least` and `median` are medians of those of the samples; `more_least` and `more_median` what the mode adds to
    each, and `ratio` that of the medians, within a round. `adds` is the best that is known: by the ratios to the pace
    where there is one and the call waits for nobody, and else `more_least`. `noise` is the most by which the two jobs
    that were off differed in a round, by the same measure, or half the span of `adds` if that is more; None for want
    of rounds. `reached` is one of YES, NO and NOISE, and empty where there is no goal.
    """

    kind: str
    size: int
    mode: str
    rounds: int
    least: float
    median: float
    more_least: float | None = None
    more_median: float | None = None
    ratio: float | None = None
    adds: Extra | None = None
    noise: float | None = None
    goal: float | None = None
    reached: str = ""


# The good samples: size and mode → round → sample.
_Good = Mapping[tuple[int, str], Mapping[int, Sample]]


def summarize(samples: Sequence[Sample]) -> list[Summary]:
    """One for each kind of call, size and mode that has a good sample; the second off has none of its own."""
    good: dict[tuple[int, str], dict[int, Sample]] = {}
    for one in samples:
        if not one.wrong:
            good.setdefault((one.size, one.mode), {})[one.round] = one
    return [
        _summary(kind, size, mode, good)
        for kind in (*EACH_CALL, *ONCE)
        for size in dict.fromkeys(one.size for one in samples)
        for mode in MODES
        if mode != AGAIN and (size, mode) in good
    ]


def _summary(kind: str, size: int, mode: str, good: _Good) -> Summary:
    rounds = good[size, mode]
    least, median = [one.least[kind] for one in rounds.values()], [one.median[kind] for one in rounds.values()]
    plain = Summary(kind, size, mode, len(rounds), statistics.median(least), statistics.median(median))
    off, again = good.get((size, LOCKSTEP_OFF), {}), good.get((size, AGAIN), {})
    bases = {number: [jobs[number] for jobs in (off, again) if number in jobs] for number in rounds}
    pairs = [(rounds[number], base) for number, base in bases.items() if base]
    if mode == LOCKSTEP_OFF or not pairs:
        return plain

    def added(measure: Callable[[Sample], float]) -> list[float]:
        return [measure(one) - statistics.mean(map(measure, base)) for one, base in pairs]

    best = _best_measure(kind, mode, [job for _, base in pairs for job in base])
    adds = added(best)
    extra = Extra(statistics.median(adds), min(adds), max(adds))
    apart = [abs(best(off[number]) - best(again[number])) for number in off.keys() & again.keys()]
    noise = max(*apart, (extra.most - extra.least) / 2) if len(adds) >= FEWEST_ROUNDS and apart else None
    goal = GOALS.get(kind) if mode == LOCKSTEP_RECORD else None
    return replace(
        plain,
        more_least=statistics.median(added(lambda one: one.least[kind])),
        more_median=statistics.median(added(lambda one: one.median[kind])),
        ratio=statistics.median(
            one.median[kind] / statistics.mean(job.median[kind] for job in base) for one, base in pairs
        ),
        adds=extra,
        noise=noise,
        goal=goal,
        reached="" if goal is None else against_goal(extra.median, noise, goal),
    )


def _best_measure(kind: str, mode: str, off: Sequence[Sample]) -> Callable[[Sample], float]:
    """Seconds for a call: by its ratio to the pace, at the usual pace of the jobs `off`; the least where it waits."""
    waits = mode == LOCKSTEP_STRICT and kind != "local"
    if waits or any(kind not in one.pace for one in off):
        return lambda one: one.least[kind]
    pace = statistics.median(one.pace[kind] for one in off)
    return lambda one: one.ratio[kind] * pace


def against_goal(adds: float, noise: float | None, goal: float) -> str:
    """Whether no more than `goal` is added; what is below zero by more than the noise is noise too."""
    if noise is None or adds < -noise:
        return NOISE
    if goal == 0:
        return YES if adds <= noise else NO
    if adds + noise <= goal:
        return YES
    return NO if adds - noise > goal else NOISE
