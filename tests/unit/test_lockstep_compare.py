"""Recorded calls of several ranks are compared: each divergence is found, also after others, and nothing else."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxrun.analysis.lockstep.compare import Candidate, find_candidates, find_divergence, find_lags
from jaxrun.analysis.lockstep.divergence import Absence, CallGroup, divergence_of_calls, partition_by_program
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall, ProgramDetails, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL, FIRST_CALLS
from jaxrun.protocol.worker_messages import Call

ALL = "0-3"
SITES = {number: (f"/job/train.py:{80 + number} main",) for number in range(1, 9)}
PROGRAMS = {number: ProgramInfo(f"jit(f{number})", f"key{number}", f"code{number}") for number in range(1, 9)}


def recorded(history, *, group=ALL, held=16, programs=PROGRAMS, offset=0):
    """The flight of a rank that called these programs, numbered from `offset`, each from its own call site."""
    chain, calls, marks = 0, [], {}
    for number, program in enumerate(history, start=1):
        chain = hash((chain, programs[program].key, programs[program].code))
        calls.append(DispatchedCall(float(number), group, number, chain, program + offset, program))
        if number % 16 == 0:
            marks[number] = chain
    return Flight(
        EVERY_CALL,
        calls=tuple(calls[-held:]),
        marks={group: dict(list(marks.items())[-4:])} if marks else {},
        call_counts={group: len(history)},
        programs={number + offset: program for number, program in programs.items()},
        sites=SITES,
        unknown_programs=sum(not program.code for program in programs.values()),
    )


def with_pending_call(flight, number, program, group=ALL):
    return replace(flight, pending=PendingCall(group, number, program, program, 9.0))


def divergence_of(flights):
    """The divergence that the only candidate proves to be."""
    (candidate,) = find_candidates(flights)
    return find_divergence(candidate, flights)


_HISTORY = st.lists(st.integers(1, 3), min_size=1, max_size=120)


@given(_HISTORY, st.lists(st.integers(0, 120), min_size=4, max_size=4))
def test_ranks_with_equal_calls_are_in_step_at_any_distance(history, made):
    flights = {rank: recorded(history[:count], offset=10 * rank) for rank, count in enumerate(made)}
    assert find_candidates(flights) == ()


@given(_HISTORY, st.data())
def test_the_first_call_that_differs_is_found_from_the_histories(history, data):
    place = data.draw(st.integers(0, len(history) - 1))
    other = [*history[:place], history[place] + 4, *history[place + 1 :]]
    flights = {rank: recorded(other if rank == 2 else history, offset=10 * rank) for rank in range(4)}
    (candidate,) = find_candidates(flights)
    assert candidate.rank_sets == ((0, 1, 3), (2,))
    assert candidate.representatives == (0, 2)
    histories = {rank: recorded(other if rank == 2 else history, held=999, offset=10 * rank) for rank in (0, 2)}
    found = find_divergence(candidate, histories)
    assert (found.group, found.number, found.is_earlier) == (ALL, place + 1, False)
    most, least = found.call_groups
    program, name, key = history[place], f"jit(f{history[place]})", f"key{history[place]}"
    assert (most.ranks, most.name, most.key, most.place) == ((0, 1, 3), name, key, f"train.py:{80 + program} main")
    assert (least.ranks, least.name, least.recorded_by) == ((2,), f"jit(f{program + 4})", 2)
    assert least.program == program + 4 + 20


def test_programs_whose_code_is_not_known_match():
    unknown = {number: ProgramInfo(program.name, program.key, "") for number, program in PROGRAMS.items()}
    flights = {0: recorded([1, 2, 3]), 1: recorded([1, 2, 3], programs=unknown)}
    (candidate,) = find_candidates(flights)
    assert find_divergence(candidate, flights) is None
    assert divergence_of({0: recorded([1, 2, 3]), 1: recorded([1, 2, 4], programs=unknown)}).number == 3


def test_ranks_that_do_not_record_every_call_are_left_out():
    partly = replace(recorded([4, 5]), level=FIRST_CALLS)
    flights = {0: recorded([1, 2]), 1: partly, 2: Flight()}
    assert find_candidates(flights) == ()
    assert find_lags(flights) == ()
    assert find_divergence(Candidate(ALL, 1, ((0,), (1,))), flights) is None


def test_marks_compare_ranks_that_are_far_apart():
    history = [1] * 70
    flights = {0: recorded(history), 1: recorded([2, *history[:45]])}
    (candidate,) = find_candidates(flights)
    assert candidate.number == 16
    distant = {0: recorded(history), 1: recorded(history[:45])}
    assert find_candidates(distant) == ()


def test_groups_are_compared_apart():
    left = {rank: recorded([1, 2], group="0-1") for rank in (0, 1)}
    right = {2: recorded([3], group="2-3"), 3: recorded([4], group="2-3")}
    (candidate,) = find_candidates({**left, **right})
    assert (candidate.group, candidate.rank_sets) == ("2-3", ((2,), (3,)))


def test_ranks_inside_different_calls_are_candidates():
    before = recorded([1, 1])
    flights = {
        0: with_pending_call(before, 3, 2),
        1: with_pending_call(before, 3, 2),
        2: recorded([1, 1, 4]),
        3: before,
    }
    (candidate,) = find_candidates(flights)
    assert candidate == Candidate(ALL, 3, ((0, 1), (2,)))
    groups = divergence_of(flights).call_groups
    assert [(group.ranks, group.name) for group in groups] == [((0, 1), "jit(f2)"), ((2,), "jit(f4)")]
    assert find_candidates({**flights, 2: with_pending_call(before, 3, 2)}) == ()


def test_where_the_ring_was_overwritten_only_an_earlier_divergence_is_known():
    history = [1] * 200
    flights = {0: recorded(history), 1: recorded([2, *history[1:]])}
    found = divergence_of(flights)
    assert (found.is_earlier, found.number, [group.ranks for group in found.call_groups]) == (True, 185, [(0,), (1,)])
    (candidate,) = find_candidates(flights)
    for doubt in (replace(flights[1], unknown_programs=1), replace(flights[1], trouble="a full disk")):
        assert find_divergence(candidate, {0: flights[0], 1: doubt}) is None


def test_ranks_whose_history_was_not_read_are_in_no_call_group():
    candidate = Candidate(ALL, 1, ((0, 3), (1,), (2,)))
    found = find_divergence(candidate, {0: recorded([1]), 1: recorded([2])})
    assert [call_group.ranks for call_group in found.call_groups] == [(0, 3), (1,)]


def test_ranks_that_agree_where_others_differ_are_one_call_group():
    flights = {0: recorded([1, 1]), 1: recorded([1, 2]), 2: recorded([3, 1]), 3: recorded([1, 1])}
    (candidate,) = find_candidates(flights)
    assert candidate.number == 1
    late = Candidate(ALL, 2, ((0, 3), (1,), (2,)))
    found = find_divergence(late, {0: flights[0], 1: flights[1], 2: flights[2]})
    assert (found.number, [call_group.ranks for call_group in found.call_groups]) == (1, [(0, 1, 3), (2,)])


def test_a_lag_names_the_first_call_that_not_all_have_reached():
    flights = {
        0: with_pending_call(recorded([1] * 4), 5, 2),
        1: with_pending_call(recorded([1] * 4), 5, 2),
        2: recorded([1] * 4),
        3: recorded([1] * 7),
    }
    (lag,) = find_lags(flights)
    assert (lag.group, lag.number, lag.ahead, lag.behind) == (ALL, 5, (0, 1, 3), (2,))
    assert (lag.name, lag.place) == ("jit(f2)", "train.py:82 main")
    assert lag.reached == {0: 5, 1: 5, 2: 4, 3: 7}


def test_a_rank_without_a_call_of_its_group_is_behind():
    flights = {0: recorded([1, 1]), 1: Flight(EVERY_CALL), 4: Flight(EVERY_CALL)}
    (lag,) = find_lags(flights)
    assert (lag.number, lag.ahead, lag.behind) == (1, (0,), (1,))
    assert find_lags({rank: recorded([1, 1]) for rank in range(4)}) == ()


@pytest.mark.parametrize(
    ("identities", "expected"),
    [
        ([], ()),
        (["ab", "ab", "ab"], ((0, 1, 2),)),
        (["ab", "ac", "ab"], ((0, 2), (1,))),
        (["ab", "a ", "ab"], ((0, 1, 2),)),
        (["ab", "a ", "ac", "ac"], ((1, 2, 3), (0,))),
        (["ab", "d ", "ab"], ((0, 2), (1,))),
        (["a ", "d ", "a "], ((0, 2), (1,))),
        (["  ", "a ", "ab"], ((0, 1, 2),)),
        (["  ", "  ", "ab", "cd", "cd"], ((0, 1, 3, 4), (2,))),
        (["a ", "ab", "a "], ((0, 1, 2),)),
    ],
)
def test_an_unknown_program_matches_any(identities, expected):
    table = {rank: (text[0].strip(), text[1].strip()) for rank, text in enumerate(identities)}
    assert partition_by_program(table) == expected


def call(rank, key, code="c", program=1):
    return Call(rank, 1.0, ALL, 12, program, key, code, f"jit({key})", f"train.py:{rank} main", True)


def test_calls_that_are_alike_are_no_divergence():
    assert divergence_of_calls({rank: call(rank, "a") for rank in range(4)}) is None
    assert divergence_of_calls({0: call(0, "a"), 1: call(1, "a", code="")}) is None
    assert divergence_of_calls({}) is None


def test_a_divergence_of_calls_names_the_rank_that_has_the_program():
    found = divergence_of_calls({0: call(0, "b"), 1: call(1, "a", code=""), 2: call(2, "a", program=7)})
    assert (found.group, found.number) == (ALL, 12)
    assert found.call_groups == (
        CallGroup((1, 2), "jit(a)", "a", "c", place="train.py:2 main", recorded_by=2, program=7),
        CallGroup((0,), "jit(b)", "b", "c", place="train.py:0 main", recorded_by=0, program=1),
    )


def test_ranks_that_make_no_such_call_are_a_call_group_too_of_which_it_is_said_how_many_they_made():
    gone = Absence(4)
    found = divergence_of_calls({0: call(0, "a"), 3: call(3, "a")}, {2: gone, 1: gone})
    assert divergence_of_calls({}, {1: gone}) is None
    assert [(group.ranks, group.absence) for group in found.call_groups] == [((0, 3), None), ((1, 2), gone)]
    assert Absence(1).format() == "has made only 1 call and is finished"
    assert Absence(0).format(2) == "have made no call and are finished"
    assert Absence().format() == "is finished"


def test_program_details_are_added_to_the_call_groups():
    found = divergence_of_calls({0: call(0, "a"), 1: call(1, "b")})
    arguments = (("x", "float32[4]", "P()"),)
    details = ProgramDetails("f at /m.py:4", arguments, mesh="d=2: 0,1", text="zz")
    first, second = found.with_program_details({0: details}).call_groups
    assert (first.source, first.arguments, first.mesh, first.hlo) == ("f at /m.py:4", arguments, "d=2: 0,1", "zz")
    assert (second, found.with_program_details({})) == (found.call_groups[1], found)


def test_four_thousand_ranks_are_compared_in_a_moment():
    group = "0-4095"
    history = [1, 2] * 50
    flights = {rank: recorded(history[: 100 - rank % 7], group=group) for rank in range(4096)}
    flights[77] = recorded([*history[:95], 4], group=group)
    started = time.process_time()
    (candidate,) = find_candidates(flights)
    (lag,) = find_lags(flights)
    assert time.process_time() - started < 2.0  # 0.03 s on a quiet machine
    assert (candidate.number, candidate.rank_sets[1]) == (96, (77,))
    assert lag.number == 95
