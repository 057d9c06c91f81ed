"""The caller's side of a call on a gang, with ranks by hand."""

import json
import os

import pytest
from gang_by_hand import NUMBER, events, gang

from jaxrun.errors import UsageError
from jaxrun.frontends.gang import call as call_module
from jaxrun.frontends.gang import gang as gang_module
from jaxrun.frontends.gang.call import step_difference
from jaxrun.frontends.gang.call_events import (
    Disconnected,
    LauncherOutput,
    Printed,
    RankMessage,
    Returned,
    TerminalDisplay,
)
from jaxrun.frontends.gang.gang_errors import CallTimeout, GangError
from jaxrun.protocol.gang_messages import GangMessageKind

__all__ = ["gang"]  # a fixture


def test_all_ranks_get_the_task_and_their_results_come_back(gang):
    with gang.start_call(("f", 1)) as call:
        assert call.running == (0, 1)
        for rank in gang.ranks:
            task = rank.receive()
            assert (task.kind, task.call, task.load()) == (GangMessageKind.CALL, NUMBER, ("f", 1))
        for number, name in ((1, "one"), (0, "zero")):
            gang.ranks[number].returns(name)
            (event,) = events(call, 1)
            assert isinstance(event, Returned) and (event.rank, event.value(), event.error) == (number, name, None)
            assert call.running == tuple(range(number)) and call.receive(0) is None
        assert call.receive() is None
        assert {rank: outcome.value() for rank, outcome in call.outcomes.items()} == {0: "zero", 1: "one"}
    assert (gang.broken, gang.interrupts, gang.ended) == ("", 0, 1)


def test_events_of_a_rank_come_in_their_order(gang):
    with gang.start_call() as call:
        one = gang.ranks[0]
        one.send({"a": 1})
        one.prints("half ")
        one.prints("bad\n", GangMessageKind.STDERR)
        one.fails(KeyError("x"))
        message, out, err, failed = events(call, 4)
        assert message == RankMessage(0, {"a": 1})
        assert (out, err) == (Printed(0, "out", b"half "), Printed(0, "err", b"bad\n"))
        assert failed.error.error == "KeyError" and failed.error.host == "h0"
        assert [failure.rank for failure in call.failures] == [0]


def test_output_is_there_after_all_have_returned_and_shown_at_the_end_if_nobody_receives_it(gang, capsys):
    with gang.start_call() as call:
        gang.launcher_prints("jaxrun: taken\n")
        assert events(call, 1) == [LauncherOutput("jaxrun: taken\n")]
        for number, rank in enumerate(gang.ranks):
            rank.prints(f"{number}\n")
            rank.returns()
        gang.launcher_prints("jaxrun: left\n")
        assert events(call, 2)[0] == Printed(0, "out", b"0\n")
    assert gang.printed == [Printed(1, "out", b"1\n")]
    assert capsys.readouterr().err == "jaxrun: left\n"


def test_messages_of_an_earlier_call_are_dropped(gang):
    with gang.start_call() as call:
        gang.ranks[0].send("late", number=NUMBER - 1)
        gang.ranks[0].send("late", GangMessageKind.RESULT, number=NUMBER - 1)
        gang.ranks[0].returns("right")
        (event,) = events(call, 1)
        assert event.value() == "right"


def test_a_rank_that_ends_is_disconnected_after_what_it_sent(gang):
    with gang.start_call() as call:
        gang.ranks[1].send("farewell")
        gang.ranks[1].ends()
        assert events(call, 2) == [RankMessage(1, "farewell"), Disconnected(1)]
        assert (call.disconnected, call.running) == ({1}, (0,))
        assert str(call.explain_death()) == "the launcher's verdict on {1}"
    assert gang.broken == "rank 1 ended" and gang.connections.ranks == (0,)


def test_the_end_of_a_rank_after_its_result_causes_no_event(gang):
    with gang.start_call() as call:
        gang.ranks[1].returns("done")
        gang.ranks[1].ends()
        gang.ranks[0].returns()
        assert {type(event) for event in events(call, 2)} == {Returned} and call.receive(0) is None
    gang.connections.poll(0)
    assert gang.connections.ranks == (0,)


def test_bytes_that_are_not_a_message_end_a_connection(gang):
    with gang.start_call() as call:
        gang.ranks[0].connection.sendall(b"x" * 1000)
        assert events(call, 1) == [Disconnected(0)]


# ---- how it ends


def test_ranks_that_still_run_the_function_are_interrupted_and_sent_the_end(gang):
    with gang.start_call():
        pass
    assert (gang.interrupts, gang.broken, gang.ended) == (1, "", 1)
    for rank in gang.ranks:
        assert [rank.receive().kind for _ in range(2)] == [GangMessageKind.CALL, GangMessageKind.END_CALL]


def test_a_rank_that_does_not_return_makes_the_gang_broken(gang, monkeypatch):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    gang.on_interrupt = gang.ranks[0].returns
    with gang.start_call():
        pass
    assert gang.broken == "rank 1 did not come back from the last call" and not gang.stopped


def test_where_the_user_interrupts_it_a_rank_that_compiles_may_end_that(gang, monkeypatch, capsys):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    gang.on_interrupt = gang.ranks[0].returns
    looks = []

    def look(ranks):
        looks.append(ranks)
        if len(looks) == 3:
            gang.ranks[1].returns()
        return [1]

    gang.find_compiling = look
    with pytest.raises(KeyboardInterrupt), gang.start_call():
        raise KeyboardInterrupt
    assert not gang.broken and set(looks) == {(1,)}
    told = "jaxrun: waiting for rank 1, which is compiling; another Ctrl-C stops the gang"
    assert capsys.readouterr().err.splitlines() == [told]


def test_at_an_error_of_the_parent_a_rank_that_compiles_is_not_waited_for(gang, monkeypatch):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    gang.on_interrupt, looks = gang.ranks[0].returns, []
    gang.find_compiling = lambda ranks: looks.append(ranks) or [1]
    with pytest.raises(KeyError), gang.start_call():
        raise KeyError
    assert not looks and gang.broken == "rank 1 did not come back from the last call"


def test_a_rank_that_no_longer_compiles_is_not_waited_for(gang, monkeypatch):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    gang.on_interrupt, compiling = lambda: None, [[0, 1], [0], []]
    gang.find_compiling = lambda ranks: compiling.pop(0)
    with pytest.raises(KeyboardInterrupt), gang.start_call():
        raise KeyboardInterrupt
    assert not compiling and gang.broken == "ranks 0-1 did not come back from the last call"


def test_a_result_of_which_nothing_comes_is_awaited_for_some_time_only(gang, monkeypatch):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(call_module, "RESULT_TIMEOUT_S", 0.05)
    with pytest.raises(KeyError), gang.start_call() as call:
        gang.ranks[1].returns()
        gang.ranks[0].send(None, GangMessageKind.ENDED)
        events(call, 1)
        raise KeyError
    assert gang.broken == "rank 0 did not come back from the last call"


def test_an_error_of_the_parent_is_not_hidden_by_the_end(gang):
    with pytest.raises(KeyError, match="mine"):
        with gang.start_call():
            raise KeyError("mine")
    assert gang.ended == 1 and not gang.broken


def test_a_second_interrupt_stops_the_gang(gang):
    def again():
        raise KeyboardInterrupt

    gang.on_interrupt = again
    with pytest.raises(KeyboardInterrupt):
        with gang.start_call():
            raise KeyboardInterrupt
    assert gang.stopped and gang.ended == 1 and gang.broken == "ranks 0-1 did not end when interrupted twice"


def test_an_interrupt_of_what_is_shown_at_the_end_ends_the_call(gang, monkeypatch):
    def again(printed):
        raise KeyboardInterrupt

    monkeypatch.setattr(gang, "show", again)
    ends = []
    gang.ranks[0].prints("last words\n")
    with pytest.raises(KeyboardInterrupt), gang.start_call(on_end=lambda: ends.append(1)):
        pass
    assert ends == [1] and not gang.broken


@pytest.mark.parametrize(("made", "reason"), [(2, "ranks 0-1 are out of step"), (3, "")])
def test_ranks_that_made_different_calls_make_the_gang_broken(gang, made, reason):
    with gang.start_call() as call:
        gang.ranks[0].returns(calls={"0-1": 3})
        gang.ranks[1].fails(ValueError("x"), calls={"0-1": made})
        events(call, 2)
    assert gang.broken.startswith(reason) and bool(gang.broken) is bool(reason)


STEPS = {
    "nothing recorded": ({0: b"", 1: b""}, ""),
    "none made": ({0: {}, 1: {}}, ""),
    "as many": ({0: {"0-1": 3}, 1: {"0-1": 3}}, ""),
    "one more": ({0: {"0-1": 3}, 1: {"0-1": 2}}, "ranks 0-1 .*(rank 1 2, rank 0 3)"),
    "none yet": ({0: {"0-1": 1}, 1: {}}, "ranks 0-1 .*(rank 1 0, rank 0 1)"),
    "only for its members": ({0: {"0-1": 1}, 1: {"0-1": 1}, 2: {}}, ""),
    "groups apart": ({0: {"0,2": 1}, 1: {"1,3": 5}, 2: {"0,2": 1}, 3: {"1,3": 5}}, ""),
    "one of two groups": (
        {0: {"0-1": 1}, 1: {"0-1": 1}, 2: {"2-3": 2}, 3: {"2-3": 4}},
        "ranks 2-3 .*(rank 2 2, rank 3 4)",
    ),
    "many alike": ({rank: {"0-4": rank // 3} for rank in range(5)}, "ranks 0-4 .*(ranks 0-2 0, ranks 3-4 1)"),
}


@pytest.mark.parametrize(("notes", "text"), STEPS.values(), ids=STEPS)
def test_step_difference(notes, text):
    found = step_difference({rank: note if note == b"" else json.dumps(note).encode() for rank, note in notes.items()})
    first, _, counts = text.partition(".*")
    assert found.startswith(first) and found.endswith(counts) and bool(found) is bool(text)


# ---- results


def test_after_a_failure_the_others_have_some_time_to_return(gang, monkeypatch):
    monkeypatch.setattr(call_module, "FAILURE_GRACE_S", 0.01)
    gang.on_interrupt = gang.ranks[1].returns
    with pytest.raises(KeyError) as caught:
        with gang.start_call() as call:
            gang.ranks[0].fails(KeyError("x"))
            call.results()
    assert caught.value.rank == 0 and caught.value.__notes__ == ["rank 1 did not return: all in sleep"]


def test_an_error_says_that_it_costs_the_ranks_their_state(gang, monkeypatch):
    monkeypatch.setattr(call_module, "FAILURE_GRACE_S", 0.01)
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    gang.on_interrupt = lambda: None
    with pytest.raises(KeyError) as caught:
        with gang.start_call() as call:
            gang.ranks[0].fails(KeyError("x"))
            call.results()
    assert gang.raised == {0: "KeyError"}
    assert caught.value.__notes__[1:] == [
        "the gang starts again at its next use, and its ranks' state is lost, with all variables: "
        "rank 1 did not come back from the last call"
    ]


def test_results_that_have_arrived_are_received_without_any_time_to_wait(gang):
    with gang.start_call() as call:
        gang.ranks[0].returns("zero")
        assert call.receive(0).value() == "zero"
        gang.ranks[1].returns("one")
        assert call.results(0) == ("zero", "one")


def test_results_that_arrive_while_output_is_shown_for_too_long_are_received(gang, monkeypatch):
    now = [0.0]

    def show_slowly(printed):
        for number, rank in enumerate(gang.ranks):
            rank.returns(number)
        now[0] += 0.1

    monkeypatch.setattr(call_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gang, "show", show_slowly)
    with gang.start_call() as call:
        gang.ranks[0].prints("begin\n")
        assert call.results(0.05) == (0, 1)


def test_a_caller_that_does_not_wait_receives_what_has_come_so_far(gang):
    with gang.start_call() as call:
        for _ in range(2):
            gang.ranks[0].prints("a\n")
            gang.ranks[1].prints("b\n")
            received = []
            while (event := call.receive(0)) is not None:
                received.append(event.rank)
                gang.ranks[0].prints("more\n")
            assert received and len(received) < 10


def test_a_rank_that_prints_all_the_time_does_not_put_off_a_timeout(gang, monkeypatch):
    monkeypatch.setattr(gang, "show", lambda printed: gang.ranks[0].prints("more\n"))
    with pytest.raises(CallTimeout), gang.start_call() as call:
        gang.ranks[0].prints("begin\n")
        call.results(0.05)


def test_a_death_is_raised_as_the_launcher_explains_it(gang):
    with pytest.raises(RuntimeError, match=r"the launcher's verdict on \{1\}") as caught:
        with gang.start_call() as call:
            gang.ranks[0].fails(KeyError("x"))
            gang.ranks[1].ends()
            call.results()
    assert isinstance(caught.value.__cause__, KeyError)


# ---- without a with


def test_results_end_a_call_and_can_be_asked_for_again(gang):
    call = gang.start_call()
    for number, rank in enumerate(gang.ranks):
        rank.returns(number)
    assert call.results() == call.results() == (0, 1) and gang.ended == 1
    with call:
        pass
    assert gang.ended == 1 and not gang.interrupts


def test_after_a_timeout_without_a_with_the_call_goes_on(gang):
    call = gang.start_call()
    with pytest.raises(CallTimeout):
        call.results(0.01)
    for rank in gang.ranks:
        rank.returns()
    assert not gang.interrupts and call.results() == (None, None)


def test_an_error_ends_a_call_without_a_with_and_is_raised_again(gang):
    call = gang.start_call()
    for rank in gang.ranks:
        rank.fails(KeyError("x"))
    for _ in range(2):
        with pytest.raises(KeyError):
            call.results()
    assert gang.ended == 1


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True])
def test_a_text_that_is_not_a_time_is_refused(gang, timeout):
    with pytest.raises(UsageError, match="timeout must be a number of seconds from 0, not "), gang.start_call() as call:
        call.results(timeout)


def test_a_fork_cannot_use_a_call_and_does_not_end_it(gang, monkeypatch):
    call = gang.start_call()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (call.results, call.receive, call.__enter__):
        with pytest.raises(GangError, match="but this process is a fork of it"):
            use()
    call.end()
    assert not gang.interrupts and not gang.ended


def test_a_call_that_was_cut_short_has_no_results(gang):
    with gang.start_call() as call:
        pass
    with pytest.raises(GangError, match="this call was ended while ranks 0-1 still ran"):
        call.results()
    assert call.receive().rank == 0


def test_a_call_that_its_with_has_ended_already_has_no_results(gang, monkeypatch):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    gang.on_interrupt = lambda: None
    with gang.start_call() as call:
        call.end()
        with pytest.raises(GangError, match="this call was ended while ranks 0-1 still ran"):
            call.results()


def test_a_call_that_nobody_uses_and_that_has_ended_shows_no_progress(gang, monkeypatch):
    refreshed = []
    monkeypatch.setattr(gang, "refresh", refreshed.append)
    call = gang.start_call()
    for rank in gang.ranks:
        rank.returns()
    call.finish()
    assert gang.ended == 1 and not refreshed


def test_a_call_that_nobody_uses_is_finished_and_its_output_and_error_shown(gang, monkeypatch, capsys):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(call_module, "_UNUSED_NOTICE_S", 0.02)
    call = gang.start_call()
    for rank in gang.ranks:
        rank.prints("last words\n")
        rank.send("a value")

    def end(ranks):
        for rank in gang.ranks:
            assert [rank.receive().kind for _ in range(2)] == [GangMessageKind.CALL, GangMessageKind.END_CALL]
            rank.fails(KeyError("x"))

    monkeypatch.setattr(call, "_tell_of_wait", lambda tell=call._tell_of_wait: (tell(), end(gang.ranks)))
    call.finish()
    assert not gang.interrupts and gang.ended == 1 and len(gang.printed) == 2
    told, warned, *_ = capsys.readouterr().err.splitlines()
    assert told == "jaxrun: waiting for ranks 0-1, which run an earlier call of task; Ctrl-C interrupts it"
    assert warned == "jaxrun: an earlier call of task, whose results nobody waited for, raised:"
    assert call.receive().value == "a value"
    with pytest.raises(KeyError):
        call.results()


def test_a_call_of_a_gang_that_another_thread_stops_ends(gang):
    call = gang.start_call()
    gang.stop()
    with pytest.raises(RuntimeError, match=r"the launcher's verdict on \{0, 1\}"):
        call.results()


# ---- output on a terminal


def show(display, *printed):
    for rank, stream, data in printed:
        display.show(Printed(rank, stream, data))


def test_each_line_is_shown_with_its_rank_on_its_stream_once_it_is_whole(capsys):
    display = TerminalDisplay()
    show(display, (0, "out", b"a\n\nb\n"), (12, "err", b"oh\n"), (0, "out", b"\xff\xc3\xa9\n"))
    assert capsys.readouterr() == ("[0] a\n[0] \n[0] b\n[0] \ufffd\u00e9\n", "[12] oh\n")
    show(display, (0, "out", b"loss "), (1, "out", b"other\n"), (0, "err", b"apart\n"))
    assert capsys.readouterr() == ("[1] other\n", "[0] apart\n")
    show(display, (0, "out", b"0.5\nnext"))
    assert capsys.readouterr().out == "[0] loss 0.5\n"


def test_what_was_not_ended_is_shown_at_the_end_and_once(capsys):
    display = TerminalDisplay()
    show(display, (1, "out", b"one"), (0, "err", b"two"))
    display.end_call(None, None, healthy=True)
    assert capsys.readouterr() == ("[1] one\n", "[0] two\n")
    display.end_call(None, None, healthy=True)
    show(display, (1, "out", b"new\n"))
    assert capsys.readouterr() == ("[1] new\n", "")


def test_an_interpreter_that_is_half_gone_gives_up_a_gang_in_silence(monkeypatch):
    gang = gang_module.Gang.__new__(gang_module.Gang)
    gang._job = gang._owner = None
    monkeypatch.setattr(gang_module, "os", None)
    gang.__del__()
