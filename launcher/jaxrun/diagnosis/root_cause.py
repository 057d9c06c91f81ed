"""Which ranks are to blame? Their ends are weighed, by what kind they are before by when they came.

    OWN          an exception of its own, a status, a signal that we did not send; a host that was lost
    UNCLEAR      an abort or a status 0 that nothing explains; a broken connection after a thread had died
    CONSEQUENCE  a text that only another's end brings about (collateral.py), or our own kill
    FINE         its program had ended well, or it still runs

The earliest end of the best kind is the culprit's, and its alone unless others failed in the very same way. Where
there is no better one than a consequence, a rank that was paused or cut off on order is the cause.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence

from jaxrun.diagnosis import consequences
from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.protocol.flight_file import DIVERGENCE_ERROR
from jaxrun.verdict import injected_faults, phrasing


class Culpability(enum.IntEnum):
    """The lower, the more of a cause."""

    OWN = 0
    UNCLEAR = 1
    CONSEQUENCE = 2
    FINE = 3


def culpability(end: WorkerOutcome) -> Culpability:
    """What kind of end this was."""
    if end.failure is not None:
        return _kind_of_words(end)
    if end.lost_reason:
        return Culpability.CONSEQUENCE if end.killed_by_launcher else Culpability.OWN
    if end.status is None or (end.finished and (end.killed_by_launcher or end.status == 0)):
        return Culpability.FINE
    if end.killed_by_launcher:
        return Culpability.CONSEQUENCE
    if (end.status >= 0 or end.status == -signal.SIGABRT) and phrasing.describe_collateral(end):
        return _consequence(end)
    unexplained = end.status in (0, -signal.SIGABRT) and not phrasing.own_thread_failures(end)
    return Culpability.UNCLEAR if unexplained else Culpability.OWN


def is_certain(ends: Sequence[WorkerOutcome]) -> bool:
    """Whether one of the ends is a cause beyond doubt, so that there is no better one to wait for."""
    return any(
        culpability(end) is Culpability.OWN
        or (injected_faults.harmful_fault(end) and culpability(end) is not Culpability.FINE)
        for end in ends
    )


def find_culprits(ends: Sequence[WorkerOutcome]) -> list[WorkerOutcome]:
    """The ends that are to blame, lowest rank first; empty if none is a failure."""
    first = find_first_failure(ends)
    best = culpability(first)
    if best is Culpability.FINE:
        return []
    harm = injected_faults.first_harmful_fault(ends) if best is not Culpability.OWN else None
    if harm is not None:
        return [end for end in ends if harm in end.injected_faults]
    if best is Culpability.CONSEQUENCE:
        return [first]
    return [end for end in ends if culpability(end) is best and _failure_signature(end) == _failure_signature(first)]


def find_first_failure(ends: Sequence[WorkerOutcome]) -> WorkerOutcome:
    """The earliest end of the best kind."""
    return min(ends, key=lambda end: (culpability(end), end.time, end.rank))


def _kind_of_words(end: WorkerOutcome) -> Culpability:
    assert end.failure is not None
    if end.failure.error != "SystemExit":
        blame = consequences.classify_error(end.failure.message, end.failure.traceback)
        if blame is not consequences.ErrorOrigin.OTHER:
            return Culpability.OWN if blame is consequences.ErrorOrigin.OWN else Culpability.UNCLEAR
    elif not phrasing.describe_collateral(end):
        return Culpability.OWN
    return _consequence(end)


def _consequence(end: WorkerOutcome) -> Culpability:
    return Culpability.UNCLEAR if phrasing.own_thread_failures(end) else Culpability.CONSEQUENCE


def _failure_signature(end: WorkerOutcome) -> tuple[object, ...]:
    if end.failure is not None and end.failure.error == DIVERGENCE_ERROR:
        return end.failure.error, end.failure.message  # each rank raises it at a line of its own
    if end.failure is not None:
        return end.failure.error, end.failure.status, end.failure.message, end.failure.traceback
    if end.lost_reason:
        return ("lost", end.lost_reason)
    return (
        end.status,
        end.finished,
        injected_faults.killing_fault(end),
        tuple((thread.error, thread.traceback) for thread in end.thread_failures),
    )
