"""Says in one line who waits for whom, while a job makes no progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.verdict.deadlocks import explain_deadlock
from jaxrun.analysis.verdict.stack_text import Place, group_by_place
from jaxrun.text import agree, format_ranks_on_hosts

_MAX_GROUPS = 3


def format_stall_notice(snapshot: Snapshot, idle_s: float, run_dir: Path | None) -> str:
    """`no progress for 30 s: rank 1 sleeps at train.py:9 main, and rank 0 waits for it in JAX (…) · more: …`.

    `run_dir` as people may type it; None where there is none.
    """
    explanations = explain_deadlock(snapshot)
    what = explanations[0].what if explanations else _list_places(snapshot)
    more = f"jaxrun stacks {run_dir}" if run_dir else "Ctrl-\\ (SIGQUIT)"
    return f"no progress for {idle_s:.0f} s: {what} · more: {more}"


def _list_places(snapshot: Snapshot) -> str:
    """`ranks 0-2 are at train.py:88 step, in JAX: block_until_ready; rank 3 is at data.py:31 load`."""
    groups = group_by_place(snapshot.dumps, snapshot.waits)
    shown = [_describe(ranks, place, snapshot) for place, ranks in groups[:_MAX_GROUPS]]
    left = [f"{len(groups) - _MAX_GROUPS} more groups elsewhere"] if len(groups) > _MAX_GROUPS else []
    return "; ".join([*shown, *left])


def _describe(ranks: Sequence[int], place: Place, snapshot: Snapshot) -> str:
    who = format_ranks_on_hosts(ranks, snapshot.hosts)
    if place.silent:
        return f"{who} {'gives' if len(ranks) == 1 else 'give'} {place.format()}"
    return f"{who} {agree('is', len(ranks))} at {place.format(', ')}"
