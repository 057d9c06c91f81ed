"""What the commands print with --json: one document each, with "kind" and "format", which docs/json.md describes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.protocol.codec import encode_json, format_json
from jaxrun.protocol.names import VERSION
from jaxrun.records.document_base import Document
from jaxrun.records.document_types import (
    CleanedRuns,
    DebugConfiguration,
    DebugDocument,
    ErrorDocument,
    ExplainedAttempt,
    ExplainedGoodput,
    ExplainedRank,
    Explanation,
    GoodputPeriod,
    HandledErrorContent,
    JobsDocument,
    ListedJob,
    RankStacks,
    StackFrameContent,
    StacksDocument,
    StoppedDocument,
    VersionDocument,
)

if TYPE_CHECKING:
    from jaxrun.analysis.diagnosis.error_choice import HandledError
    from jaxrun.analysis.diagnosis.job_stacks import JobStacks
    from jaxrun.analysis.verdict.goodput_text import Goodput, Period
    from jaxrun.analysis.verdict.verdict import Verdict
    from jaxrun.frontends.top.view import View
    from jaxrun.records.history.job_log import AttemptLog
    from jaxrun.records.rundir.jobs import Cleaned, RecordedJob
    from jaxrun.spec.job.plan import Plan


def format_document(document: Document | Mapping[str, object], *, in_one_line: bool = False) -> str:
    """Return the text of a document, without an end of line."""
    return encode_json(document).decode() if in_one_line else format_json(document)


def format_error(text: str, exit_code: int) -> str:
    return format_document(ErrorDocument(error=text, exit_code=exit_code))


def version() -> str:
    return format_document(VersionDocument(jaxrun=VERSION, python=".".join(map(str, sys.version_info[:3]))))


def plan(made: Plan, preloaded: Sequence[str]) -> str:
    """What --dry-run shows. Values of variables that look like secrets are masked."""
    from jaxrun.records.job_file import plan_document

    return format_document(plan_document(made, preloaded))


def explanation(run_dir: Path) -> str:
    """How a job went. Raises UsageError if `run_dir` cannot be read."""
    from jaxrun.analysis.verdict.verdict import to_content
    from jaxrun.records.history.goodput import account, band
    from jaxrun.records.history.job_log import read_attempts
    from jaxrun.records.rundir.recorded_files import read_job_events, read_plan, read_verdict

    events = read_job_events(run_dir)
    verdict, recorded = read_verdict(run_dir), read_plan(run_dir)
    attempts = read_attempts(events)
    return format_document(
        Explanation(
            run_dir=str(run_dir.absolute()),
            job_id=recorded.job_id,
            tag=recorded.tag,
            program=recorded.program,
            verdict=to_content(verdict) if verdict is not None else None,
            attempts=tuple(map(_attempt, attempts)),
            goodput=_goodput(account(attempts), band(attempts)),
            damaged_lines=events.damaged,
        )
    )


def _goodput(goodput: Goodput, periods: Iterable[Period]) -> ExplainedGoodput | None:
    """The share of steps, and the seconds of each part, in all and in each period; None if no steps were seen."""
    if not goodput.is_known:
        return None
    return ExplainedGoodput(
        share=round(goodput.share, 6),
        seconds=goodput.total_us / 1e6,
        parts={part: spent / 1e6 for part, spent in goodput.parts_us.items()},
        steps=goodput.steps,
        repeated_steps=goodput.repeated_steps,
        late_rank=goodput.late_rank if goodput.late_rank >= 0 else None,
        periods=tuple(
            GoodputPeriod(start=start, end=end, parts={part: spent / 1e6 for part, spent in parts.items()})
            for start, end, parts in periods
        ),
    )


def _attempt(log: AttemptLog) -> ExplainedAttempt:
    from jaxrun.records.history.explain import STEPS, find_steps

    steps = find_steps(log)
    return ExplainedAttempt(
        attempt=log.number,
        start=log.start,
        end=log.end,
        hosts=log.size,
        headline=log.outcome,
        straggler=log.straggler,
        ranks=tuple(
            ExplainedRank(
                rank=rank,
                host=of.host,
                pid=of.pid,
                status=of.status,
                seconds={step: round(steps[step][rank], 6) for step in STEPS if rank in steps[step]},
            )
            for rank, of in sorted(log.ranks.items())
        ),
    )


def job_list(directory: Path, jobs: Sequence[RecordedJob]) -> str:
    from jaxrun.analysis.verdict.verdict_text import headline_of

    found = tuple(
        ListedJob(
            number=job.number,
            run_dir=str(job.path),
            started=job.started,
            seconds=job.seconds,
            processes=job.processes,
            program=job.command,
            tag=job.tag,
            host=job.host,
            running=job.running,
            state=job.state,
            outcome=job.verdict.outcome if job.verdict is not None else None,
            exit_code=job.verdict.exit_code if job.verdict is not None else None,
            headline=headline_of(job.verdict) if job.verdict is not None else None,
            goodput=round(job.goodput.share, 6) if job.goodput is not None else None,
        )
        for job in jobs
    )
    return format_document(JobsDocument(directory=str(directory), jobs=found))


def cleaned(found: Cleaned) -> str:
    return format_document(
        CleanedRuns(
            directory=str(found.directory),
            dry_run=found.dry_run,
            deleted=tuple(map(str, found.deleted)),
            failed={str(path): reason for path, reason in found.failed.items()},
            kept={str(path): state for path, state in found.kept.items()},
            bytes=found.size,
        )
    )


def stopped(run_dir: Path, verdict: Verdict | None) -> str:
    """How a job ended that was told to; None if its launcher has left no verdict."""
    from jaxrun.analysis.verdict.verdict_text import headline_of

    return format_document(
        StoppedDocument(
            run_dir=str(run_dir.absolute()),
            outcome=verdict.outcome if verdict is not None else None,
            exit_code=verdict.exit_code if verdict is not None else None,
            headline=headline_of(verdict) if verdict is not None else None,
        )
    )


def stacks(run_dir: Path, seen: JobStacks, text: str) -> str:
    """Where all ranks are; `text` is what people are shown."""
    from jaxrun.analysis.diagnosis.stacks import main_stack
    from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of

    graph = wait_graph_of(seen)
    ranks = []
    for rank, host in sorted(seen.hosts.items()):
        wait = graph.ranks.get(rank)
        state = wait.state if wait is not None else None
        frames = main_stack(seen.dumps.get(rank, "")).frames
        ranks.append(
            RankStacks(
                rank=rank,
                host=host,
                finished=rank in seen.finished,
                activity=state.activity.name.lower() if state is not None else None,
                waits_for=tuple(graph.awaited_by(rank)),
                kernel_wait=seen.waits.get(rank, ""),
                frames=tuple(StackFrameContent(file=one.file, line=one.line, function=one.function) for one in frames),
                handles=tuple(_handled(error) for error in (state.errors if state is not None else ())),
                native=(seen.natives or {}).get(rank),
            )
        )
    run_dir = run_dir.absolute()
    return format_document(StacksDocument(run_dir=str(run_dir), time=seen.time, ranks=tuple(ranks), text=text))


def _handled(error: HandledError) -> HandledErrorContent:
    from jaxrun.analysis.diagnosis.error_choice import error_frame

    chosen = error.choice.chosen
    frame = error_frame(chosen)
    return HandledErrorContent(
        thread=error.thread,
        error=chosen.error,
        message=chosen.message,
        place=str(frame) if frame is not None else "",
    )


def debug(run_dir: Path, rank: int, configuration: DebugConfiguration, *, as_json: bool) -> str:
    """The launch.json for an editor; with `as_json`, a document in one line that contains its only configuration."""
    if not as_json:
        return format_json({"version": "0.2.0", "configurations": [configuration]})
    document = DebugDocument(run_dir=str(run_dir.absolute()), rank=rank, configuration=configuration)
    return format_document(document, in_one_line=True)


def top(run_dir: Path, view: View, *, in_one_line: bool = False) -> str:
    """How far each rank is, and what it uses: the figures of the screen."""
    from jaxrun.frontends.top.view_document import view_document

    return format_document(view_document(run_dir, view), in_one_line=in_one_line)
