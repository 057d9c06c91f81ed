"""Decides whether to start a job again after an attempt, from how its attempts ended. Pure functions.

Restarts are for bad luck. The count of --max-restarts starts again with every step that the program saves. Two equal
failures in a row with no step saved in between are a bug. A failure that cannot improve by trying again, such as a
missing module, is final.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import (
    Completed,
    Diverged,
    EarlyExit,
    EndedBySignal,
    Grown,
    HostCheckFailed,
    HostsNotBack,
    LostAtStart,
    OutOfStep,
    Preempted,
    RankFailed,
    Refused,
    Stalled,
    TimedOut,
    Unavailable,
    Unsupported,
)
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.analysis.diagnosis.root_cause import Culpability, culpability, find_culprits, find_first_failure
from jaxrun.analysis.verdict.exit_code import exit_code
from jaxrun.errors import EXIT_PREEMPTED
from jaxrun.protocol.job_record import AlikeFailure, AttemptEnd
from jaxrun.protocol.worker_messages import WorkerStage

_PLACE = re.compile(r'^\s*File "([^"]+)", line ([0-9]+)', re.MULTILINE)
_HOPELESS_ERRORS = ("ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError", "SnapshotError")
# The classes of failures that --restart-on tells apart.
_EXCEPTION, _LOST, _STALL = "exceptions and exit codes", "lost", "stall"
_HOST_CHECK = "host check"  # no program has run, and another host may replace this one
_NOT_BACK = "host not back"  # no program has run: the loss of the host was counted already
_DRAINED = "pod drained"  # by the cluster, as often as it likes
_NOT_COUNTED = (_HOST_CHECK, _NOT_BACK, _DRAINED, Grown.reason)
_HEAD_LEAVES = "this pod goes away; the other pods keep the job for the one that takes its place (--wait-hosts)"


class Restart(Struct, frozen=True):
    """Start the job again. `most` is the number of attempts in all, if no further step is saved."""

    most: int


class Stop(Struct, frozen=True):
    """The job is over; `why` is for people, and empty if no restarts were asked for."""

    why: str = ""


def decide_restart(
    history: Sequence[AttemptEnd], max_restarts: int, restart_on: str, *, first_attempt: int = 1
) -> Restart | Stop:
    """Decide what follows the last attempt of the history, which begins with attempt number `first_attempt`."""
    last = history[-1]
    is_counted = last.kind not in _NOT_COUNTED
    if last.kind == Completed.reason or not (max_restarts or last.kind == _HOST_CHECK):
        return Stop()
    if last.hopeless:
        return Stop(last.hopeless)
    if restart_on != "failure" and last.kind not in _allowed(restart_on) and is_counted:
        return Stop(f"--restart-on {restart_on} does not include this")
    used, best, progressed = 0, None, False
    for end in history:
        progressed = end.saved_step is not None and (best is None or end.saved_step > best)
        if progressed:
            used, best = 0, end.saved_step
        used += end.kind not in _NOT_COUNTED
    before = history[-2] if len(history) > 1 else None
    if before is not None and last.failure is not None and last.failure == before.failure and not progressed:
        return Stop(f"it {last.failure} twice in a row, and saved no step in between: that is a bug, not bad luck")
    if used > max_restarts:
        restarts = "the one restart is" if max_restarts == 1 else f"all {max_restarts} restarts are"
        return Stop(f"{restarts} used up, and no step has been saved since")
    return Restart(first_attempt + len(history) - 1 + max_restarts - used + 1)


def summarize_end(outcome: JobOutcome, *, has_run_before: bool) -> AttemptEnd:
    """Summarize how an attempt ended; `has_run_before`: the program has run in an earlier attempt."""
    return replace(_summarize_end(outcome, has_run_before=has_run_before), returns=outcome.started_again)


def _summarize_end(outcome: JobOutcome, *, has_run_before: bool) -> AttemptEnd:
    saved = outcome.saved_step
    if outcome.waits_for_pods:
        return AttemptEnd(_DRAINED, saved_step=saved)
    if outcome.head_leaves:
        return AttemptEnd(_DRAINED, hopeless=_HEAD_LEAVES, saved_step=saved)

    def over(why_hopeless: str = "") -> AttemptEnd:
        return AttemptEnd(outcome.end.reason, hopeless=why_hopeless, saved_step=saved)

    match outcome.end:
        case Completed() | Grown():
            return over()
        case OutOfStep():
            return over("the program has run to its end")
        case Refused() | Unsupported():
            return over("the job would be refused again")
        case TimedOut():
            return over("--timeout counts over all attempts")
        case EndedBySignal() | Preempted():
            return over("someone asked to stop the job")
        case Stalled():
            end = AttemptEnd(_STALL, saved_step=saved)
        case EarlyExit():
            end = AttemptEnd(_EXCEPTION, AlikeFailure(), saved_step=saved)
        case Diverged():
            place = f" at {outcome.divergences[0].title}"
            end = AttemptEnd(_EXCEPTION, AlikeFailure(place=place), saved_step=saved)
        case RankFailed():
            if not find_culprits(outcome.workers):
                return over("no rank shows why it failed")
            end = _summarize_failure(outcome)
        case HostCheckFailed():
            end = AttemptEnd(_HOST_CHECK, saved_step=saved)
        case HostsNotBack():
            end = AttemptEnd(_NOT_BACK, saved_step=saved)
        case Unavailable():
            if not (has_run_before or outcome.run_at is not None or isinstance(outcome.end, LostAtStart)):
                return over("the job could not be started at all")
            end = AttemptEnd(_LOST, saved_step=saved)
    if outcome.stop_requested:
        return AttemptEnd(end.kind, hopeless="someone asked to stop the job meanwhile", saved_step=saved)
    return end


def stall_patience(history: Sequence[AttemptEnd]) -> int:
    """Return by how much longer than at first to wait for progress: 2 or 4 if the last attempts were ended for a stall.

    It may have been none: then the job gets further this time.
    """
    stalled = sum(1 for _ in takewhile(lambda end: end.kind == _STALL, reversed(history)))
    return 1 << min(stalled, 2)


def lost_with_head(saved_step: int | None, *, left: bool = False) -> AttemptEnd:
    """What counts of the end of an attempt whose head was lost, so that nobody has summarized it, or has `left`."""
    return AttemptEnd(_DRAINED if left else _LOST, saved_step=saved_step)


def _allowed(restart_on: str) -> tuple[str, ...]:
    return {"lost": (_LOST,), "stall": (_STALL,)}[restart_on]


def _summarize_failure(outcome: JobOutcome) -> AttemptEnd:
    first, saved = find_first_failure(outcome.workers), outcome.saved_step
    error = first.failure.error if first.failure is not None else ""
    if error in _HOPELESS_ERRORS:
        return AttemptEnd(_EXCEPTION, hopeless=f"a {error} does not go away by itself", saved_step=saved)
    if exit_code(outcome) == EXIT_PREEMPTED:
        text = f"exit {EXIT_PREEMPTED} asks for a new job, later"
        return AttemptEnd(_EXCEPTION, hopeless=text, saved_step=saved)
    kind = _LOST if first.failure is None and (first.lost_reason or (first.status or 0) < 0) else _EXCEPTION
    consequence = culpability(first) is Culpability.CONSEQUENCE  # of an unknown cause: not the program's fault
    return AttemptEnd(kind, None if consequence else _find_alike(first), saved_step=saved)


def _find_alike(worker: WorkerOutcome) -> AlikeFailure | None:
    failure = worker.failure
    if failure is not None:
        places = _PLACE.findall(failure.traceback)
        place = f" at {places[-1][0]}:{places[-1][1]}" if places else ""
        stage = "" if failure.stage is WorkerStage.PROGRAM else str(failure.stage)
        status = failure.status if failure.error == "SystemExit" else 0
        return AlikeFailure(failure.error, status, place, stage)
    return None if worker.lost_reason or worker.status is None else AlikeFailure(status=worker.status)
