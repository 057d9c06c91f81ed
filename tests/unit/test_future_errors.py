"""Exceptions that only a future holds: which ones nobody has asked for, and what is said of them in a hang."""

import asyncio
import concurrent.futures
import gc
import sys

import pytest
from deadlock_samples import FUTEX, SYNC, dump
from fakes import fake_module
from unseen_error_samples import BAD, noted, sentences

from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.protocol.error_chain import ThreadNotes
from jaxrun_runtime import future_errors

IN_BARRIER = dump(f"{SYNC}\nJOB/train.py 30 step")
EVENT_LOOP = """
    PY/selectors.py 452 select
    PY/asyncio/base_events.py 2029 _run_once
    PY/asyncio/base_events.py 683 run_forever
    PY/asyncio/runners.py 195 run
    JOB/train.py 54 step"""
SAID = "its future holds ValueError: bad record in shard 1 (data.py:31 load), for which nobody has asked"


@pytest.fixture
def future(monkeypatch):
    """A class of futures that are watched."""

    class Watched(concurrent.futures.Future):
        pass

    future_errors._noted.clear()
    module = fake_module("concurrent.futures._base", Future=Watched)
    monkeypatch.setitem(sys.modules, "concurrent.futures._base", module)
    future_errors.watch()
    yield Watched
    future_errors._noted.clear()


def fail(future, text):
    try:
        raise ValueError(text)
    except ValueError as error:
        future.set_exception(error)
    return future


def asks_result(one):
    with pytest.raises(ValueError):
        one.result()


@pytest.mark.parametrize("ask", [asks_result, lambda one: one.exception(), lambda one: one.exception(timeout=1)])
def test_the_error_of_a_future_counts_until_somebody_asks_for_it(future, ask):
    assert future_errors.oldest_error() is None
    first, second = fail(future(), "first"), fail(future(), "second")
    future().set_result(1)
    assert str(future_errors.oldest_error()) == "first"
    ask(first)
    assert str(future_errors.oldest_error()) == "second"
    ask(second)
    assert future_errors.oldest_error() is None


def test_an_error_that_passes_through_another_future_counts_where_nobody_has_asked(future):
    inner, outer = fail(future(), "deep"), future()
    try:
        inner.result()
    except ValueError as error:
        outer.set_exception(error)
    assert str(future_errors.oldest_error()) == "deep"
    asks_result(outer)
    assert future_errors.oldest_error() is None


def test_a_future_that_nobody_holds_and_other_values_are_left_alone(future):
    fail(future(), "gone")
    gc.collect()
    odd = future()
    odd.set_exception(None)
    assert future_errors.oldest_error() is None and odd.exception() is None


class _Task:
    """A task of asyncio, which knows whether somebody has asked."""

    def __init__(self, error, *, is_asked=False, is_done=True):
        self._exception, self._log_traceback, self.done = error, not is_asked, lambda: is_done


def test_asyncio_knows_itself_who_has_asked(future, monkeypatch):
    assert all(hasattr(asyncio.Task, name) for name in ("_exception", "_log_traceback", "done"))
    tasks = [_Task(ValueError("asked"), is_asked=True), _Task(None, is_done=False), _Task(ValueError("unseen"))]
    monkeypatch.setitem(sys.modules, "asyncio.tasks", fake_module("asyncio.tasks", _scheduled_tasks=tasks))
    assert str(future_errors.oldest_error()) == "unseen"


@pytest.mark.parametrize(
    ("frames", "does"),
    [
        ("PY/queue.py 202 get\nJOB/train.py 54 step", "waits for data (queue.get) at train.py:54 step"),
        ("PY/threading.py 359 wait\nJOB/train.py 54 step", "waits for a lock or another of its threads"),
        (EVENT_LOOP, "waits in its event loop (asyncio.run) at train.py:54 step"),
    ],
)
def test_a_rank_that_waits_is_reported_with_what_its_future_holds(frames, does):
    (told,) = sentences(noted(frames, main=ThreadNotes(kept=(BAD,))), IN_BARRIER)
    assert told.startswith(f"rank 0 {does}") and f", but {SAID}, and rank 1 waits for it in a barrier" in told
    assert told.endswith(": future.result() raises it; if its task was to bring the data, no more will come")


def test_a_rank_that_waits_for_other_ranks_is_not_accused_for_its_futures():
    waits = noted(f"{SYNC}\nJOB/train.py 30 step", main=ThreadNotes(kept=(BAD,)))
    assert "future" not in sentences(waits, dump("PY/queue.py 202 get\nJOB/train.py 9 load"))[0]
    assert sentences(waits, IN_BARRIER) == []


def test_a_coroutine_that_computes_does_not_wait_in_its_event_loop():
    text = dump(f"JOB/train.py 9 compute\n{EVENT_LOOP}".replace("    PY/selectors.py 452 select\n", ""))
    assert find_rank_state(1, text, "0").activity is Activity.ELSEWHERE
    assert find_rank_state(1, dump(EVENT_LOOP), FUTEX).activity is Activity.EVENTS
