"""What a rank of a gang does with what its parent sends."""

import json
import os
import select
import sys
import threading

import pytest
from conversing import playing

from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind
from jaxrun.protocol.payload import Payload
from jaxrun_runtime.gang import array_pickling, calls

pytestmark = pytest.mark.jax_version


@pytest.fixture
def play(monkeypatch):
    with playing(monkeypatch) as run:
        yield run


def current():
    return calls.current_call()


def test_a_rank_says_what_it_is(play):
    kind, about = play(lambda parent: parent.about)
    assert kind is GangMessageKind.READY and about["pid"] == os.getpid()
    assert (about["rank"], about["size"], about["devices"], about["platform"]) == (0, 1, 2, "cpu")


def test_it_runs_what_it_is_sent_one_after_the_other(play):
    def parent(side):
        for number in range(3):
            side.run(lambda x: x + 1, number, number=number)
        return [side.hear() for _ in range(3)]

    assert play(parent) == [(GangMessageKind.RESULT, 1), (GangMessageKind.RESULT, 2), (GangMessageKind.RESULT, 3)]


def test_an_answer_belongs_to_its_call_and_tells_the_calls_made(play, monkeypatch):
    monkeypatch.setattr(calls, "_call_counts", lambda: {"0-3": 7})

    def parent(side):
        side.run(int, number=42)
        return side.inbox.receive()

    answer = play(parent)
    assert (answer.call, json.loads(answer.note)) == (42, {"0-3": 7})


def test_it_leaves_when_it_is_told_to(play):
    def parent(side):
        side.put(GangMessage(GangMessageKind.SHUTDOWN, 0))
        return side.connection.recv(1) if select.select([side.connection], [], [], 20)[0] else None

    assert play(parent) == b""


def test_what_is_said_after_a_function_is_over_disturbs_nothing(play):
    def parent(side):
        side.say("late")
        side.put(GangMessage(GangMessageKind.END_CALL, 1))
        side.run(lambda: "next", number=2)
        return side.hear()

    assert play(parent) == (GangMessageKind.RESULT, "next")


def test_its_results_go_through_the_rule_for_arrays_of_jax(play, monkeypatch):
    monkeypatch.setattr(
        array_pickling, "reduce_array", lambda value: (str, ("made",)) if value == 1j else NotImplemented
    )

    def parent(side):
        side.run(lambda: [1j])
        return side.hear()

    assert play(parent) == (GangMessageKind.RESULT, ["made"])


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
def test_what_it_raises_is_told_and_it_goes_on(play, fn, words):
    def parent(side):
        side.run(fn)
        heard = side.hear()
        side.run(lambda: "alive", number=2)
        return heard, side.hear()

    (kind, failure), after = play(parent)
    assert kind is GangMessageKind.EXCEPTION and (failure["error"], failure["message"], failure["status"]) == words
    assert after == (GangMessageKind.RESULT, "alive")


def test_a_traceback_has_the_users_frames_only(play):
    def parent(side):
        side.run(lambda: _raise(Own("x")))
        return side.hear()

    _, failure = play(parent)
    assert failure["home"] == __name__ and "in _raise" in failure["traceback"]
    assert "jaxrun_runtime" not in failure["traceback"]


def test_a_task_that_cannot_be_unpickled_is_told(play):
    def parent(side):
        side.put(GangMessage(GangMessageKind.CALL, 1, Payload(b"garbage")))
        return side.hear()

    kind, failure = play(parent)
    assert kind is GangMessageKind.EXCEPTION and failure["error"] == "UnpicklingError"


# ---- printing


def test_what_is_printed_goes_to_the_parent_and_to_the_log(play, capsys):
    def printing():
        print("one\ntwo")
        print("trouble", file=sys.stderr)
        print("half", end="")
        return sys.stdout.isatty(), sys.stdout.encoding

    def parent(side):
        side.run(printing, print=True)
        return side.hear_all()

    *printed, last = play(parent)
    assert "".join(text for kind, text in printed if kind is GangMessageKind.STDOUT) == "one\ntwo\nhalf"
    assert "".join(text for kind, text in printed if kind is GangMessageKind.STDERR) == "trouble\n"
    assert last == (GangMessageKind.RESULT, (False, sys.stdout.encoding))
    assert capsys.readouterr() == ("one\ntwo\nhalf", "trouble\n")


def test_what_is_printed_goes_to_the_log_only_where_nobody_asked(play, capsys):
    def parent(side):
        side.run(lambda: print("quiet"))
        return side.hear()

    assert play(parent) == (GangMessageKind.RESULT, None)
    assert capsys.readouterr().out == "quiet\n"


def test_a_function_that_fails_has_printed_what_it_had(play):
    def printing():
        print("before", end="", flush=True)
        print(" the end", end="")
        raise Own("x")

    def parent(side):
        side.run(printing, print=True)
        return side.hear_all()

    first, second, (kind, _) = play(parent)
    assert (first, second, kind) == (
        (GangMessageKind.STDOUT, "before"),
        (GangMessageKind.STDOUT, " the end"),
        GangMessageKind.EXCEPTION,
    )


def test_surrogates_and_threads_print_too(play):
    def printing():
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        sys.stdout.write("\udcff\n")

    def parent(side):
        side.run(printing, print=True)
        return side.hear_all()

    heard = [text for kind, text in play(parent) if kind is GangMessageKind.STDOUT]
    assert "".join(heard) == "from a thread\n\\udcff\n"


def test_a_fork_of_the_function_says_nothing_in_its_name(play, capsys):
    def forking():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)  # as it would be in the fork
            print("in the fork")

    def parent(side):
        side.run(forking, print=True)
        return side.hear_all()

    assert play(parent) == [(GangMessageKind.RESULT, None)]
    assert capsys.readouterr().out == "in the fork\n"


# ---- talking


def test_both_sides_may_talk_while_it_runs(play):
    def talking(first):
        talk = current()
        talk.send((talk.rank, talk.size, first))
        return talk.receive() + talk.receive()

    def parent(side):
        side.run(talking, "a")
        said = side.hear()
        side.say("b")
        side.say("c")
        return said, side.hear()

    assert play(parent) == ((GangMessageKind.VALUE, (0, 1, "a")), (GangMessageKind.RESULT, "bc"))


ENDS = {
    "the parent has had enough": (lambda side: side.put(GangMessage(GangMessageKind.END_CALL, 1)), True),
    "the gang is closed": (lambda side: side.put(GangMessage(GangMessageKind.SHUTDOWN, 0)), False),
    "another conversation's words": (lambda side: side.say("x", number=9), True),
}


@pytest.mark.parametrize(("end", "goes_on"), ENDS.values(), ids=ENDS)
def test_who_waits_for_words_that_cannot_come_is_told(play, end, goes_on):
    def waiting():
        try:
            current().receive()
        except calls.CallEnded:
            return "over"

    def parent(side):
        side.run(waiting)
        end(side)
        heard = [side.hear()]
        if goes_on:
            side.run(lambda: "next", number=2)
            heard.append(side.hear())
        return heard

    assert play(parent) == [(GangMessageKind.RESULT, "over"), (GangMessageKind.RESULT, "next")][: 1 + goes_on]


def test_the_end_of_the_parent_ends_it(play, capsys):
    def waiting():
        for attempt in (current().receive, current().receive, lambda: current().send(1)):
            with pytest.raises(calls.CallEnded):
                attempt()
        print("all is over")

    def parent(side):
        side.run(waiting)
        side.connection.close()

    play(parent)
    assert capsys.readouterr().out == "all is over\n"


def test_outside_of_a_gang_there_is_no_conversation(monkeypatch):
    monkeypatch.setattr(calls, "_current", None)
    with pytest.raises(RuntimeError, match="not being run by a gang"):
        calls.current_call()
