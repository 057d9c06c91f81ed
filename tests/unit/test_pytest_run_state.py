"""The state of a test on its ranks: messages in, answers out; and the time for which it is waited for."""

import pytest
from calls_by_hand import flight_after
from fakes import SessionCall, SessionGang

from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph
from jaxrun.frontends.gang.call_events import RankMessage
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState
from jaxrun.frontends.pytest_plugin.run_loop import Expiry, RunLimits, RunLoop, describe_abandoned
from jaxrun.frontends.pytest_plugin.run_state import RunState
from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerDecision,
    DebuggerInput,
    DebuggerOutput,
    DebuggerReadRequest,
)
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.pytest_messages import (
    DebuggerQuestion,
    FaultRequest,
    Gather,
    Gathered,
    PeerLost,
    PhaseReport,
    RecordedWarning,
    RunFinished,
    RunTest,
)

CALL = PhaseReport({"when": "call", "outcome": "passed"})
FAILED = PhaseReport({"when": "call", "outcome": "failed"})
SKIPPED = PhaseReport({"when": "call", "outcome": "skipped"})


class Ranks:
    """The ranks of a test: what they send goes to `state`, and what is done at their request is in `done`."""

    def __init__(self, size, debug=False):
        self.done = []
        add, warn = self._add, self.done.append
        self.state = RunState(size, add, add, warn, add, lambda rank: f"typed for {rank}\n", debug)

    def _add(self, *what):
        self.done.append(what)

    def feed(self, *messages):
        """What is done after each of (rank, message); a message of None is a disconnect."""
        self.done.clear()
        return self.at(*((now, *message) for now, message in enumerate(messages)))

    def at(self, *messages):
        """The same of (time, rank, message)."""
        for now, rank, message in messages:
            if message is None:
                self.state.handle_disconnect(rank, now)
            else:
                self.state.handle_message(rank, message, now)
        return [*self.done]


def test_a_test_runs_until_all_ranks_have_finished_or_disconnected():
    ranks = Ranks(3)
    ranks.feed((0, CALL), (0, RunFinished({})), (2, None))
    assert ranks.state.running == (1,)
    ranks.feed((1, RunFinished({})))
    assert (ranks.state.running, ranks.state.finished) == ((), {0, 1})


def test_the_first_failure_is_remembered_with_its_time():
    ranks = Ranks(3)
    ranks.feed((0, CALL), (1, FAILED), (1, FAILED), (2, None))
    assert ranks.state.first_failure_at == 1
    assert [rank.first_failure_at for rank in ranks.state.ranks.values()] == [None, 1, 3]


# ---- gathers


def gather(value=b"", where="gang.barrier()", root=-1):
    return Gather(where, value, root)


@pytest.mark.parametrize(
    ("messages", "answers"),
    [
        ([(1, gather(b"1"))], []),
        ([(1, gather(b"1")), (0, gather(b"0"))], [(Gathered((b"0", b"1")), (0, 1))]),
        ([(1, gather(b"1")), (0, gather(b"0")), (0, gather(b"0"))], [(Gathered((b"0", b"1")), (0, 1))]),
        ([(0, gather(b"0", root=1)), (1, gather(b"1", root=1))], [(Gathered((b"1",)), (0, 1))]),
        ([(0, gather()), (1, FAILED)], []),
        ([(0, gather()), (1, FAILED), (1, gather())], [(Gathered((b"", b"")), (0, 1))]),
        ([(0, gather(where="a")), (1, gather(where="b"))], [(PeerLost("rank 0 is at a, rank 1 is at b"), (0, 1))]),
    ],
    ids=["one is there", "all", "all, and the next", "broadcast", "may come yet", "comes in its teardown", "elsewhere"],
)
def test_a_gather_is_answered_when_all_ranks_are_there(messages, answers):
    assert Ranks(2).feed(*messages) == answers


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([(1, RunFinished({}))], "rank 1 has finished its test"),
        ([(1, FAILED), (1, RunFinished({}))], "rank 1 has failed"),
        ([(1, SKIPPED), (1, RunFinished({}))], "rank 1 has skipped"),
        ([(1, None)], "rank 1 is gone"),
    ],
)
def test_a_rank_that_waits_for_one_that_will_not_come_is_answered_with_the_reason(others, why):
    comes = [(0, gather())]
    assert Ranks(3).feed(*comes, *others) == Ranks(3).feed(*others, *comes) == [(PeerLost(why), (0,))]
    assert Ranks(3).feed((1, None), (2, None), *comes) == [(PeerLost("ranks 1-2 are gone"), (0,))]


# ---- faults and warnings


def test_equal_faults_and_equal_warnings_of_several_ranks_count_once():
    ranks = Ranks(2)
    kill, pause = FaultRequest("kill", 1), FaultRequest("pause", 1)
    careful = RecordedWarning("UserWarning", "careful", "f.py", 1, "runtest", "t", None)
    actions = ranks.feed((0, kill), (1, kill), (0, pause), (0, careful), (1, careful))
    assert actions == [("kill", 1), ("pause", 1), careful]


# ---- in step


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([{}, {}, {}], True),
        ([{"0-2": 3}, {"0-2": 3}, {"0-2": 3}], True),
        ([{"0-2": 3}, {"0-2": 2}, {"0-2": 3}], False),
        ([{"0-2": 1}, {"0-2": 1}, {}], False),
        ([{"0-1": 2}, {"0-1": 2}, {}], True),
        ([{"0-1": 2}, {}, {}], False),
    ],
)
def test_ranks_are_in_step_if_each_group_has_made_as_many_calls(calls, expected):
    ranks = Ranks(3)
    ranks.feed(*((rank, RunFinished(made)) for rank, made in enumerate(calls)))
    assert (ranks.state.in_step, ranks.state.may_be_out_of_step) == (expected, not expected)


def hashed(value, group="0-1"):
    return RunFinished({group: 3}, {} if value is None else {group: value})


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        (hashed(5), [hashed(5)], False),
        (hashed(5), [hashed(6)], True),
        (hashed(None), [hashed(6)], False),
        (hashed(5, "0"), [hashed(6, "1")], False),
        (hashed(5), [FAILED, hashed(6)], False),
        (hashed(5), [None], False),
        (hashed(5), [CALL], False),
    ],
    ids=["equal", "different", "unknown", "different groups", "after a failure", "died", "not over"],
)
def test_ranks_that_finished_after_as_many_calls_may_be_out_of_step(first, then, expected):
    ranks = Ranks(2)
    ranks.feed((0, first), *((1, message) for message in then))
    assert ranks.state.may_be_out_of_step is expected


# ---- debuggers


def output(rank, text):
    return rank, DebuggerOutput(rank, text)


def reads(rank):
    return rank, DebuggerReadRequest(rank, 7)


def closed(rank):
    return rank, DebuggerClosed(rank)


def typed(rank):
    return DebuggerInput(7, f"typed for {rank}\n"), (rank,)


@pytest.mark.parametrize(("debug", "granted"), [(False, []), (True, [1])])
def test_the_first_rank_that_fails_is_debugged(debug, granted):
    ranks = Ranks(3, debug)
    done = [what for rank in (1, 2) for what in ranks.feed((rank, DebuggerQuestion("boo")), (rank, FAILED))]
    assert [what for what in done if what[0] in (1, 2)] == [(rank, "boo\n") for rank in granted]
    answers = [what for what in done if isinstance(what[0], DebuggerDecision)]
    assert answers == [(DebuggerDecision(rank in granted), (rank,)) for rank in (1, 2)]


def test_the_debugger_of_another_rank_waits_until_the_first_is_left():
    ranks = Ranks(2)
    assert ranks.feed(output(0, "(Pdb) "), reads(0)) == [(0, "(Pdb) "), typed(0)]
    assert ranks.feed(output(1, "> there"), reads(1)) == []
    assert ranks.state.debugged_rank == 0
    assert ranks.feed(closed(0)) == [(1, "> there"), typed(1)]
    assert ranks.state.debugged_rank == 1
    assert ranks.feed((1, None)) == []
    assert ranks.state.debugged_rank is None


def test_a_rank_whose_wait_for_the_debugger_has_ended_is_not_debugged():
    ranks = Ranks(3)
    ranks.feed(reads(0), reads(1), reads(2), closed(1))
    assert ranks.feed(closed(0)) == [typed(2)]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_nobody_is_asked_for_a_line_of_ranks_that_are_killed_because_one_has_died(first):
    ranks = Ranks(3, debug=True)
    ranks.feed(reads(0), reads(1), reads(2))
    assert ranks.feed((first, None)) == []
    assert ranks.state.debugged_rank is None
    others = [rank for rank in range(3) if rank != first]
    assert ranks.feed(reads(others[0]), *((rank, None) for rank in others)) == []
    assert ranks.state.debugged_rank is None and ranks.state.running == ()


def test_a_failure_after_the_death_of_a_rank_is_not_debugged():
    ranks = Ranks(3, debug=True)
    ranks.feed(reads(0), (1, DebuggerQuestion("b")))
    assert ranks.feed((2, None), (0, DebuggerQuestion("a"))) == [
        (DebuggerDecision(False), (1,)),
        (DebuggerDecision(False), (0,)),
    ]


def test_the_next_rank_is_debugged_when_the_session_of_the_first_has_ended():
    ranks = Ranks(3)
    ranks.feed(reads(0), reads(1), reads(2))
    ranks.done.clear()
    ranks.state.handle_disconnect(1, 5.0, "its pytest session was ended by pytest.exit('Quitting debugger')")
    ranks.state.handle_disconnect(0, 5.0, "its pytest session was ended by pytest.exit('Quitting debugger')")
    assert ranks.done == [typed(2)]


def test_a_failing_rank_is_answered_only_when_the_debugger_is_free():
    ranks = Ranks(2, debug=True)
    assert ranks.feed((0, DebuggerQuestion("a"))) == [(0, "a\n"), (DebuggerDecision(True), (0,))]
    assert ranks.feed((1, DebuggerQuestion("b"))) == []
    assert ranks.feed((0, RunFinished({}))) == [(DebuggerDecision(False), (1,))]


# ---- for how long it is waited for


def state_after(*messages):
    """Of three ranks, after each of (time, rank, message)."""
    ranks = Ranks(3)
    ranks.at(*messages)
    return ranks.state


@pytest.mark.parametrize(
    ("messages", "expiry"),
    [
        ([], (30.0, Expiry.TIMEOUT)),
        ([(5.0, 1, FAILED)], (7.0, Expiry.GRACE)),
        ([(10.0, 2, None)], (12.0, Expiry.GRACE)),
        ([(29.0, 1, FAILED)], (30.0, Expiry.TIMEOUT)),
    ],
    ids=["nothing", "a failure", "a death", "a failure shortly before the end"],
)
def test_the_others_have_their_grace_after_a_failure_and_all_have_the_timeout(messages, expiry):
    assert RunLimits(timeout=30.0, grace=2.0).next_expiry(state_after(*messages)) == expiry


def test_while_some_ranks_have_finished_the_others_are_checked_less_and_less_often():
    limits, state, checks = RunLimits(timeout=30.0, grace=2.0), state_after((1.0, 0, RunFinished({}))), []
    while (expiry := limits.next_expiry(state))[1] is Expiry.CHECK:
        checks.append(expiry[0])
        limits.record_check(expiry[0])
    assert (checks, expiry) == ([3.0, 7.0, 15.0], (30.0, Expiry.TIMEOUT))
    state.handle_message(1, FAILED, 16.0)
    assert limits.next_expiry(state) == (18.0, Expiry.GRACE)


class Sessions:
    """Of two ranks: `events` come so many seconds after each other, and the user types for `typing` seconds."""

    def __init__(self, *events, typing=0.0):
        self.events = [*events]
        self.terminal = []  # what was shown, and the ranks that read
        self.typing = typing
        self.time = 1000.0
        self.hosts = {0: "h", 1: "h"}
        self.call = SessionCall(self.receive)
        self.gang = SessionGang()

    def receive(self, timeout=None):
        comes, rank, message = self.events[0] if self.events else (1000.0, 0, None)
        if timeout is not None and timeout < comes:
            self.time += timeout
            self.events[:1] = [(comes - timeout, rank, message)]
            return None
        self.time += comes
        del self.events[0]
        return RankMessage(rank, message)

    def read(self, rank):
        self.time += self.typing
        self.terminal.append(rank)
        return "c\n"

    def show(self, rank, text):
        self.terminal.append(text)

    def stacks(self):
        return None

    def read_captured(self, rank):
        return {}

    def run(self, timeout=30.0, grace=2.0):
        run_loop = RunLoop(self, self, record=None, clock=lambda: self.time)
        return run_loop.run(RunTest("test_x.py::test", "", ""), timeout, grace)


OVER = RunFinished({})


def test_the_time_in_a_debugger_does_not_count():
    debugging = [(1.0, 0, FAILED), (0.0, *reads(0)), (50.0, *output(0, "(Pdb) ")), (0.0, 0, OVER)]
    sessions = Sessions(*debugging, (1.0, 1, OVER), typing=100.0)
    result = sessions.run()
    assert sessions.time > 1150.0
    assert (result.timeout, result.notes, result.reusable) == (None, (), True)
    assert [rank.failed_at for rank in result.ranks.values()] == [1.0, None]


HANDED_OVER = "\n>>> rank 0 has not come back from that step: it may wait for another rank"


def test_a_rank_that_waits_gets_the_terminal_of_one_that_does_not_come_back_from_a_step():
    comes_back = [(0.0, *output(0, "(Pdb) ")), (0.0, *reads(0)), (0.0, *closed(0)), (0.0, 0, OVER)]
    sessions = Sessions((1.0, *reads(0)), (0.2, *reads(1)), (5.0, *closed(1)), *comes_back, (0.0, 1, OVER))
    assert sessions.run().reusable
    assert sessions.terminal == [0, HANDED_OVER, 1, "(Pdb) ", 0]


def test_a_rank_that_steps_alone_or_comes_back_soon_keeps_the_terminal():
    steps = [(1.0, *reads(0)), (50.0, *output(0, "1")), (0.0, *reads(0)), (0.0, *reads(1)), (0.5, *output(0, "2"))]
    sessions = Sessions(*steps, (50.0, *reads(0)), (0.9, *closed(0)), (9.0, *closed(1)), (0.0, 0, OVER), (0.0, 1, OVER))
    assert sessions.run().reusable
    assert sessions.terminal == [0, "1", 0, "2", 0, 1]


def test_the_time_after_a_debugger_was_left_counts():
    result = Sessions((1.0, *reads(0)), (0.0, *closed(0)), (100.0, 0, OVER)).run()
    assert (result.timeout, result.reusable) == (30.0, False)


def test_a_rank_is_stuck_when_the_grace_after_the_failure_of_another_is_over():
    result = Sessions((1.0, 0, FAILED), (0.5, 0, OVER), (100.0, 1, OVER)).run()
    assert [rank.cut_off for rank in result.ranks.values()] == [None, PhaseState.STUCK]
    assert result.notes == ("rank 1 ended 2.0 s after the first failure; the next test gets a new gang",)
    assert (result.timeout, result.reusable) == (None, False)


def test_all_ranks_that_run_are_shown_when_the_time_is_over():
    result = Sessions((20.0, 0, CALL), (20.0, 0, OVER)).run()
    assert [rank.cut_off for rank in result.ranks.values()] == [PhaseState.STUCK] * 2
    assert result.notes == ("ranks are there", "ranks 0-1 ended; the next test gets a new gang")
    assert result.timeout == 30.0


# ---- abandoned ranks


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (
            {1: flight_after(4, "0-2")},
            "rank 1 is in cross-process call #4 of ranks 0-2, and rank 0 finished the test without it",
        ),
        ({2: flight_after(3, "0-2", entered_at=1.0)}, "rank 2 is in cross-process call #4 of ranks 0-2"),
        (
            {1: flight_after(2, "0-2"), 2: flight_after(3, "0-2", entered_at=1.0)},
            "rank 2 is in cross-process call #4 of ranks 0-2",
        ),
        ({1: flight_after(3, "0-2"), 2: flight_after(3, "0-2")}, ""),
        ({1: flight_after(9, "1-2"), 2: flight_after(8, "1-2")}, ""),
        ({1: Flight()}, ""),
        ({}, ""),
    ],
    ids=["made", "entered", "and one behind", "no further", "a group without it", "nothing recorded", "no flights"],
)
def test_a_rank_in_a_call_that_another_has_finished_without_is_abandoned(others, expected):
    abandoned = describe_abandoned(find_wait_graph({0: flight_after(3, "0-2"), **others}, finished=(0,)))
    assert abandoned.startswith(expected) and bool(abandoned) is bool(expected)
