"""The outputs of a notebook while a gang works, and the errors of its ranks."""

from dataclasses import replace

import pytest

from jaxrun.frontends.gang.call_events import Printed
from jaxrun.frontends.gang.exceptions import RemoteFailure
from jaxrun.frontends.notebook.display import NotebookDisplay, fold_other_errors, format_main_error
from jaxrun.frontends.notebook.transcript import PAGE_LINES


class FakeNotebook:
    """A notebook's `outputs`, as plain text, of a call on two ranks; the time is by hand."""

    main_rank = 0

    def __init__(self):
        self._outputs = {}
        self.display_pub = self
        self.now = 1000.0
        self.outcomes = {}
        self.running = (0, 1)
        self._display = NotebookDisplay(self)

    def monotonic(self):
        return self.now

    def publish(self, data, metadata, *, transient, update):
        name = transient.get("display_id", object())
        assert update is (name in self._outputs)
        self._outputs[name] = data["text/plain"]

    @property
    def outputs(self):
        return list(self._outputs.values())

    def returns(self, *ranks):
        self.outcomes |= dict.fromkeys(ranks)
        self.running = tuple(r for r in self.running if r not in ranks)

    def prints(self, rank, text):
        self._display.show(Printed(rank, "out", text.encode()))

    def after(self, seconds=0.0):
        """Refresh after so many seconds."""
        self.now += seconds
        return self._display.refresh(self)

    def end_call(self, error=None, healthy=True):
        self._display.end_call(self, error, healthy=healthy)


@pytest.fixture
def fake(monkeypatch):
    notebook = FakeNotebook()
    monkeypatch.setattr("jaxrun.frontends.notebook.display.time", notebook)
    notebook.now += 100  # between the start and the first call
    return notebook


def test_a_short_call_shows_what_was_printed_and_nothing_else_and_each_has_outputs_of_its_own(fake):
    fake.after(0)
    fake.prints(0, "hello\n")
    fake.prints(1, "hello\n")
    fake.after(1)
    fake.end_call()
    assert fake.outputs == ["[0-1] hello"]
    fake.after(100)
    fake.prints(0, "two\n")
    fake.after(1)
    fake.end_call()
    assert fake.outputs == ["[0-1] hello", "[0] two"]


def test_a_call_that_shows_nothing_leaves_nothing(fake):
    fake.after(1.9)
    fake.end_call()
    assert fake.outputs == []


def test_output_is_shown_while_the_call_runs_but_not_at_every_line(fake):
    fake.after(0)
    fake.prints(0, "one\n")
    pause = fake.after(0)
    assert fake.outputs == []
    fake.after(pause)
    assert fake.outputs == ["[0] one"]


def test_a_long_call_names_the_running_ranks(fake):
    fake.after(0)
    assert fake.after(1.99) == pytest.approx(0.01)
    assert fake.outputs == []
    fake.after(0.51)
    assert fake.outputs == ["2 ranks running, 2 s"]
    fake.returns(0)
    fake.prints(1, "late\n")
    fake.after(2)
    assert fake.outputs == ["rank 1 printed 1 line:\n[1] late\nrank 0 done, rank 1 running, 4 s"]
    fake.returns(1)
    fake.end_call()
    assert fake.outputs == ["rank 1 printed 1 line:\n[1] late"]


def test_a_long_call_without_output_says_how_long_it_took(fake):
    fake.after(0)
    fake.after(3)
    fake.returns(0, 1)
    fake.end_call()
    assert fake.outputs == ["2 ranks done in 3.0 s"]


def test_who_is_running_stands_below_the_last_page_only(fake):
    fake.after(0)
    fake.prints(0, "x\n" * (PAGE_LINES - 1))
    fake.after(3)
    for _ in range(2):
        fake.prints(0, "x\n")
        fake.after(1)
    first, second = fake.outputs
    assert "running" not in first
    assert second == "[0] x\n2 ranks running, 5 s"


@pytest.mark.parametrize(
    ("healthy", "returned", "text"),
    [
        (True, (0, 1), "the gang goes on"),
        (False, (0, 1), "started anew when it is used next"),
        (False, (), "ranks 0-1 could not be interrupted"),
    ],
)
def test_an_interrupt_says_what_became_of_the_gang(fake, healthy, returned, text):
    fake.after(0)
    fake.returns(*returned)
    fake.end_call(KeyboardInterrupt(), healthy)
    (shown,) = fake.outputs
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


def test_an_error_of_one_rank_names_it_and_the_cell_and_then_the_others():
    assert format_main_error([_BAD], 4, ["rank 0 waits"]) == (
        "rank 1 raised\n" + _TRACEBACK.replace('File "In[8]", line 6', "Cell In[8], line 6") + "rank 0 waits"
    )
    exits = replace(_BAD, error="SystemExit", message="3", traceback="")
    assert format_main_error([exits], 4) == "rank 1 raised\nSystemExit: 3"


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
