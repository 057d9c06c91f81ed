"""What the event log says of each attempt and rank."""

import json

from jaxrun.rundir.event_log import parse_line
from jaxrun.trace.phases import rank_phases, split_attempts


def logs(*events):
    """`events` are (time, name, rank or None, more)."""
    lines = []
    for time, name, rank, more in events:
        of_rank = {} if rank is None else {"rank": rank}
        lines.append(parse_line(json.dumps({"time": time, "event": name, **of_rank, **more})))
    return split_attempts(lines)


START = [
    (0.0, "started", None, {}),
    (1.0, "spawned", 0, {"pid": 11}),
    (2.0, "hello", 0, {"host": "h1", "started": 1.2}),
    (4.0, "proof", 0, {"at": 3.0}),
    (1.5, "spawned", 1, {"pid": 12}),
    (2.5, "hello", 1, {"host": "h2", "started": 1.2}),
    (5.0, "proof", 1, {"at": 3.5}),
]


def test_the_phases_of_a_rank_follow_each_other():
    (log,) = logs(*START, (9.0, "done", 0, {}), (9.5, "exit", 0, {"status": 0}))
    assert [(span.name, span.start, span.end) for span in rank_phases(log.ranks[0], log)] == [
        ("before its process", 0.0, 1.0),
        ("start Python and import jax", 1.0, 2.0),
        ("meet the other ranks, join", 2.0, 3.0),
        ("find the devices", 3.0, 4.0),
        ("wait for the other ranks", 4.0, 5.0),
        ("program", 5.0, 9.0),
        ("end", 9.0, 9.5),
    ]
    assert rank_phases(log.ranks[1], log)[-1][:3] == ("program", 5.0, 9.5)  # of which nothing more is known
    assert (log.ranks[1].host, log.ranks[1].pid, log.run_at) == ("h2", 12, 5.0)


def test_a_rank_may_be_heard_before_its_start_is_told():
    (log,) = logs(
        (0.0, "started", None, {}), (2.0, "hello", 0, {"host": "h1", "started": 1.0}), (2.1, "spawned", 0, {"pid": 5})
    )
    assert [(span.name, span.start) for span in rank_phases(log.ranks[0], log)][:2] == [
        ("before its process", 0.0),
        ("start Python and import jax", 1.0),
    ]


def test_a_job_that_never_ran_has_no_program():
    (log,) = logs(*START[:6], (7.0, "unavailable", None, {"text": "no device"}))
    assert [span.name for span in rank_phases(log.ranks[1], log)][-1] == "meet the other ranks, join"
    assert log.run_at is None and log.marks[0].is_failure and log.marks[0].detail == "no device"


def test_attempts_are_apart():
    first, second = logs(
        *START,
        (6.0, "failed", 1, {"error": "ValueError", "message": "bad"}),
        (6.1, "exit", 1, {"status": 1}),
        (6.2, "stop", None, {"signal": 9, "ranks": [0]}),
        (6.3, "exit", 0, {"status": -9}),
        (6.4, "attempt_ended", None, {"headline": "rank 1 failed"}),
        (6.5, "attempt_started", None, {"attempt": 2, "reason": "rank 1 failed"}),
        (7.0, "spawned", 0, {"pid": 13, "attempt": 2}),
        (8.0, "exit", 0, {"status": -11, "attempt": 2}),
    )
    assert (first.number, first.end, first.outcome, second.number, second.start) == (1, 6.4, "rank 1 failed", 2, 6.5)
    assert [(mark.name, mark.is_failure) for mark in first.ranks[1].marks] == [("ValueError", True)]
    assert first.ranks[0].marks == []  # jaxrun itself has killed it
    assert [mark.name for mark in second.ranks[0].marks] == ["killed by SIGSEGV (11)"]
    assert [mark.name for mark in first.marks] == ["SIGKILL (9) to rank 0"]


def test_times_of_another_clock_are_corrected_by_the_last_word_on_it():
    (log,) = logs(
        (0.0, "started", None, {}),
        (0.5, "clock", 1, {"offset": -7.0}),
        (1.0, "profiled", 1, {"started": 6.0, "sent": 7.0, "file": "f", "error": ""}),
        (2.0, "clock", 1, {"offset": -5.0, "error": 0.001}),
        (3.0, "exit", 1, {"status": 0, "output": [[7.0, 7.5, 120]]}),
    )
    rank = log.ranks[1]
    assert (rank.output[0].start, rank.output[0].end, rank.output[0].detail) == (2.0, 2.5, "120 bytes")
    assert (rank.profiles[0].start, rank.profiles[0].end, rank.clock_error) == (1.0, 2.0, 0.001)


def test_what_is_not_understood_is_left_out():
    (log,) = logs(*START, (6.0, "exit", 0, {}), (6.0, "stop", None, {"signal": "x"}), (6.0, "spawned", 1, {"pid": []}))
    assert len(log.ranks) == 2 and log.marks == [] and log.end == 6.0
