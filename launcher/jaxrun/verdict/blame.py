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

from jaxrun.contract.flight import OUT_OF_STEP
from jaxrun.verdict import collateral, faults, sentences
from jaxrun.verdict.ends import End


class Kind(enum.IntEnum):
    """The lower, the more of a cause."""

    OWN = 0
    UNCLEAR = 1
    CONSEQUENCE = 2
    FINE = 3


def kind(end: End) -> Kind:
    """What kind of end this was."""
    if end.words is not None:
        return _kind_of_words(end)
    if end.lost:
        return Kind.CONSEQUENCE if end.stopped else Kind.OWN
    if end.status is None or (end.done and (end.stopped or end.status == 0)):
        return Kind.FINE
    if end.stopped:
        return Kind.CONSEQUENCE
    if (end.status >= 0 or end.status == -signal.SIGABRT) and sentences.collateral_fate(end):
        return _consequence(end)
    unexplained = end.status in (0, -signal.SIGABRT) and not sentences.own_threads(end)
    return Kind.UNCLEAR if unexplained else Kind.OWN


def certain(ends: Sequence[End]) -> bool:
    """Whether one of the ends is a cause beyond doubt, so that there is no better one to wait for."""
    return any(kind(end) is Kind.OWN or (faults.harm(end) and kind(end) is not Kind.FINE) for end in ends)


def blamed(ends: Sequence[End]) -> list[End]:
    """The ends that are to blame, lowest rank first; empty if none is a failure."""
    first = foremost(ends)
    best = kind(first)
    if best is Kind.FINE:
        return []
    harm = faults.first_harm(ends) if best is not Kind.OWN else None
    if harm is not None:
        return [end for end in ends if harm in end.dealt]
    if best is Kind.CONSEQUENCE:
        return [first]
    return [end for end in ends if kind(end) is best and _likeness(end) == _likeness(first)]


def foremost(ends: Sequence[End]) -> End:
    """The earliest end of the best kind."""
    return min(ends, key=lambda end: (kind(end), end.time, end.rank))


def _kind_of_words(end: End) -> Kind:
    assert end.words is not None
    if end.words.error != "SystemExit":
        blame = collateral.judge(end.words.message, end.words.traceback)
        if blame is not collateral.Blame.CONSEQUENCE:
            return Kind.OWN if blame is collateral.Blame.OWN else Kind.UNCLEAR
    elif not sentences.collateral_fate(end):
        return Kind.OWN
    return _consequence(end)


def _consequence(end: End) -> Kind:
    return Kind.UNCLEAR if sentences.own_threads(end) else Kind.CONSEQUENCE


def _likeness(end: End) -> tuple[object, ...]:
    if end.words is not None and end.words.error == OUT_OF_STEP:
        return end.words.error, end.words.message  # each rank raises it at a line of its own
    if end.words is not None:
        return end.words.error, end.words.status, end.words.message, end.words.traceback
    if end.lost:
        return ("lost", end.lost)
    return end.status, end.done, faults.killing(end), tuple((thread.error, thread.traceback) for thread in end.threads)
