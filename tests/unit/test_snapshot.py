"""A snapshot of the ranks: made of the replies of many agents, formatted, and written and read back."""

import pytest

from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict.stack_text import format_snapshot
from jaxrun.controller.head.head_state import HeadState, TimeLimits
from jaxrun.controller.head.queries import RankQueries, flights_of
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.snapshot_messages import RankDetail, RankQuery, RankReply
from jaxrun.records.event_log.actions import PrintLine, Send

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 88 in step
"""
IN_QUEUE = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/me/data.py", line 31 in __next__
"""


def flight(number, *, pending=None, compiling=None, time=100.0, group="0-3", name="jit(step)"):
    calls = (DispatchedCall(time, group, number, 1, 1, 1),) if number else ()
    sites = {1: ("/home/me/train.py:88 step",)}
    programs = {1: ProgramInfo(name, "k", "c")}
    return Flight(
        level=EVERY_CALL,
        calls=calls,
        call_counts={group: number},
        programs=programs,
        sites=sites,
        pending=pending,
        compiling=compiling,
    )


def look(dumps, flights, **more):
    waits = dict.fromkeys(dumps, "futex_wait_queue")
    return Snapshot(160.0, HOSTS, dumps, waits, flights, **more)


def test_each_group_says_how_far_its_ranks_have_come():
    entered = PendingCall("0-3", 1205, 1, 1, 99.0)
    flights = {rank: flight(1204, pending=entered) for rank in (0, 1, 2)} | {3: flight(1204, time=97.0)}
    text = format_snapshot(look({0: IN_JAX, 1: IN_JAX, 2: IN_JAX, 3: IN_QUEUE}, flights))
    rows = text.splitlines()
    assert rows[1].endswith("train.py:88 step   in JAX: _value    in call #1205 jit(step), 61.0 s")
    assert rows[2].endswith("data.py:31 __next__   in queue: get  after call #1204 jit(step), 63.0 s ago")
    assert "rank 3 is the one that differs." in rows and "waits for data" in text


def test_ranks_in_one_place_may_have_come_differently_far():
    flights = {0: flight(4), 1: flight(5), 2: flight(5, name="jit(mean)", group="0-1")}
    rows = format_snapshot(look({0: IN_JAX, 1: IN_JAX, 2: IN_JAX}, flights)).splitlines()
    assert "after calls #4-5 jit(step), 60.0 s ago or after call #5 jit(mean) of ranks 0-1" in rows[1]


def test_a_compilation_is_reported():
    text = format_snapshot(look({0: IN_JAX}, {0: flight(4, compiling=("jit(init)", 130.0))}))
    assert "compiling jit(init), 30.0 s" in text


def test_finished_ranks_are_reported_too():
    text = format_snapshot(look({0: IN_JAX, 1: IN_JAX}, {rank: flight(4) for rank in range(3)}, finished=(2, 3)))
    assert "ranks 2-3 (h2) have finished, after call #4 jit(step), 60.0 s ago." in text


def test_without_recorders_there_are_only_stacks():
    rows = format_snapshot(look({0: IN_JAX, 1: IN_QUEUE}, {})).splitlines()
    assert rows[1].endswith("in JAX: _value") and format_snapshot(look({}, {})) == ""


# ---- the replies of agents

STACKS, CALLS, NATIVE = RankDetail.STACKS, RankDetail.CALLS, RankDetail.NATIVE_STACKS


@pytest.fixture
def queries():
    return RankQueries(HeadState(WorkerTable({}), TimeLimits(60.0, None, 5.0, 30.0)), lambda rank: rank != 1)


def ask(queries, ranks, detail, now=100.0):
    """Ask, and return the list to which the replies come."""
    came = []

    def then(replies, now):
        came.append(replies)
        return [PrintLine("done")]

    assert queries.ask(ranks, detail, then, now) == [Send(ranks, RankQuery(1, detail))]
    return came


def test_a_query_is_complete_when_all_have_replied(queries):
    came = ask(queries, (0, 3), STACKS)
    assert 100.5 < queries.deadline() < 105.0
    assert queries.handle(RankReply(0, 9), 100.1) == []  # of a query that nobody knows
    for reply in (RankReply(3, 1, stacks="stack"), RankReply(3, 1, stacks="again"), RankReply(2, 1)):
        assert queries.handle(reply, 100.1) == []
    assert queries.handle(RankReply(0, 1), 100.1) == [PrintLine("done")]
    assert came == [{0: RankReply(0, 1), 3: RankReply(3, 1, stacks="stack")}]
    assert queries.deadline() is None and queries.handle(RankReply(0, 1), 100.1) == []


def test_a_rank_that_does_not_reply_in_time_has_an_empty_reply_and_no_calls(queries):
    came = ask(queries, (0, 3), CALLS)
    queries.handle(RankReply(3, 1), 100.1)
    assert queries.expire(101.0) == [] and queries.expire(queries.deadline()) == [PrintLine("done")]
    assert came == [{0: RankReply(0), 3: RankReply(3, 1)}] and flights_of(came[0]) == {3: Flight()}
    assert queries.handle(RankReply(0, 1), 102.0) == []


def test_c_frames_take_longer(queries):
    ask(queries, (3,), NATIVE)
    assert queries.deadline() > 100.0 + NATIVE_STACKS_TIMEOUT_S


def test_where_no_rank_can_reply_nothing_is_waited_for(queries):
    assert queries.ask((1,), STACKS, lambda replies, now: [PrintLine(f"{replies} {now}")], 7.0) == [PrintLine("{} 7.0")]
    assert queries.deadline() is None
    assert queries.ask((1,), CALLS, lambda replies, now: [], 7.0) == [Send((1,), RankQuery(1, CALLS))]
