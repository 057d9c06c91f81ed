"""The outputs of a notebook while a gang works, and the errors of its ranks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxrun.gang.call_events import Printed
from jaxrun.gang.exceptions import RemoteFailure
from jaxrun.notebook.display import NotebookDisplay, fold_other_errors, format_main_error
from jaxrun.notebook.transcript import PAGE_LINES


class _Notebook:
    """Its outputs, as plain text, in their order."""

    def __init__(self):
        self._outputs = {}
        self.display_pub = self

    def publish(self, data, metadata, *, transient, update):
        name = transient.get("display_id", object())
        assert update is (name in self._outputs)
        self._outputs[name] = data["text/plain"]

    @property
    def outputs(self):
        return list(self._outputs.values())


class _Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class _Call:
    main_rank = 0

    def __init__(self, size):
        self.outcomes = {}
        self.running = tuple(range(size))

    def returns(self, rank):
        self.outcomes[rank] = None
        self.running = tuple(r for r in self.running if r != rank)


@pytest.fixture
def fake(monkeypatch):
    clock, notebook = _Clock(), _Notebook()
    monkeypatch.setattr("jaxrun.notebook.display.time", clock)
    display = NotebookDisplay(notebook)
    clock.now += 100  # between the start and the first call

    def refresh(seconds=0.0):
        clock.now += seconds
        return display.refresh(call)

    call = _Call(2)
    return SimpleNamespace(notebook=notebook, display=display, call=call, refresh=refresh)


def _print(fake, rank, text):
    fake.display.show(Printed(rank, "out", text.encode()))


def _end(fake, error=None, healthy=True):
    fake.display.end_call(fake.call, error, healthy=healthy)


def test_a_short_call_shows_what_was_printed_and_nothing_else(fake):
    fake.refresh()
    _print(fake, 0, "hello\n")
    _print(fake, 1, "hello\n")
    fake.refresh(1)
    _end(fake)
    assert fake.notebook.outputs == ["[0-1] hello"]


def test_a_call_that_shows_nothing_leaves_nothing(fake):
    fake.refresh(1.9)
    _end(fake)
    assert fake.notebook.outputs == []


def test_output_is_shown_while_the_call_runs_but_not_at_every_line(fake):
    fake.refresh()
    _print(fake, 0, "one\n")
    pause = fake.refresh()
    assert fake.notebook.outputs == []
    fake.refresh(pause)
    assert fake.notebook.outputs == ["[0] one"]


def test_a_long_call_names_the_running_ranks(fake):
    fake.refresh()
    assert fake.refresh(1.99) == pytest.approx(0.01)
    assert fake.notebook.outputs == []
    fake.refresh(0.51)
    assert fake.notebook.outputs == ["2 ranks running, 2 s"]
    fake.call.returns(0)
    _print(fake, 1, "late\n")
    fake.refresh(2)
    assert fake.notebook.outputs == ["rank 1 printed 1 line:\n[1] late\nrank 0 done, rank 1 running, 4 s"]
    fake.call.returns(1)
    _end(fake)
    assert fake.notebook.outputs == ["rank 1 printed 1 line:\n[1] late"]


def test_a_long_call_without_output_says_how_long_it_took(fake):
    fake.refresh()
    fake.refresh(3)
    fake.call.returns(0)
    fake.call.returns(1)
    _end(fake)
    assert fake.notebook.outputs == ["2 ranks done in 3.0 s"]


def test_who_is_running_stands_below_the_last_page_only(fake):
    fake.refresh()
    _print(fake, 0, "x\n" * (PAGE_LINES - 1))
    fake.refresh(3)
    _print(fake, 0, "x\n")
    fake.refresh(1)
    _print(fake, 0, "x\n")
    fake.refresh(1)
    first, second = fake.notebook.outputs
    assert "running" not in first
    assert second == "[0] x\n2 ranks running, 5 s"


def test_each_call_has_outputs_and_a_time_of_its_own(fake):
    fake.refresh()
    _print(fake, 0, "one\n")
    _end(fake)
    fake.refresh(100)
    _print(fake, 0, "two\n")
    fake.refresh(1)
    _end(fake)
    assert fake.notebook.outputs == ["[0] one", "[0] two"]


@pytest.mark.parametrize(
    ("healthy", "stuck", "text"),
    [
        (True, False, "the gang goes on"),
        (False, False, "started anew when it is used next"),
        (False, True, "ranks 0-1 could not be interrupted"),
    ],
)
def test_an_interrupt_says_what_became_of_the_gang(fake, healthy, stuck, text):
    fake.refresh()
    if not stuck:
        fake.call.returns(0)
        fake.call.returns(1)
    _end(fake, KeyboardInterrupt(), healthy)
    (shown,) = fake.notebook.outputs
    assert text in shown


# ---- errors of a cell

_TRACEBACK = """Traceback (most recent call last):
  File "In[8]", line 6, in <module>
    f(3)
  File "/home/me/model.py", line 4, in f
    raise ValueError("bad")
ValueError: bad
"""
_BAD = RemoteFailure(1, "h1", "ValueError", "bad", _TRACEBACK, (), 2.0, "builtins", b"")
_LATER = replace(_BAD, rank=0, error="KeyError", message="'k'\nmore", traceback="KeyError: 'k'\n", time=3.0)


def test_an_error_of_one_rank_names_it_and_the_cell():
    text = format_main_error([_BAD], 4)
    assert text.splitlines()[0] == "rank 1 raised"
    assert "\n  Cell In[8], line 6, in <module>\n" in text
    assert '\n  File "/home/me/model.py", line 4, in f\n' in text
    assert text.endswith("\nValueError: bad")


def test_equal_errors_are_shown_once():
    same = [_BAD, replace(_BAD, rank=2, time=1.0)]
    assert format_main_error(same, 4).startswith("ranks 1-2 raised the same\n")
    assert format_main_error(same, 2).startswith("all ranks raised the same\n")
    assert fold_other_errors(same) == []


def test_the_first_error_in_time_comes_first_and_others_are_folded():
    text = format_main_error([_LATER, _BAD], 2)
    assert text.startswith("rank 1 raised; other errors of rank 0 are folded above\n")
    assert "KeyError" not in text
    (other,) = fold_other_errors([_LATER, _BAD])
    assert "<summary>rank 0 raised KeyError: &#x27;k&#x27;</summary>" in other["text/html"]


def test_lines_about_the_others_come_last():
    assert format_main_error([_BAD], 4, ["rank 0 waits"]).endswith("ValueError: bad\nrank 0 waits")


def test_an_error_without_a_traceback_is_shown_by_its_name():
    exits = replace(_BAD, error="SystemExit", message="3", traceback="")
    assert format_main_error([exits], 4) == "rank 1 raised\nSystemExit: 3"
