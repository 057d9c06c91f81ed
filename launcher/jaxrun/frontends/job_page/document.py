"""The value that the page of a job shows, as JSON: the same while the job runs and when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field, to_builtins

from jaxrun.files.regular_files import read_end
from jaxrun.frontends.job_page.ended_ranks import Rates, call_rates, ended_view, longest
from jaxrun.frontends.job_page.timeline import timeline_content
from jaxrun.frontends.top.feed import latest_attempt
from jaxrun.frontends.top.view import View
from jaxrun.frontends.top.view_document import view_document
from jaxrun.records.history.collect import collect_job
from jaxrun.records.history.job_trace import JobTrace
from jaxrun.records.output.noise import NoiseFilter
from jaxrun.records.output.rank_logs import STREAMS, log_path
from jaxrun.records.rundir.rundir import attempt_directory
from jaxrun.terminal import without_controls

_CALLS = 800_000  # that are compared; the page has the calls of the ranks that it shows
_TAIL_BYTES = 16_384  # of each of a rank's logs
_ALL_OUTPUT_BYTES = 4_000_000  # of all ranks in one attempt, and of all earlier attempts, in a page without a server
_EARLIER_ATTEMPTS = 8  # whose output such a page has
_TONES = {"ok": "good", "failed": "bad", "killed": "bad", "exited": "bad", "diverged": "bad", "lost": "bad"}
_OUTCOMES = {"ok": "done", "": "no verdict"}


class Attempt(Struct, frozen=True):
    """One attempt: when it began and ended, in seconds since the epoch, on how many hosts, and how it ended."""

    number: int
    start: float
    end: float
    hosts: int
    outcome: str = ""


class LiveJob(Struct, frozen=True):
    """What is known of a running job besides its files; `rates` are the rates of calls that were seen."""

    title: str
    view: View
    tag: str = ""
    attempts: Sequence[Attempt] = ()
    rates: Rates = field(default_factory=list)


def live_document(run_dir: Path, live: LiveJob, outputs: Mapping[int, str]) -> dict[str, Any]:
    """Return what the page shows each second or two; the chart of all ranks is not part of it."""
    start = live.attempts[0].start if live.attempts else 0.0
    return {
        "is_live": True,
        "title": live.title,
        "tag": live.tag,
        "start": start,
        "top": to_builtins(view_document(run_dir, live.view)),
        "rates": list(live.rates),
        "attempts": _attempts(live.attempts, start),
        "verdict": None,
        "outputs": _by_text(outputs),
        "earlier_outputs": {},
        "timeline": None,
    }


def whole_document(
    run_dir: Path, live: LiveJob | None = None, *, is_over: bool = True, has_outputs: bool = False
) -> dict[str, Any]:
    """Return what the files of a job say, with the chart. `live`: what is known besides, if somebody has followed it.

    has_outputs:  the end of what each rank has written is part of it

    Raises UsageError if there is no event log.
    """
    trace = collect_job(run_dir, _CALLS)
    seen = live.view if live is not None else None
    view = ended_view(trace, run_dir.name, seen) if is_over or seen is None else seen
    attempts = [
        Attempt(one.number, one.start, one.end, len({part.host for part in one.ranks.values()}), one.outcome)
        for one in trace.attempts
    ]
    outputs = read_outputs(run_dir, sorted(trace.attempts[-1].ranks)) if has_outputs else {}
    earlier = _read_earlier(run_dir, trace) if has_outputs else {}
    return {
        "is_live": not is_over,
        "title": trace.title,
        "tag": trace.tag,
        "start": trace.start,
        "top": to_builtins(view_document(run_dir, view)),
        "rates": list(longest(call_rates(trace), live.rates if live is not None else ())),
        "attempts": _attempts(attempts, trace.start, trace.headline if trace.outcome else ""),
        "verdict": _verdict(trace) if is_over else None,
        "outputs": _by_text(outputs),
        "earlier_outputs": {str(number): _by_text(texts) for number, texts in earlier.items()},
        "timeline": timeline_content(trace),
    }


def _attempts(attempts: Sequence[Attempt], start: float, last: str = "") -> list[dict[str, Any]]:
    """Return the attempts as the page lists them; `last` is how the last one ended."""
    return [
        {
            "number": one.number,
            "start": round(one.start - start, 3),
            "seconds": round(one.end - one.start, 3),
            "hosts": one.hosts,
            "outcome": one.outcome or (last if one is attempts[-1] else ""),
        }
        for one in attempts
    ]


def _verdict(trace: JobTrace) -> dict[str, Any]:
    return {
        "tone": _TONES.get(trace.outcome, ""),
        "outcome": _OUTCOMES.get(trace.outcome, trace.outcome),
        "headline": without_controls(trace.headline),
        "report": without_controls(trace.report or trace.headline),
        "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(trace.end)),
    }


def read_outputs(run_dir: Path, ranks: Sequence[int], attempt: int = 0, *, share: int = 1) -> dict[int, str]:
    """Return the end of what each of these ranks has written, stdout before stderr.

    attempt:  its number, from 1; 0 for the last
    share:    how many attempts share the room of one
    """
    directory = attempt_directory(run_dir, attempt or latest_attempt(run_dir))
    most = min(_TAIL_BYTES, _ALL_OUTPUT_BYTES // max(1, len(STREAMS) * len(ranks) * share))
    return {rank: _join(_tail(log_path(directory, rank, stream), most) for stream in STREAMS) for rank in ranks}


def _read_earlier(run_dir: Path, trace: JobTrace) -> dict[int, dict[int, str]]:
    """Return the same of earlier attempts, by their numbers."""
    earlier = trace.attempts[:-1][-_EARLIER_ATTEMPTS:]
    return {one.number: read_outputs(run_dir, sorted(one.ranks), one.number, share=len(earlier)) for one in earlier}


def _by_text(outputs: Mapping[int, str]) -> dict[str, str]:
    return {str(rank): text for rank, text in outputs.items()}


def _join(parts: Iterable[str]) -> str:
    return "\n".join(filter(None, parts))


def _tail(path: Path, most: int) -> str:
    """Return the end of a log as the screen shows it, without the messages that nobody needs."""
    try:
        data = read_end(path, most)
    except OSError:
        return ""
    ends_within = bool(data) and not data.endswith(b"\n")
    shown = NoiseFilter().remove(data + b"\n" if ends_within else data)
    return without_controls((shown.removesuffix(b"\n") if ends_within else shown).decode(errors="replace"))
