"""Overviews of jobs that are made up, for `jaxrun top`."""

from jaxrun.analysis.diagnosis.snapshot import Overview
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.snapshot_messages import RankVitals

NOW = 1000.0
FUTEX = "futex_wait_queue"


def flight(made, *, group, pending_s=None, ago_s=0.1, compiling=None):
    """A rank that has made so many calls, the last one so long ago; with `pending_s` it is in the next one."""
    return Flight(
        level=EVERY_CALL,
        compiling=compiling,
        pending=PendingCall(group, made + 1, 1, 1, NOW - pending_s) if pending_s is not None else None,
        calls=(DispatchedCall(NOW - ago_s, group, made, 1, 1, 1),) if made else (),
        call_counts={group: made},
        programs={1: ProgramInfo("train_step", "k", "c")},
    )


def vitals(time=NOW, cpu_s=10.0, memory=2**28, wait="", gpu=(-1.0, -1)):
    return RankVitals(time, cpu_s, memory, wait, *gpu)


def overview(flights, *, hosts=None, waits=None, time=NOW, cpu_s=10.0, **more):
    """A job with these flights, by rank; `waits` is what the kernel says of some."""
    known = {rank: vitals(time, cpu_s, wait=(waits or {}).get(rank, FUTEX)) for rank in flights}
    hosts = hosts or dict.fromkeys(flights, "h1")
    return Overview(time, "running", hosts, tuple(flights), flights, **{"vitals": known, **more})
