"""Faults that were ordered, in words. Pure."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jaxrun.planning.chaos import CUT, KILL, PAUSE
from jaxrun.ranks import locate
from jaxrun.verdict.ends import Dealt, End
from jaxrun.wording import seconds, signal_name

# What became of a rank, after `is` or `was`.
IS = {
    KILL: f"killed by {signal_name(signal.SIGKILL)}",
    PAUSE: f"stopped by {signal_name(signal.SIGSTOP)}",
    CUT: "cut off from the network",
}


def killing(end: End) -> Dealt | None:
    """The order that has killed it."""
    if end.status != -signal.SIGKILL or end.stopped:
        return None
    return next((dealt for dealt in end.dealt if dealt.kind == KILL), None)


def harm(end: End) -> Dealt | None:
    """The order that has left it alive, but may have cost the others, and then itself, their connections."""
    return next((dealt for dealt in end.dealt if dealt.kind in (PAUSE, CUT)), None)


def first_harm(ends: Sequence[End]) -> Dealt | None:
    """The first of those orders."""
    harms = [dealt for end in ends if (dealt := harm(end))]
    return min(harms, key=lambda dealt: dealt.time, default=None)


def told(ends: Sequence[End], hosts: Mapping[int, str], run_at: float | None, *, but: str) -> Iterator[str]:
    """One line for each order that was carried out, save those that the text `but` tells."""
    orders: dict[Dealt, list[int]] = defaultdict(list)
    for end in ends:
        for dealt in end.dealt:
            orders[dealt].append(end.rank)
    for dealt, ranks in sorted(orders.items(), key=lambda item: (item[0].time, item[1])):
        if ordered(dealt) not in but:
            yield f"{locate(ranks, hosts)} {was(dealt, run_at, many=len(ranks) > 1)}."


def was(dealt: Dealt, run_at: float | None, *, many: bool = False) -> str:
    """`was cut off from the network, as --chaos asked, 1.5 s into the run`."""
    moment = f"{seconds(dealt.time - run_at)} into the run" if run_at is not None else "before the program ran"
    return f"{'were' if many else 'was'} {ordered(dealt)}, {moment}"


def ordered(dealt: Dealt) -> str:
    """`cut off from the network, as --chaos asked`."""
    return f"{IS[dealt.kind]}, as {dealt.by} asked"
