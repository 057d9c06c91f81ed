"""Decides the exit code of `jaxrun` from how the job ended.

0          every program ended with status 0
n          the culprit's own status, or 128 + its signal; 1 if it has no status
1          the ranks were found out of step, unless --lockstep record only reports that
128 + n    the launcher was ended by signal n, and no rank failed while it ended
2          the platform of the hosts does not allow what was asked for
65         refused: the processes are not the job that was asked for
69         something could not be started or reached, or a host was lost
75         preempted: the programs ended with status 0 after SIGTERM, and may be resumed
124        --timeout, --stall-timeout, or ranks that wait for one that has finished
"""

from __future__ import annotations

from jaxrun.analysis.diagnosis.job_end import (
    Completed,
    Diverged,
    EarlyExit,
    EndedBySignal,
    Grown,
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
from jaxrun.analysis.diagnosis.root_cause import find_culprits, find_failed_endings, find_first_failure
from jaxrun.errors import (
    EXIT_NOT_UNIFORM,
    EXIT_PREEMPTED,
    EXIT_SIGNAL_BASE,
    EXIT_TIMEOUT,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from jaxrun.protocol.worker_messages import WorkerStage

_EXIT_FAILED = 1


def exit_code(outcome: JobOutcome) -> int:
    match outcome.end:
        case Completed():
            return 0
        case RankFailed():
            return _of_worker(find_first_failure(outcome.workers)) if find_culprits(outcome.workers) else _EXIT_FAILED
        case EndedBySignal(signum=signum):
            failed = find_failed_endings(outcome.workers, signum)
            return _of_worker(find_first_failure(failed)) if failed else EXIT_SIGNAL_BASE + signum
        case Diverged() | OutOfStep():
            return _EXIT_FAILED
        case Refused():
            return EXIT_NOT_UNIFORM
        case Unsupported():
            return EXIT_USAGE
        case Unavailable():
            return EXIT_UNAVAILABLE
        case TimedOut() | Stalled() | EarlyExit():
            return EXIT_TIMEOUT
        case Preempted() | Grown():  # grown: if no attempt follows
            return EXIT_PREEMPTED


def _of_worker(worker: WorkerOutcome) -> int:
    if worker.failure is None and worker.lost_reason:
        return EXIT_UNAVAILABLE
    if worker.failure is not None and worker.failure.stage != WorkerStage.PROGRAM:
        return EXIT_UNAVAILABLE
    status = worker.failure.status if worker.failure is not None else worker.status
    if not status:
        return _EXIT_FAILED
    return status if status > 0 else EXIT_SIGNAL_BASE - status
