"""Writes phrases of a sentence that describe what happened to workers."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxrun.analysis.diagnosis.consequences import Fate
from jaxrun.analysis.diagnosis.error_choice import choose_error, error_frame, error_name
from jaxrun.analysis.diagnosis.job_outcome import InjectedFault, WorkerOutcome
from jaxrun.analysis.diagnosis.root_cause import collateral, own_thread_failures
from jaxrun.analysis.verdict.error_text import describe_choice, format_error, format_with_place
from jaxrun.analysis.verdict.lost_helpers import describe_lost_worker
from jaxrun.analysis.verdict.stack_text import format_crash
from jaxrun.protocol.flight import strip_directory
from jaxrun.protocol.worker_messages import ThreadFailed, WorkerStage
from jaxrun.stack_frames import find_program_frames
from jaxrun.text import (
    agree,
    format_ranges,
    format_rank,
    format_ranks,
    format_ranks_on_hosts,
    format_seconds,
    format_status,
    plural,
)

_STAGES = {
    WorkerStage.START: "while starting",
    WorkerStage.JOIN: "while joining the others",
    WorkerStage.PROVE: "while asking JAX for its devices",
}
_BROKEN_POOLS = ("BrokenProcessPool", "BrokenExecutor")
_MAX_TAIL_LINES = 12
_MAX_MESSAGE_CHARACTERS = 200
_OS_EXIT, _MPI_EXIT = "(os._exit?)", "(MPI_Abort, or os._exit?)"
_FRAME = re.compile(r'^ *File "([^"]+)", line ([0-9]+)', re.MULTILINE)  # of a traceback, outermost first


def describe_ranks(workers: Sequence[WorkerOutcome], hosts: Mapping[int, str]) -> str:
    """Write `rank 2 of 8 on h1`, `8 of 8 ranks`, `3 of 8 ranks (1, 4-5)`; for lost ranks `ranks 2-3 of 8 on h2`."""
    if len(workers) == 1:
        return format_rank(workers[0].rank, hosts)
    ranks = [worker.rank for worker in workers]
    if all(worker.lost_reason and worker.failure is None for worker in workers):
        places = ", ".join(dict.fromkeys(worker.host for worker in workers))
        return f"{format_ranks(ranks)} of {len(hosts)} on {places}"
    which = "" if len(workers) == len(hosts) else f" ({format_ranges(ranks)})"
    return f"{len(workers)} of {len(hosts)} ranks{which}"


def describe_failure(worker: WorkerOutcome, *, many: bool = False, uses_mpi: bool = False) -> str:
    """Write the predicate: `raised ValueError`, `was killed by SIGKILL (9)`; `many`: for several ranks."""
    after = " after its program had ended" if worker.finished else ""
    if worker.failure is not None:
        return _describe_error(worker) + after
    if worker.lost_reason:
        return f"{'were' if many else 'was'} lost: {worker.lost_reason}"
    if worker.status is None:
        return "had not ended"
    if worker.status < 0:
        return _describe_signal(worker, worker.status, "were " if many else "was ") + after
    if worker.status == 0:
        return f"{format_status(0)} before the end of its program {_OS_EXIT}"
    exit_call = _MPI_EXIT if uses_mpi else _OS_EXIT
    return f"{format_status(worker.status)} without an exception {exit_call}{after}"


def describe_loss(workers: Sequence[WorkerOutcome], hosts: Mapping[int, str], run_at: float | None) -> str:
    """Write `rank 2 of 8 on h1 was killed by SIGKILL (9), 41.3 s into the run`, of a rank that others outlive.

    workers:  one, or all that were lost with a host
    """
    moment = describe_time(workers[0], workers[0].time, run_at)
    hosts = {**hosts, **{worker.rank: worker.host for worker in workers}}  # they may have come back on another
    return f"{describe_ranks(workers, hosts)} {describe_failure(workers[0], many=len(workers) > 1)}, {moment}"


def describe_others(ranks: Collection[int]) -> str:
    """Write `ranks 0-1 go on (--keep-survivors)`, of the ranks that outlive others."""
    if not ranks:
        return "the programs of the others have ended (--keep-survivors)"
    return f"{format_ranks(ranks)} {agree('goes', len(ranks))} on (--keep-survivors)"


def describe_time(worker: WorkerOutcome, started: float, run_at: float | None) -> str:
    """Write `41.3 s into the run`, or how far the start-up had come."""
    if run_at is not None and was_running(worker, run_at):
        return f"{format_seconds(worker.time - run_at)} into the run"
    stage = worker.failure.stage if worker.failure is not None else WorkerStage.PROGRAM
    how_far = _STAGES.get(stage, "before the program's first line")
    return f"{how_far}, {format_seconds(worker.time - started)} after the start"


def was_running(worker: WorkerOutcome, run_at: float | None) -> bool:
    """Whether the program was running when the worker failed."""
    return run_at is not None and (worker.failure is None or worker.failure.stage not in _STAGES)


def find_evidence(workers: Sequence[WorkerOutcome], hosts: Mapping[int, str]) -> tuple[str, str]:
    """Return (line, text): the text that shows best what happened to the first worker, and a line to stand above it.

    Both may be empty.
    """
    worker = workers[0]
    name = format_ranks_on_hosts([worker.rank], hosts)
    # A program that ends by sys.exit(1) may have printed the error by itself, as hydra does.
    if worker.failure is not None and (worker.failure.error != "SystemExit" or worker.failure.message):
        traceback = worker.failure.traceback.rstrip("\n")
        shared = f"{len(workers)} of {len(hosts)} ranks raised the same error; {name}'s traceback:"
        return (shared if len(workers) > 1 and traceback else ""), traceback
    threads = own_thread_failures(worker)
    if threads:
        return f"last words of thread {threads[-1].thread} of {name}:", threads[-1].traceback.rstrip("\n")
    stack = format_crash(worker.crash_dump)
    if stack:
        return f"{name} was here when it ended:", stack
    tail = "" if worker.status in (-signal.SIGKILL, -signal.SIGTERM) else _format_tail(worker.stderr_tail)
    return (f"the last lines that {name} wrote to stderr:", tail) if tail else ("", "")


def describe_victim(worker: WorkerOutcome) -> str:
    """Write what became of a rank that is not a culprit, to complete `rank 3 …`."""
    if worker.failure is not None:
        return collateral(worker) or _describe_error_briefly(worker)
    if worker.lost_reason and not worker.killed_by_launcher:
        return Fate.LOST_TOO
    if worker.ended_well:
        return Fate.FINISHED
    if worker.killed_by_launcher:
        return Fate.STOPPED
    if not worker.status or worker.status < 0:
        return collateral(worker) or describe_failure(worker)
    return collateral(worker) or format_status(worker.status)


def describe_thread_failures(
    workers: Sequence[WorkerOutcome], shown: str, told: Collection[int] = ()
) -> tuple[str, ...]:
    """Return one line for each rank that had lost a thread before.

    shown:  a traceback that is shown already
    told:   ranks whose threads another text names
    """
    lines = []
    for worker in workers:
        threads = [thread for thread in own_thread_failures(worker) if thread.traceback.rstrip("\n") != shown]
        if threads and worker.rank not in told:
            names = ", ".join(f"{thread.thread} ({_describe_thread_error(thread)})" for thread in threads[:3])
            more = f" and {plural(len(threads) - 3, 'other')}" if len(threads) > 3 else ""
            what = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
            lines.append(f"rank {worker.rank} had lost {what} to an exception before: {names}{more}.")
    return tuple(lines)


def _describe_thread_error(thread: ThreadFailed) -> str:
    """Write `ValueError: bad record in shard 1 at data.py:31 load`."""
    choice = choose_error(thread.chain)
    if choice is None:
        return thread.error
    frame = error_frame(choice.chosen)
    return f"{format_error(choice.chosen)}{f' at {frame}' if frame is not None else ''}"


def describe_injected_faults(
    workers: Sequence[WorkerOutcome], hosts: Mapping[int, str], run_at: float | None, *, but: InjectedFault | None
) -> Iterator[str]:
    """Yield one line for each injected fault, except those like `but`, which the headline mentions."""
    ranks_of: dict[InjectedFault, list[int]] = defaultdict(list)
    for worker in workers:
        for fault in worker.injected_faults:
            ranks_of[fault].append(worker.rank)
    for fault, ranks in sorted(ranks_of.items(), key=lambda item: (item[0].time, item[1])):
        if but is None or (fault.kind, fault.requested_by) != (but.kind, but.requested_by):
            happened = describe_injected_fault(fault, run_at, many=len(ranks) > 1)
            yield f"{format_ranks_on_hosts(ranks, hosts)} {happened}."


def describe_injected_fault(fault: InjectedFault, run_at: float | None, *, many: bool = False) -> str:
    """Write `was stopped by SIGSTOP (19), as --chaos asked, 1.5 s into the run`."""
    moment = f"{format_seconds(fault.time - run_at)} into the run" if run_at is not None else "before the program ran"
    return f"{'were' if many else 'was'} {fault}, {moment}"


def _describe_error(worker: WorkerOutcome) -> str:
    failure = worker.failure
    assert failure is not None
    choice = choose_error(failure.chain)
    if failure.error != "SystemExit":
        return (
            f"raised {describe_choice(choice) if choice is not None else failure.error}{_describe_broken_pool(worker)}"
        )
    handled = f", while it handled {format_with_place(choice.chosen)}" if choice is not None else ""
    lines = failure.message.splitlines()
    if lines and lines[0]:
        return f"ended with status {failure.status}: sys.exit({lines[0][:_MAX_MESSAGE_CHARACTERS]!r}){handled}"
    return f"ended with status {failure.status} (sys.exit){handled}"


def _describe_broken_pool(worker: WorkerOutcome) -> str:
    """Write `, as a worker of its pool (process 4242) was killed by SIGKILL (9)`, if that is what the error means."""
    assert worker.failure is not None
    if error_name(worker.failure) not in _BROKEN_POOLS or not worker.lost_pool_workers:
        return ""
    return f", as {describe_lost_worker('its', worker.lost_pool_workers)}"


def _describe_error_briefly(worker: WorkerOutcome) -> str:
    """Write `raised ValueError at data.py:31`."""
    failure = worker.failure
    assert failure is not None
    choice = choose_error(failure.chain)
    if choice is None or failure.error == "SystemExit":
        return _describe_error(worker) + _raised_at(failure.traceback)
    frame = error_frame(choice.chosen)
    return f"raised {choice.chosen.error}" + (f" at {strip_directory(frame.file)}:{frame.line}" if frame else "")


def _raised_at(traceback: str) -> str:
    """Return ` at train.py:88`, the innermost line of the program in a traceback; empty if it has none."""
    places = _FRAME.findall(traceback)[::-1]
    index = next(iter(find_program_frames([file for file, _ in places])), None)
    return f" at {strip_directory(places[index][0])}:{places[index][1]}" if index is not None else ""


def _describe_signal(worker: WorkerOutcome, status: int, auxiliary: str) -> str:
    threads = own_thread_failures(worker)
    before = f", after its thread {threads[-1].thread} had raised {threads[-1].error}" if threads else ""
    fault = worker.deadly_fault
    return format_status(status, auxiliary) + before + (f", as {fault.requested_by} asked" if fault else "")


def _format_tail(stderr_tail: str) -> str:
    """Return the last lines without native frames, which mean nothing to the user."""
    lines = [line.rstrip() for line in stderr_tail.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("    @ ", "*** Check failure"))]
    return "\n".join(f"  {line}" for line in kept[-_MAX_TAIL_LINES:])
