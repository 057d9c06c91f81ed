"""Writes what a job did over time into files: `jaxrun explain --trace FILE --html FILE`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.records.history.chrome_trace import write_chrome_trace
from jaxrun.records.history.collect import collect_job
from jaxrun.records.history.job_trace import JobTrace
from jaxrun.records.history.page import format_page
from jaxrun.records.rundir.find import find_run_dir

_TRACE_CALLS = 400_000  # of all ranks: some 100 MB, which Perfetto opens in a few seconds
_PAGE_CALLS = 800_000  # which are compared; the page has those of the ranks that it shows


def write_trace(run_dir: Path | None, chrome: Path | None, page: Path | None) -> Iterator[str]:
    """Write the job of `run_dir`, with None of the latest, as trace events and as a page; yields what to say of it.

    Raises UsageError where there is no such job, or a file cannot be written.
    """
    found = find_run_dir(run_dir)
    if chrome:
        trace = collect_job(found, _TRACE_CALLS)
        _write(chrome, lambda: write_chrome_trace(trace, chrome))
        yield f"wrote {chrome}; open it at https://ui.perfetto.dev{_describe_limits(trace)}"
    if page:
        trace = collect_job(found, _PAGE_CALLS)
        _write(page, lambda: page.write_text(format_page(trace), encoding="utf-8", errors="backslashreplace"))
        yield f"wrote {page}; open it in any browser{_describe_limits(trace)}"


def _write(file: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def _describe_limits(trace: JobTrace) -> str:
    """What it does not hold, in brackets, or nothing."""
    kept = sum(len(rank.calls) for attempt in trace.attempts for rank in attempt.ranks.values())
    made = sum(rank.calls_made for attempt in trace.attempts for rank in attempt.ranks.values())
    return f" (of {made:,} calls of all ranks the last {kept:,})" if made > kept else ""
