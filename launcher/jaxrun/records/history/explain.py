"""Explains how a job went, from the files of its run directory: verdict, start-up, and what all ranks did over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from jaxrun.analysis.verdict import verdict, verdict_text
from jaxrun.analysis.verdict.goodput_text import Goodput, format_goodput, sum_up
from jaxrun.analysis.verdict.goodput_text import format_table as format_goodput_table
from jaxrun.analysis.verdict.stack_text import format_straggler
from jaxrun.errors import UsageError
from jaxrun.protocol.agent_messages import FirstOutput, WorkerExited, WorkerSpawned
from jaxrun.protocol.worker_messages import DeviceReport, Hello
from jaxrun.records.history.chrome_trace import write_chrome_trace
from jaxrun.records.history.collect import collect_job
from jaxrun.records.history.goodput import account
from jaxrun.records.history.job_log import AttemptLog, describe_sizes, read_attempts
from jaxrun.records.rundir import recorders
from jaxrun.records.rundir.recorded_files import find_run_dir, read_job_events, read_plan, read_text
from jaxrun.records.rundir.rundir import EVENTS_FILE, VERDICT_FILE, attempt_directory
from jaxrun.terminal import A_FILE, TerminalFormat, in_one_line
from jaxrun.text import UNKNOWN_HOST, format_ranks_on_hosts, format_status, group_alike, has_several_hosts, plural

STEPS = ("spawned", "imported", "joined", "proved", "first output", "ended")
_HELD_UP_BY_A_RANK = STEPS[:4]  # when a rank first writes something, and ends, is up to the program
_TRACE_CALLS = 400_000  # of all ranks: about 100 MB, which Perfetto opens in a few seconds
_MAX_FULL_TABLE_RANKS = 16  # a larger job is summarised by step
_MAX_ENDS = 8  # of ranks that ended badly
_SLOWEST_SHOWN = 3
# A rank is marked if it is later than the others' median by this time and by _LATE_FRACTION of the median.
_LATE_S = 0.25
_LATE_FRACTION = 0.25

Steps = Mapping[str, Mapping[int, float]]  # step → rank → seconds since the attempt began


def explain_run(path: Path | None, terminal: TerminalFormat = A_FILE) -> str:
    """The text for the run directory `path`, to be shown on `terminal`; of several run directories, or for None, of
    the latest.

    Raises UsageError if it is neither, or cannot be read.
    """
    path = find_run_dir(path)
    events = read_job_events(path)
    *earlier, last = attempts = read_attempts(events) or [AttemptLog(1, 0.0, 0.0)]
    is_over = (path / VERDICT_FILE).exists()
    logs = attempt_directory(path, last.number)
    parts = [
        f"tag: {in_one_line(tag)}" if (tag := read_plan(path).tag) else "",
        _format_earlier(earlier),
        _format_verdict(path, last, terminal),
        recorders.format_recorders(logs, last.hosts, divergences=not is_over),
        "" if is_over else describe_sizes(attempts),
        _format_goodput(account(attempts)),
        format_table(last),
        _format_preloaded(last),
        _format_cores(last),
        f"(left out: {plural(events.damaged, 'unreadable line')} of {EVENTS_FILE})" if events.damaged else "",
    ]
    return "\n\n".join(filter(None, parts))


def explain_runs(paths: Sequence[Path]) -> str:
    """The text for several run directories: what the time of each was worth, and of all together.

    Raises UsageError if one cannot be read.
    """
    found = {path: account(read_attempts(read_job_events(path))) for path in map(find_run_dir, paths)}
    known = [goodput for goodput in found.values() if goodput.is_known]
    lines = [
        f"{in_one_line(str(path))}: {format_goodput(goodput) if goodput.is_known else 'its steps are not known'}"
        for path, goodput in found.items()
    ]
    return "\n".join([*lines, "", _format_goodput(sum_up(known), plural(len(known), "job"))] if known else lines)


def write_trace(run_dir: Path, file: Path) -> str:
    """Write the job of `run_dir` as trace events; returns a line for people.

    Raises UsageError if there is no such job, or the file cannot be written.
    """
    trace = collect_job(run_dir, _TRACE_CALLS)
    try:
        write_chrome_trace(trace, file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    left_out = f" ({trace.calls_left_out})" if trace.calls_left_out else ""
    return f"wrote {file}; open it at https://ui.perfetto.dev{left_out}"


def format_table(log: AttemptLog) -> str:
    """One row per rank, or for a large job one per step; ranks that are late are marked."""
    steps = find_steps(log)
    ranks = _ranks(steps)
    if not ranks:
        return "no rank was started."
    late = {step: _find_late_rank(steps[step]) for step in _HELD_UP_BY_A_RANK}
    rows = _by_rank(steps, log.hosts, late) if len(ranks) <= _MAX_FULL_TABLE_RANKS else _by_step(steps)
    what = f"attempt {log.number}" if log.number > 1 else "the job"
    lines = [f"start-up, in seconds since {what} was started:", *_aligned(rows)]
    for step, rank in late.items():
        if rank is not None:
            behind = steps[step][rank] - median(steps[step].values())
            who = format_ranks_on_hosts([rank], log.hosts) if rank in log.hosts else f"rank {rank}"
            lines.append(f"* slowest: {who}, {step} {behind:.2f} s after the median")
    return "\n".join(lines)


def _format_goodput(goodput: Goodput, jobs: str = "") -> str:
    """Write what the time was worth, if steps were seen; `jobs` says of how many jobs, if of several."""
    if not goodput.is_known:
        return ""
    told = f", {goodput.steps:,} steps" if goodput.steps else ""
    repeated = f" and {goodput.repeated_steps:,} repeated" if goodput.repeated_steps else ""
    attempts = f" in {plural(goodput.attempts, 'attempt')}" if goodput.attempts > 1 and not jobs else ""
    of_what = f" of {jobs}" if jobs else ""
    return "\n".join([f"what the time{of_what}{attempts} was worth{told}{repeated}:", *format_goodput_table(goodput)])


def _format_preloaded(log: AttemptLog) -> str:
    """List what was imported once for all ranks of a host, and why the rest was not, in one line per such host."""
    lines = []
    for preloaded in log.preloaded:
        what = f"imported once before the fork, in {preloaded.seconds:.2f} s: {', '.join(preloaded.names) or 'nothing'}"
        left_out = [f"{name} ({reason})" for name, reason in preloaded.left_out.items()]
        lines.append(f"{what}; left to each rank: {', '.join(left_out)}" if left_out else what)
    return "\n".join(dict.fromkeys(lines))


def _format_cores(log: AttemptLog) -> str:
    """List which ranks stay on which cores, `ranks 0-1: 0-31`, if they do not have all cores of their hosts."""
    bound = {rank: of.cores for rank, of in log.ranks.items() if of.cores}
    if not bound:
        return ""
    who = [f"  {format_ranks_on_hosts(ranks, log.hosts)}: {cores}" for cores, ranks in group_alike(bound)]
    return "\n".join(["cores that ranks stay on (XLA has as many threads; --bind):", *who[:_MAX_FULL_TABLE_RANKS]])


def _format_progress(log: AttemptLog) -> str:
    """Describe how far a job without a verdict had come, in a few lines."""
    steps = find_steps(log)
    ranks = _ranks(steps)
    counts = ", ".join(f"{len(times)} {step}" for step, times in steps.items() if times)
    ended = [f"rank {rank} {format_status(of.status, 'was ')}" for rank, of in sorted(log.ranks.items()) if of.status]
    lines = [f"of {plural(len(ranks), 'rank')}: {counts}" if counts else "no rank was started"]
    if ended:
        lines.append(f"ended badly: {'; '.join(ended[:_MAX_ENDS])}")
    if log.last is not None:
        of_rank = f" of rank {log.last.rank}" if log.last.rank is not None else ""
        lines.append(f"last event: {type(log.last.message).__name__}{of_rank} after {log.last.time - log.start:.2f} s")
    if log.straggler is not None:
        hosts = {rank: log.hosts.get(rank, UNKNOWN_HOST) for rank in ranks}
        lines.append(f"{format_straggler(log.straggler, hosts)}.")
    return "\n".join(lines)


def _format_earlier(earlier: Sequence[AttemptLog]) -> str:
    """Describe how the earlier attempts ended, and what else was seen then, such as which rank was stuck where."""
    lines = []
    for log in earlier:
        if log.outcome:
            lines.append(f"attempt {log.number}: {log.outcome}{f'   {log.log}' if log.log else ''}")
            lines += [f"  {line}" for text in log.details for line in text.splitlines()]
    return "\n".join(["earlier attempts:", *lines]) if lines else ""


def _format_verdict(path: Path, log: AttemptLog, terminal: TerminalFormat) -> str:
    text = _read(path / VERDICT_FILE)
    if not text:
        why = "jaxrun is still running, was killed, or could not write (a full disk): these records are incomplete"
        return f"no verdict in {path}: {why}\n{_format_progress(log)}"
    try:
        return verdict_text.format_report(verdict.from_json(text), path, terminal).lstrip("\n")
    except ValueError as error:
        return f"the verdict in {path / VERDICT_FILE} cannot be read: {error}\n{_format_progress(log)}"


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None


def find_steps(log: AttemptLog) -> Steps:
    def times(kind: type) -> dict[int, float]:
        return {rank: rank_log.at[kind] - log.start for rank, rank_log in log.ranks.items() if kind in rank_log.at}

    found = (
        times(WorkerSpawned),
        times(Hello),
        {rank: rank_log.joined - log.start for rank, rank_log in log.ranks.items() if rank_log.joined is not None},
        times(DeviceReport),
        times(FirstOutput),
        times(WorkerExited),
    )
    return dict(zip(STEPS, found, strict=True))


def _ranks(steps: Steps) -> list[int]:
    return sorted({rank for times in steps.values() for rank in times})


def _find_late_rank(times: Mapping[int, float]) -> int | None:
    """Return the slowest rank if it is well behind the others, else None."""
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda rank: times[rank])
    others = median(time for rank, time in times.items() if rank != slowest)
    return slowest if times[slowest] - others > max(_LATE_S, _LATE_FRACTION * others) else None


def _by_rank(steps: Steps, hosts: Mapping[int, str], late: Mapping[str, int | None]) -> list[Sequence[str]]:
    with_hosts = has_several_hosts(hosts)
    rows: list[Sequence[str]] = [["rank", *(["host"] if with_hosts else []), *STEPS]]
    for rank in _ranks(steps):
        cells = []
        for step in STEPS:
            time = steps[step].get(rank)
            mark = "*" if late.get(step) == rank else ""
            cells.append(f"{mark}{time:.2f}" if time is not None else "-")
        rows.append([str(rank), *([hosts.get(rank, "-")] if with_hosts else []), *cells])
    return rows


def _by_step(steps: Steps) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [["step", "ranks", "first", "median", "last", "slowest ranks"]]
    for step, times in steps.items():
        if times:
            slowest = sorted(times, key=lambda rank: (-times[rank], rank))[:_SLOWEST_SHOWN]
            names = ", ".join(f"{rank} ({times[rank]:.2f})" for rank in slowest)
            numbers = (f"{value:.2f}" for value in (min(times.values()), median(times.values()), times[slowest[0]]))
            rows.append([step, str(len(times)), *numbers, names])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
