"""What the commands print with --json: one document each, with "kind" and "format", which docs/json.md describes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrun.protocol.names import VERSION

if TYPE_CHECKING:
    from jaxrun.analysis.diagnosis.snapshot import Snapshot
    from jaxrun.frontends.top.view import View
    from jaxrun.records.history.job_log import AttemptLog
    from jaxrun.records.rundir.jobs import Cleaned, RecordedJob
    from jaxrun.spec.job.plan import Plan

FORMAT = 1  # changes when a field of any document loses its meaning; fields may be added at any time


def format_document(kind: str, content: Mapping[str, Any], *, in_one_line: bool = False) -> str:
    """Return the text of a document, without an end of line."""
    document = {"kind": kind, "format": FORMAT, **content}
    return json.dumps(document, indent=None if in_one_line else 2, ensure_ascii=False, default=str)


def format_error(text: str, exit_code: int) -> str:
    return format_document("error", {"error": text, "exit_code": exit_code})


def version() -> str:
    return format_document("version", {"jaxrun": VERSION, "python": ".".join(map(str, sys.version_info[:3]))})


def plan(made: Plan, preloaded: Sequence[str]) -> str:
    """What --dry-run shows. Values of variables that look like secrets are masked."""
    from jaxrun.spec.job.plan import to_json

    content = json.loads(to_json(made))
    del content["launcher"]
    return format_document("plan", {**content, "preloaded": list(preloaded)})


def explanation(run_dir: Path) -> str:
    """How a job went. Raises UsageError if `run_dir` cannot be read."""
    from jaxrun.records.history.job_log import read_attempts
    from jaxrun.records.rundir.recorded_files import read_job_events, read_plan, read_text
    from jaxrun.records.rundir.rundir import VERDICT_FILE

    events = read_job_events(run_dir)
    try:
        verdict = json.loads(read_text(run_dir / VERDICT_FILE))
    except (OSError, ValueError):
        verdict = None
    recorded = read_plan(run_dir)
    content = {
        "run_dir": str(run_dir.absolute()),
        "job_id": recorded.job_id,
        "tag": recorded.tag,
        "program": list(recorded.program),
        "verdict": verdict,
        "attempts": [_attempt(log) for log in read_attempts(events)],
        "damaged_lines": events.damaged,
    }
    return format_document("explanation", content)


def _attempt(log: AttemptLog) -> dict[str, Any]:
    from jaxrun.protocol.codec import field_values
    from jaxrun.records.history.explain import STEPS, find_steps

    steps = find_steps(log)
    return {
        "attempt": log.number,
        "start": log.start,
        "end": log.end,
        "hosts": log.size,
        "headline": log.outcome,
        "straggler": field_values(log.straggler) if log.straggler is not None else None,
        "ranks": [
            {
                "rank": rank,
                "host": of.host,
                "pid": of.pid,
                "status": of.status,
                "seconds": {step: round(steps[step][rank], 6) for step in STEPS if rank in steps[step]},
            }
            for rank, of in sorted(log.ranks.items())
        ],
    }


def job_list(directory: Path, jobs: Sequence[RecordedJob]) -> str:
    found = [
        {
            "number": number,
            "run_dir": str(job.path),
            "started": job.started,
            "seconds": job.seconds,
            "processes": job.processes,
            "program": list(job.command),
            "tag": job.tag,
            "host": job.host,
            "running": job.running,
            "state": job.state,
            "outcome": job.verdict.outcome if job.verdict is not None else None,
            "exit_code": job.verdict.exit_code if job.verdict is not None else None,
        }
        for number, job in zip(range(len(jobs), 0, -1), jobs, strict=True)
    ]
    return format_document("jobs", {"directory": str(directory), "jobs": found})


def cleaned(found: Cleaned) -> str:
    content = {
        "directory": str(found.directory),
        "dry_run": found.dry_run,
        "deleted": [str(path) for path in found.deleted],
        "failed": {str(path): reason for path, reason in found.failed.items()},
        "kept": {str(path): state for path, state in found.kept.items()},
        "bytes": found.size,
    }
    return format_document("cleaned", content)


def stacks(run_dir: Path, snapshot: Snapshot, text: str) -> str:
    """Where all ranks are; `text` is what people are shown."""
    from jaxrun.analysis.diagnosis.stacks import main_stack
    from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of

    graph = wait_graph_of(snapshot)
    ranks = []
    for rank, host in sorted(snapshot.hosts.items()):
        wait = graph.ranks.get(rank)
        state = wait.state if wait is not None else None
        frames = main_stack(snapshot.dumps.get(rank, "")).frames
        ranks.append(
            {
                "rank": rank,
                "host": host,
                "finished": rank in snapshot.finished,
                "activity": state.activity.name.lower() if state is not None else None,
                "waits_for": list(graph.awaited_by(rank)),
                "kernel_wait": snapshot.waits.get(rank, ""),
                "frames": [{"file": one.file, "line": one.line, "function": one.function} for one in frames],
                "native": (snapshot.natives or {}).get(rank),
            }
        )
    content = {"run_dir": str(run_dir.absolute()), "time": snapshot.time, "ranks": ranks, "text": text}
    return format_document("stacks", content)


def debug(run_dir: Path, rank: int, configuration: Mapping[str, Any], *, as_json: bool) -> str:
    """The launch.json for an editor; with `as_json`, a document in one line that contains its only configuration."""
    if not as_json:
        return json.dumps({"version": "0.2.0", "configurations": [configuration]}, indent=2, ensure_ascii=False)
    content = {"run_dir": str(run_dir.absolute()), "rank": rank, "configuration": configuration}
    return format_document("debug", content, in_one_line=True)


def top(run_dir: Path, view: View, *, in_one_line: bool = False) -> str:
    """How far each rank is, and what it uses: the figures of the screen."""
    from jaxrun.frontends.top.view_document import view_content

    return format_document("top", view_content(run_dir, view), in_one_line=in_one_line)
