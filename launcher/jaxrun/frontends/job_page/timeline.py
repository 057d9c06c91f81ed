"""The chart of what all ranks did over time, as a value for the page: a row for each rank, and its packed calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrun.analysis.verdict.goodput_text import MEANINGS, format_goodput
from jaxrun.records.history.job_trace import JobTrace, Moment, RankTrace, Span, TracedCall
from jaxrun.text import format_ranks, group_alike, has_several_hosts

_MAX_ROWS = 256
_MAX_ORDERLY = 48  # rows in the order of the ranks; with more rows, the notable ranks come first
_STAND_OUT = 8
_MAX_CALLS = 250_000  # about 7 MB
_US_PER_S = 1e6

RankParts = Sequence[RankTrace]  # of one rank, in each attempt in which it took part
Ranks = Mapping[int, RankParts]


def timeline_content(trace: JobTrace) -> dict[str, Any]:
    """Return the chart as the page draws it: timeline_data.js explains the numbers."""
    ranks = trace.by_rank
    shown = choose_rows(ranks, trace.culprits)
    notes = list(_notes(trace, ranks, shown))
    return {**_data(trace, ranks, shown), **goodput_content(trace), "notes": notes}


def goodput_content(trace: JobTrace) -> dict[str, Any]:
    """Return what the time was worth: a line, what each part is, and its share in each period.

    In jobs whose steps are not known, there is nothing.
    """
    if not trace.goodput.is_known:
        return {"goodput": None}
    spent = trace.goodput.parts_us
    return {
        "goodput": {
            "line": format_goodput(trace.goodput),
            "parts": [
                {"part": part, "name": name, "meaning": meaning, "seconds": round(spent[part] / _US_PER_S, 3)}
                for part, (name, meaning) in MEANINGS.items()
                if part in spent
            ],
            "periods": [
                [
                    round(period.start - trace.start, 3),
                    round(period.end - trace.start, 3),
                    {part: round(us / _US_PER_S, 3) for part, us in period.parts.items() if us},
                ]
                for period in trace.band
            ],
        }
    }


def choose_rows(ranks: Ranks, culprits: Iterable[int], most: int = _MAX_ROWS) -> list[int]:
    """Choose the ranks that get a row: all, or the notable ones and some of each host.

    If they do not fit on one screen, the notable ones come first.
    """
    if len(ranks) <= _MAX_ORDERLY:
        return sorted(ranks)
    failed = [rank for rank, parts in ranks.items() if any(mark.is_failure for part in parts for mark in part.marks)]
    awaited = [rank for rank, parts in ranks.items() if any(part.awaited is not None for part in parts)]
    costs = {rank: _cost(parts) for rank, parts in ranks.items()}
    costly = sorted((rank for rank in ranks if costs[rank]), key=lambda rank: -costs[rank])
    out = [*dict.fromkeys(rank for rank in (*culprits, *awaited, *failed, *costly) if rank in ranks)][:_STAND_OUT]
    hosts: dict[str, int] = {}
    for rank in sorted(ranks):
        hosts.setdefault(ranks[rank][-1].host, rank)
    wanted = [*dict.fromkeys((*out, *costly[: most // 4], *hosts.values(), *sorted(ranks)))][:most]
    return [*out, *sorted(wanted[len(out) :])]


def _data(trace: JobTrace, ranks: Ranks, shown: Sequence[int]) -> dict[str, Any]:
    tables = _Tables(trace.start, has_several_hosts({rank: parts[-1].host for rank, parts in ranks.items()}))
    all_ranks = sorted(ranks)
    return {
        "duration": max(1e-3, trace.end - trace.start),
        "attempts": [
            {
                "number": attempt.number,
                "start": tables.seconds(attempt.start),
                "marks": [tables.mark(mark) for mark in attempt.marks],
            }
            for attempt in trace.attempts
        ],
        "rows": [tables.row(ranks[rank], rank in trace.culprits, _MAX_CALLS // len(shown)) for rank in shown],
        "ranks": all_ranks,
        "costs": [round(_cost(ranks[rank]), 6) for rank in all_ranks],
        "waited": round(sum(_waited(attempt.ranks.values()) for attempt in trace.attempts), 6),
        "lasts": [round(_last_share(ranks[rank]), 4) for rank in all_ranks],
        "sites": list(tables.sites),
        "missing": tables.missing,
    }


class _Tables:
    """Makes rows, and numbers the values that many calls share."""

    def __init__(self, start: float, has_hosts: bool) -> None:
        self._start = start
        self._has_hosts = has_hosts  # more than one
        self._groups: dict[tuple[int, str], int] = {}
        self.sites: dict[tuple[str, str], int] = {}
        self.missing: dict[str, str] = {}  # by "group number", the ranks that never entered the call

    def seconds(self, time: float) -> float:
        return round(time - self._start, 6)

    def mark(self, mark: Moment) -> list[Any]:
        return [self.seconds(mark.time), mark.name, mark.detail, mark.is_failure]

    def row(self, parts: RankParts, culprit: bool, max_calls: int) -> dict[str, Any]:
        last = parts[-1]
        awaited = [(part, part.awaited) for part in parts if part.awaited is not None]
        return {
            "label": f"rank {last.rank} ({last.host})" if self._has_hosts else f"rank {last.rank}",
            "rank": last.rank,
            "short": f"rank {last.rank}",
            "host": last.host if self._has_hosts else "",
            "culprit": culprit,
            "trouble": last.trouble,
            "awaited": [[self.seconds(time), self.seconds(part.end)] for part, time in awaited],
            "phases": [self._span(span) for part in parts for span in part.phases],
            "compilations": [self._span(span) for part in parts for span in part.compilations],
            "marks": [self.mark(mark) for part in parts for mark in part.marks],
            "calls": self._calls(parts, max_calls),
        }

    def _span(self, span: Span) -> list[Any]:
        return [span.name, self.seconds(span.start), self.seconds(span.end), span.detail]

    def _calls(self, parts: RankParts, most: int) -> list[int]:
        """The last calls, as the whole numbers that timeline_data.js explains."""
        numbers: list[int] = []
        before = 0
        left_out = max(0, sum(len(part.calls) for part in parts) - most)
        for attempt, part in enumerate(parts):
            calls = part.calls[left_out:]
            left_out = max(0, left_out - len(part.calls))
            for call in calls:
                began = self._microseconds((call.entered or call.left) - self._start)
                numbers += (began - before, *self._call(attempt, call))
                before = began
        return numbers

    def _call(self, attempt: int, call: TracedCall) -> tuple[int, ...]:
        took = self._microseconds(call.left - (call.entered or call.left))
        group = self._groups.setdefault((attempt, call.group), len(self._groups))
        site = self.sites.setdefault((call.name, call.place), len(self.sites))
        if call.missing:
            self.missing[f"{group} {call.number}"] = call.missing
        times = (took if call.is_over else -1 - took, self._microseconds(call.waited), self._microseconds(call.cost))
        return *times, group, call.number, site, call.last

    def _microseconds(self, seconds: float) -> int:
        return round(seconds * _US_PER_S)


def _cost(parts: RankParts) -> float:
    return sum(part.cost for part in parts)


def _waited(ranks: Iterable[RankTrace]) -> float:
    """Return how many seconds ranks waited in an attempt, on average. Waits for missing ranks are simultaneous."""
    absences = [rank.absence for rank in ranks]
    return sum(rank.cost - rank.absence for rank in ranks) + max(absences, default=0.0)


def _last_share(parts: RankParts) -> float:
    """Return the share of the known calls to which the rank came last, or never."""
    known = [call.cost > 0 for part in parts for call in part.calls if call.last >= 0]
    known += [True for part in parts if part.awaited is not None]
    return sum(known) / len(known) if known else 0.0


def _notes(trace: JobTrace, ranks: Ranks, shown: Sequence[int]) -> Iterable[str]:
    """Yield remarks on what the chart does not show."""
    if len(shown) < len(ranks):
        yield (
            f"{len(shown)} of {len(ranks):,} ranks have a row: those that failed or for which others waited longest, "
            "and some of each host."
        )
    if trace.calls_left_out:
        yield f"{trace.calls_left_out.capitalize()} are known here: earlier ones are not kept for long."
    calls = [call for parts in ranks.values() for part in parts for call in part.calls]
    if calls and not any(call.entered for call in calls):
        yield "When ranks entered their calls is unknown (it needs Python 3.12), and so is who waited for whom."
    if trace.clock_error is not None:
        yield f"The clocks of the hosts are compared to within {trace.clock_error * 1e3:.2g} ms."
    troubles = {rank: parts[-1].trouble for rank, parts in ranks.items() if parts[-1].trouble}
    for trouble, who in group_alike(troubles):
        yield f"{format_ranks(who)}: {trouble}"
