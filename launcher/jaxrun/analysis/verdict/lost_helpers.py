"""Describes which threads and processes of a rank have ended while it waits for data, and nothing beyond that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from jaxrun.analysis.diagnosis.error_choice import choose_error
from jaxrun.analysis.diagnosis.helpers import LostPoolWorker, LostThread
from jaxrun.analysis.diagnosis.rank_state import RankState
from jaxrun.analysis.verdict.error_text import format_choice
from jaxrun.text import format_status

_First = TypeVar("_First")
_Second = TypeVar("_Second")
_MAX_SHOWN = 2  # of each kind


def describe_lost(states: Sequence[RankState], *, pid: bool = True, now: float = 0.0) -> str:
    """Write `its child process 4242 was killed by SIGKILL (9)`, for several ranks `their threads Loader ended with …`.

    Empty if nothing has ended. Without `pid` and the time `now`, the text is the same for ranks that lost the same.
    """
    several = len(states) > 1
    its = "their" if several else "its"
    threads = dict.fromkeys((one.name, _describe_error(one)) for state in states for one in state.helpers.lost_threads)
    children = dict.fromkeys((one.pid, one.status or 0) for state in states for one in state.helpers.dead_children)
    parts = [f"{its} thread{'s' * several} {name} ended with {error}" for name, error in _last(threads)]
    by_status: dict[int, list[int]] = {}
    for number, status in children:
        by_status.setdefault(status, []).append(number)
    parts += [_describe_children(its, status, numbers, pid) for status, numbers in _last(by_status.items())]
    kept = dict.fromkeys(format_choice(state.kept) for state in states if state.kept is not None)
    parts += [f"{its} future holds {error}, for which nobody has asked" for error in list(kept)[:1]]
    if workers := [worker for state in states for worker in state.helpers.lost_workers]:
        parts.append(describe_lost_worker(its, workers, now, pid=pid and not several))
    if not parts and any(state.is_alone for state in states):
        return f"{'they have' if several else 'it has'} no other Python thread and no child process"
    return " and ".join(parts)


def _describe_error(thread: LostThread) -> str:
    choice = choose_error(thread.chain)
    return format_choice(choice) if choice is not None else thread.error


def _describe_children(its: str, status: int, numbers: Sequence[int], pid: bool) -> str:
    many = len(numbers) > 1
    known = f" {', '.join(map(str, numbers))}" if pid else ""
    did = format_status(status, "were " if many else "was ")
    return f"{its} child process{'es' * many}{known} {did}"


def describe_lost_worker(its: str, workers: Sequence[LostPoolWorker], now: float = 0.0, *, pid: bool = True) -> str:
    """Write `a worker of its pool (process 4242) was killed by SIGKILL (9) 9 s ago`, about the last one."""
    last = max(workers, key=lambda worker: worker.time)
    did = format_status(last.status, "was ")
    known = f" (process {last.pid})" if pid and last.pid else ""
    return f"a worker of {its} pool{known} {did}{f' {max(0.0, now - last.time):.0f} s ago' if now else ''}"


def _last(found: Iterable[tuple[_First, _Second]]) -> list[tuple[_First, _Second]]:
    return list(found)[-_MAX_SHOWN:]
