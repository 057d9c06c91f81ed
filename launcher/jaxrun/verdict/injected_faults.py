"""Faults that were ordered, in words. Pure."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jaxrun.diagnosis.worker_outcome import InjectedFault, WorkerOutcome
from jaxrun.job.fault_spec import CUT, KILL, PAUSE
from jaxrun.text import format_ranks_on_hosts, format_seconds, format_signal

# What became of a rank, after `is` or `was`.
PARTICIPLES = {
    KILL: f"killed by {format_signal(signal.SIGKILL)}",
    PAUSE: f"stopped by {format_signal(signal.SIGSTOP)}",
    CUT: "cut off from the network",
}


def killing_fault(end: WorkerOutcome) -> InjectedFault | None:
    """The order that has killed it."""
    if end.status != -signal.SIGKILL or end.killed_by_launcher:
        return None
    return next((dealt for dealt in end.injected_faults if dealt.kind == KILL), None)


def harmful_fault(end: WorkerOutcome) -> InjectedFault | None:
    """The order that has left it alive, but may have cost the others, and then itself, their connections."""
    return next((dealt for dealt in end.injected_faults if dealt.kind in (PAUSE, CUT)), None)


def first_harmful_fault(ends: Sequence[WorkerOutcome]) -> InjectedFault | None:
    """The first of those orders."""
    harms = [dealt for end in ends if (dealt := harmful_fault(end))]
    return min(harms, key=lambda dealt: dealt.time, default=None)


def describe_injected_faults(
    ends: Sequence[WorkerOutcome], hosts: Mapping[int, str], run_at: float | None, *, but: str
) -> Iterator[str]:
    """One line for each order that was carried out, save those that the text `but` tells."""
    orders: dict[InjectedFault, list[int]] = defaultdict(list)
    for end in ends:
        for dealt in end.injected_faults:
            orders[dealt].append(end.rank)
    for dealt, ranks in sorted(orders.items(), key=lambda item: (item[0].time, item[1])):
        if describe_fault(dealt) not in but:
            yield f"{format_ranks_on_hosts(ranks, hosts)} {describe_with_time(dealt, run_at, many=len(ranks) > 1)}."


def describe_with_time(dealt: InjectedFault, run_at: float | None, *, many: bool = False) -> str:
    """`was cut off from the network, as --chaos asked, 1.5 s into the run`."""
    moment = f"{format_seconds(dealt.time - run_at)} into the run" if run_at is not None else "before the program ran"
    return f"{'were' if many else 'was'} {describe_fault(dealt)}, {moment}"


def describe_fault(dealt: InjectedFault) -> str:
    """`cut off from the network, as --chaos asked`."""
    return f"{PARTICIPLES[dealt.kind]}, as {dealt.by} asked"
