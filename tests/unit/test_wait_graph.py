"""The picture of who waits for whom, from flight recorders, stacks and ends."""

import time

import pytest
from calls_by_hand import flight_after
from deadlock_samples import sample

from jaxrun.analysis.diagnosis.rank_state import Activity
from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph
from jaxrun.protocol.flight import Flight, JointWait
from jaxrun.protocol.flight_file import SHOULD_STOP, SNAPSHOT


def in_function(function, number=1):
    """The flight of a rank that waits in the call of this number of a joint function."""
    return Flight(joint_calls={function: number}, joint_wait=JointWait(function, number, 90.0, 7))


def waits(graph):
    return {rank: wait.waits_for for rank, wait in graph.ranks.items()}


def abandoned(graph):
    return [(waiting, never) for waiting, _, never in graph.abandoned()]


def test_a_rank_waits_for_those_that_have_not_come_to_its_own_call():
    graph = find_wait_graph({0: flight_after(5), 1: flight_after(3), 2: flight_after(1), 3: flight_after(4)})
    assert waits(graph) == {0: (1, 2, 3), 1: (2,), 2: (), 3: (1, 2)}
    assert graph.ranks[0].calls[0].number == 5 and graph.some_are_behind


def test_a_call_counts_as_reached_once_it_is_entered():
    graph = find_wait_graph({0: flight_after(3, "0-1", entered_at=1.0), 1: flight_after(3, "0-1")})
    assert waits(graph) == {0: (1,), 1: ()}


def test_ranks_that_have_all_come_equally_far_or_of_which_nothing_is_known_wait_for_nobody():
    for flights in ({}, {0: Flight()}, {0: flight_after(2), 1: flight_after(2)}):
        graph = find_wait_graph(flights)
        assert not any(waits(graph).values()) and not graph.some_are_behind and not abandoned(graph)


def test_a_joint_function_comes_before_the_calls_of_groups():
    graph = find_wait_graph({0: in_function(SNAPSHOT), 1: Flight()})
    assert waits(graph) == {0: (1,), 1: ()} and graph.ranks[0].calls[0].function == SNAPSHOT


@pytest.mark.parametrize(
    ("flights", "finished", "expected"),
    [
        ({0: flight_after(1), 1: flight_after(2), 2: flight_after(2)}, (0,), [((1,), (0,)), ((2,), (0,))]),
        ({0: flight_after(3), 1: flight_after(5), 2: flight_after(1)}, (0,), [((1,), (0,))]),
        ({0: flight_after(3), 1: flight_after(4), 2: flight_after(3)}, (0, 1), []),
        ({0: flight_after(1), 1: flight_after(2)}, (), []),
        ({0: flight_after(1, "0-1"), 2: flight_after(9, "2-3"), 3: flight_after(8, "2-3")}, (0,), []),
        ({0: in_function(SNAPSHOT), 1: Flight()}, (1,), [((0,), (1,))]),
        ({0: in_function(SHOULD_STOP), 1: Flight()}, (1,), []),
    ],
    ids=["all", "one works on", "the ahead have finished", "none finished", "other group", "joint", "should_stop"],
)
def test_ranks_are_abandoned_in_a_call_to_which_a_finished_rank_has_not_come(flights, finished, expected):
    assert abandoned(find_wait_graph(flights, finished=finished)) == expected


def test_without_recorders_a_rank_that_waits_in_jax_waits_for_those_that_do_not():
    dumps = {0: sample("block_until_ready")[0], 1: sample("time.sleep")[0], 2: ""}
    graph = find_wait_graph({}, dumps, {0: sample("block_until_ready")[1], 1: sample("time.sleep")[1]})
    assert graph.awaited_by(0) == (1, 2) and graph.awaited_by(1) == () and graph.awaited_by(9) == ()
    assert graph.ranks[1].state.activity is Activity.SLEEP


def test_a_rank_at_the_prompt_of_jaxs_debugger_is_not_in_jax():
    dump, wait = sample("jax.debug.breakpoint of JAX 0.8")
    state = find_wait_graph({}, {0: dump}, {0: wait}).ranks[0].state
    assert state.activity is Activity.PROMPT and not state.is_in_jax and not state.sleeps_in_jax


def test_the_picture_of_thousands_of_ranks_is_drawn_at_once():
    many = {rank: flight_after(rank % 97, "0-8191") for rank in range(8192)}
    many |= {rank: in_function(SNAPSHOT) for rank in range(4096)}
    began = time.thread_time()
    graph = find_wait_graph(many, finished=(8190,))
    assert graph.some_are_behind and next(graph.abandoned(), None) is not None
    assert time.thread_time() - began < 5.0
