"""A flight travels as JSON values within a message."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.protocol.flight import CallTiming, DispatchedCall, Flight, PendingCall, ProgramInfo, parse_group
from jaxrun.protocol.flight_file import EVERY_CALL, LEVELS
from jaxrun.text import format_ranges

_INTS = st.integers(0, 2**64 - 1)
_TIMES = st.floats(0, 2e9)
_TEXTS = st.text(max_size=12)
_GROUPS = ("0-3", "0,2")
_PROGRAMS = st.builds(ProgramInfo, _TEXTS, _TEXTS, _TEXTS, _TEXTS)
_MICROSECONDS = st.integers(0, 2**51)


def _timing(group: str, number: int, entered: int, dispatched: int, site: int) -> CallTiming:
    return CallTiming(group, number, entered / 1e6, dispatched / 1e6, site)


_FLIGHTS = st.builds(
    Flight,
    level=st.sampled_from(LEVELS),
    strict=st.booleans(),
    compiling=st.none() | st.tuples(_TEXTS, _TIMES),
    pending=st.none() | st.builds(PendingCall, st.sampled_from(_GROUPS), _INTS, _INTS, _INTS, _TIMES),
    calls=st.lists(
        st.builds(DispatchedCall, _TIMES, st.sampled_from(_GROUPS), _INTS, _INTS, _INTS, _INTS, st.just(0.0))
    ).map(tuple),
    timings=st.lists(st.builds(_timing, st.sampled_from(_GROUPS), _INTS, _MICROSECONDS, _MICROSECONDS, _INTS)).map(
        tuple
    ),
    entered=_TIMES,
    marks=st.dictionaries(st.sampled_from(_GROUPS), st.dictionaries(_INTS, _INTS, min_size=1)),
    call_counts=st.fixed_dictionaries({group: _INTS for group in _GROUPS}),
    programs=st.dictionaries(_INTS, _PROGRAMS),
    sites=st.dictionaries(_INTS, st.lists(_TEXTS).map(tuple)),
    unknown_programs=st.integers(0, 9),
    trouble=_TEXTS,
)


@settings(max_examples=50)
@given(_FLIGHTS)
def test_a_flight_comes_back_as_it_was_sent(flight: Flight) -> None:
    assert Flight.from_content(json.loads(json.dumps(flight.to_content()))) == flight


def test_no_content_means_no_recorder() -> None:
    assert Flight.from_content({}) == Flight()
    assert not Flight().complete


_MALFORMED = """[] 7 {"level":"many"} {"level":null} {"level":Infinity} {"calls":[[1,2]]} {"calls":[[1.0,0,1,1,1,1]]}
{"marks":[[0,[[1,2]]]]} {"programs":[[1,["a"]]]} {"pending":["0-3",1]} {"sites":7}"""


@pytest.mark.parametrize("text", _MALFORMED.split())
def test_a_malformed_flight_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Flight.from_content(json.loads(text))


def test_a_brief_of_sixteen_calls_and_the_times_of_more_is_short() -> None:
    start = 1763707578.123456
    calls = tuple(DispatchedCall(start, "0-3", number, 2**63 + number, 3, 7) for number in range(16))
    timings = tuple(CallTiming("0-3", n, start + 0.0312 * n, start + 0.0312 * n + 0.0012, 7) for n in range(128))
    flight = Flight(
        EVERY_CALL,
        calls=calls,
        timings=timings,
        call_counts={"0-3": 16},
        programs={3: ProgramInfo("jit(step)", "a" * 16, "b" * 16, "s at f:1")},
    )
    assert len(json.dumps(flight.to_content(), separators=(",", ":"))) < 1000 + 20 * len(timings)


def test_queries_of_a_flight() -> None:
    calls = tuple(
        DispatchedCall(float(number), group, number, 0, 3, 7)
        for number, group in enumerate(["0-3", "0,2", "0-3"], start=1)
    )
    pending = PendingCall("0,2", 4, 5, 8, 9.0)
    flight = Flight(
        pending=pending,
        calls=calls,
        call_counts={"0-3": 3, "0,2": 2},
        programs={3: ProgramInfo("jit(f)", "k", "c")},
        sites={7: ("/home/a b/train.py:88 Model.step", "/home/x.py:1 main"), 9: ()},
    )
    assert flight.last_call == calls[-1]
    assert flight.calls_of("0-3") == (calls[0], calls[2])
    assert flight.known_calls == (*calls, pending)
    assert (flight.last_number("0-3"), flight.last_number("0,2"), flight.last_number("1-2")) == (3, 4, 0)
    assert (flight.place(calls[0]), flight.place(pending)) == ("train.py:88 Model.step", "")
    assert (flight.program(calls[0]).name, flight.program(pending).name) == ("jit(f)", "")
    assert Flight().last_call is None


@given(st.frozensets(st.integers(0, 40), min_size=1))
def test_the_members_of_a_group_are_those_it_names(ranks: frozenset[int]) -> None:
    text = format_ranges(ranks)
    assert parse_group(text, 41) == parse_group(text.replace(", ", ","), 41) == ranks


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1--2", "1,x"])
def test_a_group_that_is_no_list_of_ranks_has_no_members(text: str) -> None:
    assert parse_group(text, 4) in (frozenset(), frozenset({1}))


_HOSTILE = ["0-300000000", "0,1-99999999999999999999", "5" * 5000, "7-" + "9" * 5000, "0-\0", "\ud800"]


@pytest.mark.parametrize("text", _HOSTILE, ids=["many", "more", "long", "long end", "NUL", "surrogate"])
def test_of_a_group_that_no_job_can_have_only_the_ranks_of_the_job_are_listed(text: str) -> None:
    tracemalloc.start()
    try:
        assert parse_group(text, 3) <= {0, 1, 2}
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_group_of_a_large_job_is_known() -> None:
    assert parse_group("0-65535", 65536) == frozenset(range(65536))
