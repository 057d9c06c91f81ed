"""Calls and flights of a job of three ranks, as tests of the head make them."""

from dataclasses import replace

from jaxrun.protocol.flight import DispatchedCall, Flight, ProgramInfo
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


def sent(job, kind):
    """[(time in ms, ranks, message)] of this kind."""
    return [(round(time * 1000), ranks, message) for time, ranks, message in job.sent if isinstance(message, kind)]
