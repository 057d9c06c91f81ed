"""The rows of the screen: ranks, groups of like ranks, or hosts; those that stand out first. No I/O."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from msgspec import Struct

from jaxrun.analysis.diagnosis.doing import StandingOut
from jaxrun.frontends.top.samples import RankSample
from jaxrun.text import format_ranges, plural

_Number = TypeVar("_Number", int, float)
BY_HOST_ABOVE = 64  # ranks: of more, on several hosts, each host has a row


class Row(Struct, frozen=True):
    """Some ranks, all of them alike or of one host.

    ranks:    their numbers, "0-2, 5"
    numbers:  of their last calls, "120" or "120-121"; empty if none is recorded
    summary:  as of one rank, the lowest, whose last line is shown: the state of most of them, and since when the first
              of those is in it; the only host, or "511 hosts"; CPU and GPU are averages, all else is the largest
    """

    ranks: str
    numbers: str
    summary: RankSample


def group_samples(samples: Sequence[RankSample], most_rows: int) -> tuple[list[Row], int]:
    """Return at most so many rows, and how many more there are.

    There is one for each rank where that is possible, else for like ranks, or for each host.
    """
    if len(samples) <= most_rows:
        parts = [[sample] for sample in samples]
    elif len(samples) > BY_HOST_ABOVE and len({sample.host for sample in samples}) > 1:
        parts = _by_host(samples, most_rows)
    else:
        parts = _grouped(samples, _kind)
    parts.sort(key=_sort_key)
    if len(parts) <= most_rows:
        return [_row(part) for part in parts], 0
    kept = max(0, most_rows - 1)  # the last line says how many are left out
    return [_row(part) for part in parts[:kept]], len(parts) - kept


def _by_host(samples: Sequence[RankSample], most_rows: int) -> list[list[RankSample]]:
    """The ranks that stand out, alike together; a row for each other host; like hosts together where those are many."""
    outliers = _grouped([sample for sample in samples if sample.standing_out >= StandingOut.LATE], _kind)
    hosts = _grouped(
        [sample for sample in samples if sample.standing_out < StandingOut.LATE], lambda sample: sample.host
    )
    if len(outliers) + len(hosts) > most_rows:
        kinds = {part[0].host: frozenset(map(_kind, part)) for part in hosts}
        hosts = _grouped(itertools.chain.from_iterable(hosts), lambda sample: kinds[sample.host])
    return outliers + hosts


def _kind(sample: RankSample) -> Hashable:
    return sample.state, sample.standing_out


def _grouped(samples: Iterable[RankSample], key: Callable[[RankSample], Hashable]) -> list[list[RankSample]]:
    found: dict[Hashable, list[RankSample]] = {}
    for sample in samples:
        found.setdefault(key(sample), []).append(sample)
    return list(found.values())


def _sort_key(part: Sequence[RankSample]) -> tuple[float, ...]:
    stand_out = max(sample.standing_out for sample in part)
    late_s = max((sample.late_s or 0.0) for sample in part) if stand_out > StandingOut.LIKE_OTHERS else 0.0
    return -stand_out, -late_s, min(sample.rank for sample in part)


def _row(part: Sequence[RankSample]) -> Row:
    hosts = dict.fromkeys(sample.host for sample in part)
    (state, most), *others = Counter(sample.state for sample in part).most_common()
    summary = RankSample(
        rank=min(sample.rank for sample in part),
        host=next(iter(hosts)) if len(hosts) == 1 else plural(len(hosts), "host"),
        state=f"{state} ({most} of {len(part)})" if others else state,
        since_s=_largest(sample.since_s for sample in part if sample.state == state),
        standing_out=max(sample.standing_out for sample in part),
        behind=max(sample.behind for sample in part),
        late_s=_largest(sample.late_s for sample in part),
        cpu_percent=_mean(sample.cpu_percent for sample in part),
        memory_bytes=_largest(sample.memory_bytes for sample in part),
        gpu_percent=_mean(sample.gpu_percent for sample in part),
        gpu_bytes=_largest(sample.gpu_bytes for sample in part),
    )
    numbers = sorted({sample.number for sample in part if sample.number is not None})
    return Row(
        ranks=format_ranges([sample.rank for sample in part]),
        numbers="-".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) if numbers else "",
        summary=summary,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _largest(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)
