"""Describes which threads and processes of a rank have ended while it waits for data, and nothing beyond that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from jaxrun.analysis.diagnosis.rank_state import RankState
from jaxrun.text import format_status

_First = TypeVar("_First")
_Second = TypeVar("_Second")
_MAX_SHOWN = 2  # of each kind


def describe_lost(states: Sequence[RankState], *, pid: bool = True) -> str:
    """Write `its child process 4242 was killed by SIGKILL (9)`, for several ranks `their threads Loader ended with …`.

    Empty if nothing has ended. Without `pid`, the text is the same for ranks that have lost the same.
    """
    several = len(states) > 1
    its = "their" if several else "its"
    threads = dict.fromkeys((one.name, one.error) for state in states for one in state.helpers.lost_threads)
    children = dict.fromkeys((one.pid, one.status or 0) for state in states for one in state.helpers.dead_children)
    parts = [f"{its} thread{'s' * several} {name} ended with {error}" for name, error in _last(threads)]
    by_status: dict[int, list[int]] = {}
    for number, status in children:
        by_status.setdefault(status, []).append(number)
    parts += [_describe_children(its, status, numbers, pid) for status, numbers in _last(by_status.items())]
    if not parts and any(state.is_alone for state in states):
        return f"{'they have' if several else 'it has'} no other Python thread and no child process"
    return " and ".join(parts)


def _describe_children(its: str, status: int, numbers: Sequence[int], pid: bool) -> str:
    many = len(numbers) > 1
    known = f" {', '.join(map(str, numbers))}" if pid else ""
    did = format_status(status, "were " if many else "was ")
    return f"{its} child process{'es' * many}{known} {did}"


def _last(found: Iterable[tuple[_First, _Second]]) -> list[tuple[_First, _Second]]:
    return list(found)[-_MAX_SHOWN:]
