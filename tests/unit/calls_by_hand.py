"""Calls and flights by hand: of a job of three ranks, as tests of the head make them, and of ranks that come late."""

import random

from msgspec.structs import replace

from jaxrun.protocol.flight import CallTiming, DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.worker_messages import Call

ALL = "0-2"


def call(
    rank, number=1, *, key="k", code="c", group=ALL, waits=True, program=7, name="jit(step)", place="train.py:9 main"
):
    return Call(rank, 0.0, group, number, program, key, code, name, place, waits)


def lowered(rank, number=1, *, code="c", waits=False):
    """The same, before its program is compiled."""
    return replace(call(rank, number, key="", code=code, waits=waits), is_compiled=False)


def flight(*keys, code="c", group=ALL, pending=None, level=EVERY_CALL, site=1):
    """The flight of a rank that called programs with these keys."""
    programs = {number: ProgramInfo(f"jit({key})", key, code) for number, key in enumerate(dict.fromkeys(keys), 1)}
    number_of = {program.key: number for number, program in programs.items()}
    chain, calls = 0, []
    for number, key in enumerate(keys, 1):
        chain = hash((chain, key, code))
        calls.append(DispatchedCall(float(number), group, number, chain, number_of[key], site))
    counts = {group: len(keys)} if keys else {}
    return Flight(
        level=level,
        calls=tuple(calls),
        call_counts=counts,
        programs=programs,
        sites={1: ("/home/me/train.py:9 main",)},
        pending=pending,
    )


def flight_after(number, group="0-3", *, time=100.0, entered_at=None, compiling=None, name="jit(step)"):
    """The flight of a rank that has made so many calls, the last at `time`; it has entered the next at `entered_at`."""
    return Flight(
        EVERY_CALL,
        compiling=compiling,
        pending=None if entered_at is None else PendingCall(group, number + 1, 1, 1, entered_at),
        calls=(DispatchedCall(time, group, number, 1, 1, 1),) if number else (),
        call_counts={group: number},
        programs={1: ProgramInfo(name, "k", "c")},
        sites={1: ("/home/me/train.py:88 step",)},
    )


def sent(job, kind):
    """[(time in ms, ranks, message)] of this kind."""
    return [(round(time * 1000), ranks, message) for time, ranks, message in job.sent if isinstance(message, kind)]


# ---- ranks that enter and leave calls at given times

SITES = {7: ("/job/train.py:88 main",), 8: ("/job/train.py:95 log",)}


def blocking(work, size, calls, *, sync_s=0.0002, start=1000.0, site=lambda number: 7, wake_s=lambda rank: 0.0):
    """By rank: ranks work `work(rank, number)` seconds before each call, in which they wait for each other.

    `wake_s`: by how much later a rank leaves the calls.
    """
    left = dict.fromkeys(range(size), start)
    timings = {rank: [] for rank in range(size)}
    for number in range(1, calls + 1):
        entered = {rank: left[rank] + work(rank, number) for rank in left}
        end = max(entered.values()) + sync_s
        for rank in left:
            left[rank] = end + wake_s(rank)
            timings[rank].append(CallTiming(_group(size), number, entered[rank], left[rank], site(number)))
    return _flights(timings)


def asynchronous(work, size, calls, *, start=1000.0, every=1):
    """The same of calls that return at once; every so many calls ranks wait for the result, in no call."""
    free = dict.fromkeys(range(size), start)
    timings = {rank: [] for rank in range(size)}
    done = start
    for number in range(1, calls + 1):
        entered = {rank: free[rank] + work(rank, number) for rank in free}
        done = max(done, *entered.values()) + 0.0005
        for rank in free:
            free[rank] = done if number % every == 0 else entered[rank] + 0.0001
            timings[rank].append(CallTiming(_group(size), number, entered[rank], entered[rank] + 0.0001, 7))
    return _flights(timings)


def noisy(seed, base_s, spread_s, slow=None, factor=1.0):
    """A `work`: `base_s`, by `factor` more for the rank `slow`, and now and then something more for any."""
    chance = random.Random(seed)
    return lambda rank, number: base_s * (factor if rank == slow else 1.0) + chance.expovariate(1 / spread_s)


def window(flights, since, until):
    """Only the calls of these numbers."""
    return {
        rank: Flight(EVERY_CALL, timings=tuple(t for t in flight.timings if since <= t.number <= until), sites=SITES)
        for rank, flight in flights.items()
    }


def shifted(flight, seconds):
    """The flight of a rank whose clock is ahead."""
    timings = tuple(replace(t, entered=t.entered + seconds, dispatched=t.dispatched + seconds) for t in flight.timings)
    return Flight(EVERY_CALL, timings=timings, call_counts=flight.call_counts, sites=SITES)


def _group(size):
    return f"0-{size - 1}"


def _flights(timings):
    return {
        rank: Flight(EVERY_CALL, timings=tuple(of), call_counts={_group(len(timings)): len(of)}, sites=SITES)
        for rank, of in timings.items()
    }
