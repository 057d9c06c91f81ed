"""Accounts for all the time of a job, over its attempts, from its event log. Only `format_by_tag` reads files.

    start ─ hosts ───┬─ python ─┬─ joining ─┬─ devices ─┬─ the program: RecordTime ─┬─ stopping ─ end ─ hosts ─ start …
       all agents report    all Hello   all joined   all report              it ended

Times are whole microseconds, and each moment belongs to one part, so that the parts sum up to the whole. A time that
lies before the time at which it could have been, because a clock has jumped, counts as that time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from jaxrun.analysis.lockstep.time_spent import RUN_PARTS, STEPS, UNKNOWN, to_us
from jaxrun.analysis.verdict.goodput_text import (
    DEVICES,
    HOSTS,
    JOINING,
    PARTS,
    PYTHON,
    REPEATED,
    STOPPING,
    Goodput,
    Period,
    format_goodput,
    sum_up,
)
from jaxrun.errors import UsageError
from jaxrun.job_events.actions import RecordTime
from jaxrun.protocol.worker_messages import Hello
from jaxrun.records.history.job_log import AttemptLog, RankLog, read_attempts
from jaxrun.records.rundir.recorded_files import read_job_events
from jaxrun.terminal import in_one_line
from jaxrun.text import plural

Parts = dict[str, int]  # microseconds


def account(attempts: Sequence[AttemptLog]) -> Goodput:
    """Return what the time of a job was worth; `attempts` in order."""
    total: defaultdict[str, int] = defaultdict(int)
    steps = repeated_steps = 0
    if not attempts:
        return Goodput()
    until = to_us(attempts[0].start)
    began = until
    for log, following in zip(attempts, [*attempts[1:], None], strict=True):
        start, end = max(until, to_us(log.start)), max(until, to_us(log.end))
        total[HOSTS] += start - until
        until = max(start, end)
        parts = account_attempt(log, start, until)
        made = log.spent[-1].steps if log.spent else 0
        if following is not None:
            saves = any(one.saved_at is not None for one in attempts)
            again, lost, to = _not_kept(parts.get(STEPS, 0), log, following, saves)
            parts[STEPS] = parts.get(STEPS, 0) - lost
            parts[to] = parts.get(to, 0) + lost
            repeated_steps += again
            made -= again
        steps += max(0, made)
        for part, spent in parts.items():
            total[part] += spent
    return Goodput(
        total_us=until - began,
        parts_us={part: total[part] for part in PARTS if total[part]},
        attempts=len(attempts),
        steps=steps,
        repeated_steps=repeated_steps,
        late_rank=next((log.spent[-1].late_rank for log in reversed(attempts) if log.spent), -1),
    )


def account_attempt(log: AttemptLog, start: int, end: int) -> Parts:
    """Divide the time of one attempt, from `start` to `end` in microseconds, without regard to other attempts."""
    parts: defaultdict[str, int] = defaultdict(int)
    at = start
    for part, reached in (
        (HOSTS, log.reported_at),
        (PYTHON, _last(log.ranks.values(), Hello)),
        (JOINING, _latest(rank.joined for rank in log.ranks.values())),
        (DEVICES, log.run_at),
    ):
        until = end if reached is None else min(end, max(at, to_us(reached)))
        parts[part] += until - at
        at = until
    left = end - at
    for part, spent in (log.spent[-1].parts if log.spent else {}).items():
        known = min(left, max(0, spent))
        parts[part if part in RUN_PARTS else UNKNOWN] += known
        left -= known
    parts[STOPPING if log.has_ended else UNKNOWN] += left
    return dict(parts)


def _not_kept(spent: int, log: AttemptLog, following: AttemptLog, saves: bool) -> tuple[int, int, str]:
    """Return what was not kept of the steps before a restart: their number, 0 if unknown, their time, and its part.

    spent:  microseconds of steps
    saves:  whether the program has ever said that it saved something
    """
    last, after = log.spent[-1] if log.spent else None, following.spent[-1] if following.spent else None
    if last is not None and after is not None and last.last_step >= 0 and after.first_step >= 0:
        again = max(0, min(last.steps, last.last_step - after.first_step + 1))
        return again, min(spent, spent * again // last.steps) if last.steps > 0 else 0, REPEATED
    if saves:
        kept = _steps_until(log, log.saved_at) if log.saved_at is not None else 0
        return 0, max(0, spent - kept), REPEATED
    return 0, spent, UNKNOWN


def _steps_until(log: AttemptLog, time: float) -> int:
    """Return how many microseconds of steps there had been at this time, in proportion between two records."""
    until = to_us(time)
    empty = RecordTime(log.spent[0].since, log.spent[0].since, {}) if log.spent else RecordTime(0.0, 0.0, {})
    kept = 0
    for before, record in pairwise([empty, *log.spent]):
        first, last = to_us(before.until), to_us(record.until)
        there, more = _steps_of(before), max(0, _steps_of(record) - _steps_of(before))
        share = min(1.0, max(0.0, (until - first) / (last - first))) if last > first else 0.0
        kept = max(kept, there + int(more * share)) if until > first else kept
    return kept


def _steps_of(record: RecordTime) -> int:
    return max(0, record.parts.get(STEPS, 0))


def _last(ranks: Iterable[RankLog], kind: type) -> float | None:
    """Return when the last rank had sent a message of this kind; None if not all have."""
    return _latest(rank.at.get(kind) for rank in ranks)


def _latest(times: Iterable[float | None]) -> float | None:
    found = list(times)
    known = [time for time in found if time is not None]
    return max(known) if known and len(known) == len(found) else None


def band(attempts: Sequence[AttemptLog]) -> list[Period]:
    """Return the time of a job as periods in order, for a picture; as `account`, they know what happened later."""
    periods: list[Period] = []
    if not attempts:
        return periods
    until = to_us(attempts[0].start)
    saves = any(one.saved_at is not None for one in attempts)
    for log, following in zip(attempts, [*attempts[1:], None], strict=True):
        start, end = max(until, to_us(log.start)), max(until, to_us(log.end))
        periods += _period(until, start, {HOSTS: start - until})
        until = max(start, end)
        found = _periods_of(log, start, until)
        if following is not None:
            spent = sum(period.parts.get(STEPS, 0) for period in found)
            _move_back(found, STEPS, *_not_kept(spent, log, following, saves)[1:])
        periods += found
    return periods


def _periods_of(log: AttemptLog, start: int, end: int) -> list[Period]:
    """Return the periods of one attempt, without regard to other attempts."""
    before_run = account_attempt(replace(log, spent=[]), start, end)
    periods: list[Period] = []
    at = start
    for part in (HOSTS, PYTHON, JOINING, DEVICES):
        spent = before_run.get(part, 0)
        periods += _period(at, at + spent, {part: spent})
        at += spent
    known: Mapping[str, int] = {}
    for record in log.spent:
        until = min(end, max(at, to_us(record.until)))
        more = {part: record.parts.get(part, 0) - known.get(part, 0) for part in {**known, **record.parts}}
        gained = {part: spent for part, spent in more.items() if spent > 0 and part in RUN_PARTS}
        for part in [part for part, spent in more.items() if spent < 0]:  # time that has been explained since
            for to in sorted(gained, key=lambda one: -gained[one]):
                moved = min(gained[to], -more[part])
                _move_back(periods, part, moved, to)
                gained[to] -= moved
                more[part] += moved
        periods += _period(at, until, _fill(gained, until - at))
        at, known = until, record.parts
    periods += _period(at, end, {STOPPING if log.has_ended else UNKNOWN: end - at})
    return periods


def _period(start: int, end: int, parts: Parts) -> list[Period]:
    """Return the period between two times in microseconds; nothing if it is empty."""
    spent = {part: microseconds for part, microseconds in parts.items() if microseconds}
    return [Period(start / 1e6, end / 1e6, spent)] if end > start else []


def _fill(gained: Parts, length: int) -> Parts:
    """Return parts that sum up to `length`: the gained ones as far as they fit, and what nothing explains."""
    parts: Parts = {}
    for part, spent in gained.items():
        parts[part] = min(spent, length)
        length -= parts[part]
    return {**parts, UNKNOWN: parts.get(UNKNOWN, 0) + length}


def _move_back(periods: Sequence[Period], part: str, amount: int, to: str) -> None:
    """Move this much, or what there is, from one part to another, in the latest periods first."""
    for period in reversed(periods):
        moved = min(amount, period.parts.get(part, 0))
        if moved:
            period.parts[part] -= moved
            period.parts[to] = period.parts.get(to, 0) + moved
        amount -= moved


def format_by_tag(jobs: Iterable[tuple[Path, str]]) -> str:
    """Sum up the jobs of each tag, given by their run directories and tags; without jobs whose steps are not known."""
    found: dict[str, list[Goodput]] = {}
    for run_dir, tag in jobs:
        with contextlib.suppress(UsageError, OSError):
            goodput = account(read_attempts(read_job_events(run_dir)))
            if goodput.is_known:
                found.setdefault(tag, []).append(goodput)
    return "\n".join(
        f"{in_one_line(tag) or 'without a tag'}, {plural(len(each), 'job')}: {format_goodput(sum_up(each))}"
        for tag, each in found.items()
    )
