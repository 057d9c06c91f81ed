"""Finds the workers that caused the failure of a job.

Each worker's outcome falls into one of these classes:

    OWN          its own exception or exit status, a signal that the launcher did not send, or a lost host
    UNCLEAR      an unexplained abort or status 0; a broken connection after one of its threads had died; a call in
                 which JAX has found the ranks at different points, perhaps because of another rank's error
    SURVIVED     any failure without which the others had gone on (--keep-survivors)
    CONSEQUENCE  an error that only another worker's end can cause (consequences.py), or killed by the launcher
    FINE         its program had ended with status 0, or the worker still runs

The earliest outcome of the first class that occurs is the root cause. Its rank is the only culprit unless others failed
in exactly the same way. If there are only unclear outcomes and consequences, a rank that was paused by an injected
fault is the culprit.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence

from jaxrun.analysis.diagnosis.consequences import ErrorOrigin, Fate, classify_error, find_consequence
from jaxrun.analysis.diagnosis.error_choice import choose_error
from jaxrun.analysis.diagnosis.job_outcome import InjectedFault, WorkerOutcome
from jaxrun.protocol.flight_file import DIVERGENCE_ERROR
from jaxrun.protocol.worker_messages import Failed, ThreadFailed, WorkerStage

_OTHER_CALL = "sync_global_devices name mismatch"


class Culpability(enum.IntEnum):
    """How likely a worker is the root cause; lower is likelier."""

    OWN = 0
    UNCLEAR = 1
    SURVIVED = 2
    CONSEQUENCE = 3
    FINE = 4


def culpability(worker: WorkerOutcome) -> Culpability:
    if worker.was_survived:
        return Culpability.SURVIVED
    if worker.failure is not None:
        return _culpability_of_failure(worker)
    if worker.lost_reason:
        return Culpability.CONSEQUENCE if worker.killed_by_launcher else Culpability.OWN
    if worker.status is None or (worker.finished and (worker.killed_by_launcher or worker.status == 0)):
        return Culpability.FINE
    if worker.killed_by_launcher:
        return Culpability.CONSEQUENCE
    if (worker.status >= 0 or worker.status == -signal.SIGABRT) and collateral(worker):
        return _consequence_unless_thread_died(worker)
    is_unexplained = worker.status in (0, -signal.SIGABRT) and not own_thread_failures(worker)
    return Culpability.UNCLEAR if is_unexplained else Culpability.OWN


def is_certain(workers: Sequence[WorkerOutcome]) -> bool:
    """Whether one of the outcomes is certainly the root cause, so that waiting for a better one is useless."""
    for worker in workers:
        kind = culpability(worker)
        if kind is Culpability.OWN or (worker.disruptive_fault and kind is not Culpability.FINE):
            return True
    return False


def find_culprits(workers: Sequence[WorkerOutcome]) -> list[WorkerOutcome]:
    """Return the workers that caused the failure, lowest rank first; empty if no worker has failed."""
    first = find_first_failure(workers)
    kind = culpability(first)
    if kind is Culpability.FINE:
        return []
    fault = _first_disruptive_fault(workers) if kind is not Culpability.OWN else None
    if fault is not None:
        return [worker for worker in workers if fault in worker.injected_faults]
    if kind is Culpability.CONSEQUENCE:
        return [first]
    signature = _failure_signature(first)
    return [w for w in workers if culpability(w) is kind and _failure_signature(w) == signature]


def find_first_failure(workers: Sequence[WorkerOutcome]) -> WorkerOutcome:
    """Return the earliest outcome of the most culpable class."""
    return min(workers, key=lambda worker: (culpability(worker), worker.time, worker.rank))


# A BaseExceptionGroup has an interrupt in it: other errors would be an ExceptionGroup. BdbQuit is what pdb makes of a
# Ctrl-C at its prompt.
_INTERRUPTS = ("KeyboardInterrupt", "BaseExceptionGroup", "BdbQuit")


def find_failed_endings(workers: Sequence[WorkerOutcome], signum: int) -> list[WorkerOutcome]:
    """Return the workers that failed for a reason of their own when they were to end because of this signal.

    An exit status of the program's choice does not count, and neither does the interrupt itself.
    """
    return [worker for worker in workers if culpability(worker) is Culpability.OWN and _failed_to_end(worker, signum)]


def _failed_to_end(worker: WorkerOutcome, signum: int) -> bool:
    failure = worker.failure
    if failure is None:
        # Whoever asks for the end may also kill what is late: a scheduler, or mpirun.
        asked = {
            -signal.SIGTERM,
            -signal.SIGINT,
            -signal.SIGHUP,
            -signum,
            *(() if worker.out_of_memory else (-signal.SIGKILL,)),
        }
        return worker.status is not None and worker.status < 0 and worker.status not in asked
    is_interrupt = failure.error in _INTERRUPTS or "KeyboardInterrupt" in failure.message
    return failure.stage == WorkerStage.PROGRAM and failure.error != "SystemExit" and not is_interrupt


def collateral(worker: WorkerOutcome) -> Fate | None:
    """Return what another worker's end did to this one, by its exception or stderr; None if they do not show it."""
    failure = worker.failure
    if failure is None or failure.error == "SystemExit":
        handled = (
            [find_consequence(f"{error.error}: {error.message}") for error in failure.chain[:1]] if failure else []
        )
        return next(filter(None, handled), None) or find_consequence(f"{worker.stderr_tail}\n{worker.crash_dump}")
    if classify_error(failure.message, failure.traceback) is ErrorOrigin.OTHER:
        return find_consequence(f"{failure.message}\n{failure.traceback}")
    return None


def own_thread_failures(worker: WorkerOutcome) -> tuple[ThreadFailed, ...]:
    """Return the threads of the worker's program that died of an error of their own."""
    return tuple(t for t in worker.thread_failures if classify_error("", t.traceback) is ErrorOrigin.OWN)


def _culpability_of_failure(worker: WorkerOutcome) -> Culpability:
    assert worker.failure is not None
    if worker.failure.error == "SystemExit":
        return _consequence_unless_thread_died(worker) if collateral(worker) else Culpability.OWN
    if _shows_other_call(worker.failure):
        return Culpability.UNCLEAR
    match classify_error(worker.failure.message, worker.failure.traceback):
        case ErrorOrigin.OWN:
            return Culpability.OWN
        case ErrorOrigin.UNCLEAR:
            return Culpability.UNCLEAR
    return _consequence_unless_thread_died(worker)


def _shows_other_call(failure: Failed) -> bool:
    """Whether the cause of a failure is that another rank has called sync_global_devices with another name."""
    choice = choose_error(failure.chain)
    message = choice.chosen.message if choice is not None else failure.message
    return message.startswith(_OTHER_CALL)


def _consequence_unless_thread_died(worker: WorkerOutcome) -> Culpability:
    return Culpability.UNCLEAR if own_thread_failures(worker) else Culpability.CONSEQUENCE


def _first_disruptive_fault(workers: Sequence[WorkerOutcome]) -> InjectedFault | None:
    faults = [worker.disruptive_fault for worker in workers if worker.disruptive_fault]
    return min(faults, key=lambda fault: fault.time, default=None)


def _failure_signature(worker: WorkerOutcome) -> tuple[object, ...]:
    """Return a value that is equal for workers that failed in the same way."""
    failure = worker.failure
    if failure is not None and failure.error == DIVERGENCE_ERROR:
        return failure.error, failure.message  # each rank raises it at a line of its own
    if failure is not None:
        return failure.error, failure.status, failure.message, failure.traceback
    if worker.lost_reason:
        return ("lost", worker.lost_reason)
    threads = tuple((thread.error, thread.traceback) for thread in worker.thread_failures)
    return worker.status, worker.finished, worker.deadly_fault, threads
