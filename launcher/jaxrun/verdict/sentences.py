"""One end in words: what a rank did, when, and the text that shows it best."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from jaxrun.contract import ThreadFailed
from jaxrun.ranks import compact, locate, spell
from jaxrun.verdict import collateral, faults, stacks
from jaxrun.verdict.ends import End
from jaxrun.wording import plural, rank_of, seconds, signal_name

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
_STAGES = {
    "start": "while starting",
    "join": "while joining the others",
    "prove": "while JAX was asked for its devices",
}
_TAIL_LINES = 12
_MESSAGE_LIMIT = 200
_HOW = "(os._exit?)"


def who(ends: Sequence[End], hosts: Mapping[int, str]) -> str:
    """`rank 2 of 8 on h1`, `8 of 8 ranks`, `3 of 8 ranks (1, 4-5)`; of lost ones `ranks 2-3 of 8 on h2`."""
    if len(ends) == 1:
        return rank_of(ends[0].rank, hosts)
    if all(end.lost and end.words is None for end in ends):
        places = ", ".join(dict.fromkeys(end.host for end in ends))
        return f"{spell(end.rank for end in ends)} of {len(hosts)} on {places}"
    which = "" if len(ends) == len(hosts) else f" ({compact(end.rank for end in ends)})"
    return f"{len(ends)} of {len(hosts)} ranks{which}"


def did(end: End, *, many: bool = False) -> str:
    """The predicate: `raised ValueError`, `was killed by SIGKILL (9)`; `many` where several ranks did it."""
    after = " after its program had ended" if end.done else ""
    if end.words is not None:
        return _said(end) + after
    if end.lost:
        return f"{'were' if many else 'was'} lost: {end.lost}"
    if end.status is None:
        return "had not ended"
    if end.status < 0:
        return _killed(end, "were" if many else "was") + after
    if end.status == 0:
        return f"exited with status 0 before the end of its program {_HOW}"
    return f"exited with status {end.status} without an exception {_HOW}{after}"


def when(end: End, started: float, run_at: float | None) -> str:
    """`41.3 s into the run`, or how far the start-up had come."""
    stage = end.words.stage if end.words is not None else ""
    if stage in _STAGES or run_at is None:
        how_far = _STAGES.get(stage, "before the program's first line")
        return f"{how_far}, {seconds(end.time - started)} after the start"
    return f"{seconds(end.time - run_at)} into the run"


def evidence(ends: Sequence[End], hosts: Mapping[int, str]) -> tuple[str, str]:
    """(a line above it, the text) that shows best what happened to the first of these; both may be empty."""
    end = ends[0]
    name = locate([end.rank], hosts)
    if end.words is not None:
        trace = end.words.traceback.rstrip("\n")
        alike = f"{len(ends)} of {len(hosts)} ranks raised the same error; {name}'s traceback:"
        return (alike if len(ends) > 1 and trace else ""), trace
    threads = own_threads(end)
    if threads:
        return f"last words of thread {threads[-1].thread} of {name}:", threads[-1].traceback.rstrip("\n")
    stack = stacks.crash(end.fatal)
    if stack:
        return f"{name} was here when it ended:", stack
    tail = "" if end.status in (-signal.SIGKILL, -signal.SIGTERM) else _readable(end.tail)
    return (f"the last lines that {name} wrote to stderr:", tail) if tail else ("", "")


def fate(end: End) -> str:
    """What became of a rank that is not to blame, after `rank 3 …`."""
    if end.words is not None:
        return collateral_fate(end) or _said(end)
    if end.lost and not end.stopped:
        return "was lost too"
    if end.done or end.status == 0:
        return "had finished"
    if end.stopped:
        return "was stopped"
    return collateral_fate(end) or did(end).removesuffix(f" without an exception {_HOW}")


def collateral_fate(end: End) -> str:
    """What the signs of another's end, in the rank's words or stderr, say of it; empty without them."""
    words = end.words
    if words is None or words.error == "SystemExit":
        return collateral.fate(f"{end.tail}\n{end.fatal}")
    if collateral.judge(words.message, words.traceback) is collateral.Blame.CONSEQUENCE:
        return collateral.fate(f"{words.message}\n{words.traceback}")
    return ""


def own_threads(end: End) -> tuple[ThreadFailed, ...]:
    """The threads of its program that died of a fault of their own."""
    return tuple(t for t in end.threads if collateral.judge("", t.traceback) is collateral.Blame.OWN)


def thread_notes(ends: Sequence[End], shown: str) -> tuple[str, ...]:
    """One line for each rank that had lost a thread before, unless its traceback is the one `shown`."""
    notes = []
    for end in ends:
        threads = [thread for thread in own_threads(end) if thread.traceback.rstrip("\n") != shown]
        if threads:
            names = ", ".join(f"{thread.thread} ({thread.error})" for thread in threads[:3])
            more = f" and {plural(len(threads) - 3, 'other')}" if len(threads) > 3 else ""
            what = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
            notes.append(f"rank {end.rank} had lost {what} to an exception before: {names}{more}.")
    return tuple(notes)


def _said(end: End) -> str:
    assert end.words is not None
    if end.words.error != "SystemExit":
        return f"raised {end.words.error}"
    lines = end.words.message.splitlines()
    if lines and lines[0]:
        return f"ended with status {end.words.status}: sys.exit({lines[0][:_MESSAGE_LIMIT]!r})"
    return f"ended with status {end.words.status} (sys.exit)"


def _killed(end: End, verb: str) -> str:
    number = -(end.status or 0)
    name = signal_name(number)
    if number == signal.SIGABRT:
        how = f"{verb} aborted by {name}"
    else:
        how = f"crashed with {name}" if number in _CRASHES else f"{verb} killed by {name}"
    threads = own_threads(end)
    before = f", after its thread {threads[-1].thread} had raised {threads[-1].error}" if threads else ""
    killing = faults.killing(end)
    return how + before + (f", as {killing.by} asked" if killing else "")


def _readable(tail: str) -> str:
    """The last lines, without the native frames, which say nothing to the user."""
    lines = [line.rstrip() for line in tail.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("    @ ", "*** Check failure"))]
    return "\n".join(f"  {line}" for line in kept[-_TAIL_LINES:])
