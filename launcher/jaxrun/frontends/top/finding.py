"""The sentence with which the screen begins: what holds the job up now, or else who slows it down. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrun.analysis.diagnosis.doing import Doing
from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.verdict.stack_text import format_straggler
from jaxrun.frontends.top.samples import RankSample
from jaxrun.text import agree, format_ranks, format_seconds

_HELD_UP_S = 5.0  # that ranks wait for others; less is an uneven step


def describe_finding(now: Overview, samples: Sequence[RankSample]) -> str:
    """Return the most important sentence about the job; empty if there is none."""
    slow = f"{format_straggler(now.straggler, now.hosts)}." if now.straggler is not None else ""
    return now.awaited or now.stall or _describe_hold_up(samples) or slow


def _describe_hold_up(samples: Sequence[RankSample]) -> str:
    """Write `ranks 0, 2-3 have waited 21.1 s for rank 1, which sleeps`; empty if nobody waits for long."""
    waiting = [one for one in samples if one.doing is Doing.WAITING and (one.since_s or 0.0) >= _HELD_UP_S]
    waiting_ranks = {one.rank for one in waiting}
    awaited_ranks = {rank for one in waiting for rank in one.waits_for} - waiting_ranks
    awaited = [one for one in samples if one.rank in awaited_ranks]
    if not awaited:
        return ""
    states = {_does(one, len(awaited)) for one in awaited}
    state = f", which {states.pop()}" if len(states) == 1 else ""
    longest = format_seconds(max(one.since_s or 0.0 for one in waiting))
    who = f"{format_ranks(sorted(waiting_ranks))} {agree('has', len(waiting))}"
    return f"{who} waited {longest} for {format_ranks(sorted(awaited_ranks))}{state}"


def _does(sample: RankSample, count: int) -> str:
    """Return the state as a verb for so many ranks."""
    match sample.doing:
        case Doing.STOPPED:
            return f"{agree('is', count)} {sample.state}"
        case Doing.FINISHED | Doing.ENDED | Doing.FAILED:
            return agree(sample.doing.words, count)
    verb, _, rest = sample.state.partition(" ")
    if verb in ("idle", "is"):
        return f"{agree('is', count)} {rest or verb}"
    return f"{verb if count == 1 else verb.removesuffix('s')} {rest}".rstrip()
