"""One end in words: what a rank did, when, and the text that shows it best."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from jaxrun.diagnosis import consequences, stacks
from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.protocol.worker_messages import ThreadFailed
from jaxrun.text import (
    format_ranges,
    format_rank,
    format_ranks,
    format_ranks_on_hosts,
    format_seconds,
    format_signal,
    plural,
)
from jaxrun.verdict import injected_faults

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
_STAGES = {
    "start": "while starting",
    "join": "while joining the others",
    "prove": "while JAX was asked for its devices",
}
_TAIL_LINES = 12
_MESSAGE_LIMIT = 200
_HOW = "(os._exit?)"


def describe_ranks(ends: Sequence[WorkerOutcome], hosts: Mapping[int, str]) -> str:
    """`rank 2 of 8 on h1`, `8 of 8 ranks`, `3 of 8 ranks (1, 4-5)`; of lost ones `ranks 2-3 of 8 on h2`."""
    if len(ends) == 1:
        return format_rank(ends[0].rank, hosts)
    if all(end.lost_reason and end.failure is None for end in ends):
        places = ", ".join(dict.fromkeys(end.host for end in ends))
        return f"{format_ranks(end.rank for end in ends)} of {len(hosts)} on {places}"
    which = "" if len(ends) == len(hosts) else f" ({format_ranges(end.rank for end in ends)})"
    return f"{len(ends)} of {len(hosts)} ranks{which}"


def describe_failure(end: WorkerOutcome, *, many: bool = False) -> str:
    """The predicate: `raised ValueError`, `was killed by SIGKILL (9)`; `many` where several ranks did it."""
    after = " after its program had ended" if end.finished else ""
    if end.failure is not None:
        return _said(end) + after
    if end.lost_reason:
        return f"{'were' if many else 'was'} lost: {end.lost_reason}"
    if end.status is None:
        return "had not ended"
    if end.status < 0:
        return _killed(end, "were" if many else "was") + after
    if end.status == 0:
        return f"exited with status 0 before the end of its program {_HOW}"
    return f"exited with status {end.status} without an exception {_HOW}{after}"


def describe_time(end: WorkerOutcome, started: float, run_at: float | None) -> str:
    """`41.3 s into the run`, or how far the start-up had come."""
    stage = end.failure.stage if end.failure is not None else ""
    if stage in _STAGES or run_at is None:
        how_far = _STAGES.get(stage, "before the program's first line")
        return f"{how_far}, {format_seconds(end.time - started)} after the start"
    return f"{format_seconds(end.time - run_at)} into the run"


def find_evidence(ends: Sequence[WorkerOutcome], hosts: Mapping[int, str]) -> tuple[str, str]:
    """(a line above it, the text) that shows best what happened to the first of these; both may be empty."""
    end = ends[0]
    name = format_ranks_on_hosts([end.rank], hosts)
    if end.failure is not None:
        trace = end.failure.traceback.rstrip("\n")
        alike = f"{len(ends)} of {len(hosts)} ranks raised the same error; {name}'s traceback:"
        return (alike if len(ends) > 1 and trace else ""), trace
    threads = own_thread_failures(end)
    if threads:
        return f"last words of thread {threads[-1].thread} of {name}:", threads[-1].traceback.rstrip("\n")
    stack = stacks.format_crash(end.crash_dump)
    if stack:
        return f"{name} was here when it ended:", stack
    tail = "" if end.status in (-signal.SIGKILL, -signal.SIGTERM) else _readable(end.stderr_tail)
    return (f"the last lines that {name} wrote to stderr:", tail) if tail else ("", "")


def describe_victim(end: WorkerOutcome) -> str:
    """What became of a rank that is not to blame, after `rank 3 …`."""
    if end.failure is not None:
        return describe_collateral(end) or _said(end)
    if end.lost_reason and not end.killed_by_launcher:
        return "was lost too"
    if end.finished or end.status == 0:
        return "had finished"
    if end.killed_by_launcher:
        return "was stopped"
    return describe_collateral(end) or describe_failure(end).removesuffix(f" without an exception {_HOW}")


def describe_collateral(end: WorkerOutcome) -> str:
    """What the signs of another's end, in the rank's words or stderr, say of it; empty without them."""
    words = end.failure
    if words is None or words.error == "SystemExit":
        return consequences.describe_consequence(f"{end.stderr_tail}\n{end.crash_dump}")
    if consequences.classify_error(words.message, words.traceback) is consequences.ErrorOrigin.OTHER:
        return consequences.describe_consequence(f"{words.message}\n{words.traceback}")
    return ""


def own_thread_failures(end: WorkerOutcome) -> tuple[ThreadFailed, ...]:
    """The threads of its program that died of a fault of their own."""
    return tuple(
        t for t in end.thread_failures if consequences.classify_error("", t.traceback) is consequences.ErrorOrigin.OWN
    )


def describe_thread_failures(ends: Sequence[WorkerOutcome], shown: str) -> tuple[str, ...]:
    """One line for each rank that had lost a thread before, unless its traceback is the one `shown`."""
    notes = []
    for end in ends:
        threads = [thread for thread in own_thread_failures(end) if thread.traceback.rstrip("\n") != shown]
        if threads:
            names = ", ".join(f"{thread.thread} ({thread.error})" for thread in threads[:3])
            more = f" and {plural(len(threads) - 3, 'other')}" if len(threads) > 3 else ""
            what = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
            notes.append(f"rank {end.rank} had lost {what} to an exception before: {names}{more}.")
    return tuple(notes)


def _said(end: WorkerOutcome) -> str:
    assert end.failure is not None
    if end.failure.error != "SystemExit":
        return f"raised {end.failure.error}"
    lines = end.failure.message.splitlines()
    if lines and lines[0]:
        return f"ended with status {end.failure.status}: sys.exit({lines[0][:_MESSAGE_LIMIT]!r})"
    return f"ended with status {end.failure.status} (sys.exit)"


def _killed(end: WorkerOutcome, verb: str) -> str:
    number = -(end.status or 0)
    name = format_signal(number)
    if number == signal.SIGABRT:
        how = f"{verb} aborted by {name}"
    else:
        how = f"crashed with {name}" if number in _CRASHES else f"{verb} killed by {name}"
    threads = own_thread_failures(end)
    before = f", after its thread {threads[-1].thread} had raised {threads[-1].error}" if threads else ""
    killing = injected_faults.killing_fault(end)
    return how + before + (f", as {killing.by} asked" if killing else "")


def _readable(tail: str) -> str:
    """The last lines, without the native frames, which say nothing to the user."""
    lines = [line.rstrip() for line in tail.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("    @ ", "*** Check failure"))]
    return "\n".join(f"  {line}" for line in kept[-_TAIL_LINES:])
