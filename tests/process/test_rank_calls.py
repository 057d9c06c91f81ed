"""A rank of a gang handles the messages of its parent."""

import json
import os
import select
import sys
import threading

import pytest
from fakes import fake_module
from gang_by_hand import serving_calls

from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind
from jaxrun.protocol.payload import Payload
from jaxrun_runtime.gang import calls

pytestmark = pytest.mark.jax_version


@pytest.fixture
def serve(monkeypatch):
    with serving_calls(monkeypatch) as run:
        yield run


@pytest.fixture
def answers(serve):
    """answers(fn, …) → all messages of the rank that runs this function, as Caller.run calls it."""

    def run(*call, **note):
        return serve(lambda caller: (caller.run(*call, **note), caller.receive_all())[1])

    return run


def current():
    return calls.current_call()


def test_a_rank_first_sends_what_it_is(serve):
    kind, about = serve(lambda parent: parent.about)
    assert kind is GangMessageKind.READY and about["pid"] == os.getpid()
    assert (about["rank"], about["size"], about["devices"], about["platform"]) == (0, 1, 2, "cpu")


def test_an_answer_belongs_to_its_call_and_contains_the_calls_made(serve, monkeypatch):
    recorder = fake_module("call_recorder", call_counts=lambda: {"0-3": 7})
    monkeypatch.setitem(sys.modules, "jaxrun_runtime.lockstep.call_recorder", recorder)

    def call(caller):
        caller.run(int, number=42)
        return caller.reader.receive(), caller.reader.receive()

    ended, answer = serve(call)
    assert (ended.kind, ended.call) == (GangMessageKind.ENDED, 42)
    assert (answer.call, json.loads(answer.note)) == (42, {"0-3": 7})


def test_it_ends_when_the_gang_shuts_down(serve):
    def call(caller):
        caller.send_message(GangMessage(GangMessageKind.SHUTDOWN, 0))
        return caller.connection.recv(1) if select.select([caller.connection], [], [], 20)[0] else None

    assert serve(call) == b""


def test_values_that_come_after_a_function_has_ended_are_ignored(serve):
    def call(caller):
        caller.send("late")
        caller.send_message(GangMessage(GangMessageKind.END_CALL, 1))
        caller.run(lambda: "next", number=2)
        return caller.receive()

    assert serve(call) == (GangMessageKind.RESULT, "next")


# ---- raising


class Own(Exception):
    """A user's."""


def _raise(error):
    raise error


FAILURES = {
    "an exception": (lambda: _raise(Own("x")), ("Own", "x", 1)),
    "sys.exit": (lambda: sys.exit(3), ("SystemExit", "", 3)),
    "sys.exit with words": (lambda: sys.exit("no data"), ("SystemExit", "no data", 1)),
    "an interrupt of its own": (lambda: _raise(KeyboardInterrupt()), ("KeyboardInterrupt", "", 130)),
    "a result that cannot travel": (threading.Lock, ("TypeError", "cannot pickle '_thread.lock' object", 1)),
}


@pytest.mark.parametrize(("fn", "words"), FAILURES.values(), ids=FAILURES)
def test_an_exception_is_sent_and_the_rank_goes_on(serve, fn, words):
    def call(caller):
        caller.run(fn)
        received = caller.receive()
        caller.run(lambda: "alive", number=2)
        return received, caller.receive()

    (kind, failure), after = serve(call)
    assert kind is GangMessageKind.EXCEPTION and (failure["error"], failure["message"], failure["status"]) == words
    assert after == (GangMessageKind.RESULT, "alive")


def test_a_traceback_has_the_users_frames_only(answers):
    ((_, failure),) = answers(lambda: _raise(Own("x")))
    assert failure["home"] == __name__ and "in _raise" in failure["traceback"]
    assert "jaxrun_runtime" not in failure["traceback"]


def test_a_call_that_cannot_be_unpickled_is_reported(serve):
    def call(caller):
        caller.send_message(GangMessage(GangMessageKind.CALL, 1, Payload(b"garbage")))
        return caller.receive()

    kind, failure = serve(call)
    assert kind is GangMessageKind.EXCEPTION and failure["error"] == "UnpicklingError"


# ---- printing


def test_output_goes_to_the_caller_and_to_the_log(answers, capsys):
    def printing():
        print("one\ntwo")
        print("trouble", file=sys.stderr)
        print("half", end="")
        return sys.stdout.isatty(), sys.stdout.encoding

    *printed, last = answers(printing)
    assert "".join(text for kind, text in printed if kind is GangMessageKind.STDOUT) == "one\ntwo\nhalf"
    assert "".join(text for kind, text in printed if kind is GangMessageKind.STDERR) == "trouble\n"
    assert last == (GangMessageKind.RESULT, (False, sys.stdout.encoding))
    assert capsys.readouterr() == ("one\ntwo\nhalf", "trouble\n")


def test_a_function_that_fails_still_shows_its_output(answers):
    def printing():
        print("before", end="", flush=True)
        print(" the end", end="")
        raise Own("x")

    *printed, (kind, _) = answers(printing)
    assert printed == [(GangMessageKind.STDOUT, "before"), (GangMessageKind.STDOUT, " the end")]
    assert kind is GangMessageKind.EXCEPTION


def test_surrogates_and_threads_print_too(answers):
    def printing():
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        sys.stdout.write("\udcff\n")

    received = [text for kind, text in answers(printing) if kind is GangMessageKind.STDOUT]
    assert "".join(received) == "from a thread\n\\udcff\n"


def test_a_process_that_the_function_forks_sends_nothing(answers, capsys):
    def forking():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)  # as it would be in the fork
            print("in the fork")

    assert answers(forking) == [(GangMessageKind.RESULT, None)]
    assert capsys.readouterr().out == "in the fork\n"


# ---- talking


def test_both_sides_may_send_values_while_it_runs(serve):
    def talking(first):
        call = current()
        call.send((call.rank, call.size, first))
        return call.receive() + call.receive()

    def call(caller):
        caller.run(talking, "a")
        received = caller.receive()
        caller.send("b")
        caller.send("c")
        return received, caller.receive()

    assert serve(call) == ((GangMessageKind.VALUE, (0, 1, "a")), (GangMessageKind.RESULT, "bc"))


ENDS = {
    "the caller has ended the call": (lambda caller: caller.send_message(GangMessage(GangMessageKind.END_CALL, 1)), 2),
    "the gang is closed": (lambda caller: caller.send_message(GangMessage(GangMessageKind.SHUTDOWN, 0)), 1),
    "a value of another call": (lambda caller: caller.send("x", number=9), 2),
}


@pytest.mark.parametrize(("end", "answered"), ENDS.values(), ids=ENDS)
def test_a_wait_for_a_value_that_cannot_come_ends(serve, end, answered):
    def waiting():
        try:
            current().receive()
        except calls.CallEnded:
            return "over"

    def call(caller):
        caller.run(waiting)
        end(caller)
        received = [caller.receive()]
        if answered > 1:
            caller.run(lambda: "next", number=2)
            received.append(caller.receive())
        return received

    assert serve(call) == [(GangMessageKind.RESULT, "over"), (GangMessageKind.RESULT, "next")][:answered]


def test_the_end_of_the_caller_ends_the_rank(serve, capsys):
    def waiting():
        for attempt in (current().receive, current().receive, lambda: current().send(1)):
            with pytest.raises(calls.CallEnded):
                attempt()
        print("all is over")

    def call(caller):
        caller.run(waiting)
        caller.connection.close()

    serve(call)
    assert capsys.readouterr().out == "all is over\n"


def test_outside_of_a_gang_there_is_no_current_call(monkeypatch):
    monkeypatch.setattr(calls, "_current", None)
    with pytest.raises(RuntimeError, match="not being run by a gang"):
        calls.current_call()
