"""Collects what a job did over time from the files of its run directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec.structs import replace

from jaxrun.analysis.verdict import verdict_text
from jaxrun.errors import UsageError
from jaxrun.protocol.flight import CompilationStage, Flight
from jaxrun.protocol.flight_file import RING_RECORDS
from jaxrun.records.history.goodput import account, band
from jaxrun.records.history.job_log import AttemptLog, RankLog, rank_phases, read_attempts
from jaxrun.records.history.job_trace import AttemptTrace, JobTrace, Moment, RankTrace, Span, trace_calls
from jaxrun.records.rundir.recorded_files import RecordedPlan, read_job_events, read_plan, read_verdict
from jaxrun.records.rundir.recorders import open_recorder
from jaxrun.records.rundir.rundir import EVENTS_FILE, attempt_directory
from jaxrun.terminal import in_one_line
from jaxrun.text import plural

_MIN_CALLS = 16  # of each rank, however many ranks there are
_NO_RECORDER = "its flight recorder is not in the run directory"


def collect_job(run_dir: Path, max_calls: int) -> JobTrace:
    """Read the files of `run_dir`; of the calls, keep each rank's last ones, about `max_calls` in all.

    Raises UsageError if there is no event log.
    """
    logs = read_attempts(read_job_events(run_dir), marks_saves=True)
    if not logs:
        raise UsageError(f"{run_dir} has no {EVENTS_FILE}, so its job cannot be shown")
    found = read_verdict(run_dir)
    ranks = sum(len(log.ranks) for log in logs)
    calls = min(RING_RECORDS, max(_MIN_CALLS, max_calls // max(1, ranks)))
    errors = [ranked.clock_error for log in logs for ranked in log.ranks.values() if ranked.clock_error]
    verdicts = (*found.earlier, found) if found is not None else ()
    culprits = {past.attempt: past.culprits for past in verdicts}
    plan = read_plan(run_dir)
    trace = JobTrace(
        title=job_title(plan, run_dir, len(logs[-1].ranks)),
        tag=in_one_line(plan.tag),
        attempts=tuple(
            _trace_attempt(log, attempt_directory(run_dir, log.number), calls, culprits.get(log.number, ()))
            for log in logs
        ),
        clock_error=max(errors, default=None),
        goodput=account(logs),
        band=tuple(band(logs)),
    )
    if found is None:
        return replace(trace, headline="no verdict: jaxrun itself was killed, or the job is still running")
    text = verdict_text.format_report(found, run_dir).strip("\n")
    return replace(
        trace,
        headline=verdict_text.headline_of(found),
        report=text,
        outcome=found.outcome,
        culprits=found.culprits,
        fates=found.victims,
    )


def _trace_attempt(log: AttemptLog, directory: Path, max_calls: int, culprits: Collection[int]) -> AttemptTrace:
    recorded = {rank: _read_recorder(directory, rank, max_calls) for rank in sorted(log.ranks)}
    offsets = {rank: ranked.offset for rank, ranked in log.ranks.items()}
    flights = {rank: found[0] for rank, found in recorded.items() if found is not None}
    ends = {rank: ranked.end or log.end for rank, ranked in log.ranks.items()}
    calls, awaited = trace_calls(flights, offsets, ends)
    ranks = {}
    for rank, ranked in sorted(log.ranks.items()):
        flight, stages = recorded[rank] or (Flight(trouble=_NO_RECORDER), ())
        ranks[rank] = RankTrace(
            rank=rank,
            host=ranked.host,
            pid=ranked.pid,
            phases=rank_phases(ranked, log),
            calls=calls.get(rank, ()),
            calls_made=sum(flight.call_counts.values()),
            compilations=tuple(_compilations(flight, stages, ranked, log.end)),
            marks=tuple(ranked.marks if not culprits or rank in culprits else map(_as_consequence, ranked.marks)),
            trouble=flight.trouble,
            awaited=awaited.get(rank),
            status=ranked.status,
            peak_memory_bytes=ranked.peak_memory_bytes,
        )
    return AttemptTrace(log.number, log.start, log.end, ranks, tuple(log.marks), log.outcome)


def _as_consequence(mark: Moment) -> Moment:
    """Return the moment of something that another rank's failure did to this rank."""
    return mark._replace(is_failure=False)


def _compilations(flight: Flight, stages: tuple[CompilationStage, ...], ranked: RankLog, end: float) -> Iterator[Span]:
    for stage in stages:
        yield Span(f"{stage.stage} {stage.name}", stage.since + ranked.offset, stage.until + ranked.offset)
    if flight.compiling is not None:
        name, since = flight.compiling
        began = since + ranked.offset
        yield Span(f"compile {name}", began, max(began, ranked.end or end), "it never ended")


def _read_recorder(directory: Path, rank: int, max_calls: int) -> tuple[Flight, tuple[CompilationStage, ...]] | None:
    """Return the content of a flight recorder; None if there is none that can be read."""
    with open_recorder(directory, rank) as reader:
        return (reader.history(max_calls), reader.compilation_stages()) if reader is not None else None


def job_title(plan: RecordedPlan, run_dir: Path, ranks: int) -> str:
    """Write `train.py --lr 0.1 · 8 ranks`."""
    return f"{' '.join(plan.program) or run_dir.name} · {plural(ranks, 'rank')}"
