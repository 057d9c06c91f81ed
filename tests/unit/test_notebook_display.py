"""The output of a gang in a notebook, as its ranks print and while they work, and the errors of its ranks."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxrun.frontends.gang.call_events import Printed
from jaxrun.frontends.gang.gang_errors import RemoteFailure
from jaxrun.frontends.gang.notebook_display import (
    NotebookDisplay,
    Transcript,
    fold,
    format_failures,
    format_progress,
    merge_by_rank,
)
from jaxrun.text import parse_ranks


def plain(transcript):
    return transcript.bundle()["text/plain"]


def transcript_of(*texts):
    transcript = Transcript()
    for rank, text in texts:
        transcript.add(rank, "out", text)
    transcript.finish()
    return transcript


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_equal_lines_of_all_ranks_are_one_line_in_any_order(order):
    transcript = transcript_of(*((rank, "loss 0.3\nloss 0.2\n") for rank in order))
    assert plain(transcript) == "[0-2] loss 0.3\n[0-2] loss 0.2"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ([(0, "tick\ntick\n"), (1, "tick\n")], "[0-1] tick\n[0] tick"),  # matched by their count
        ([(0, "10%\r50%\r100%\r\ndone\n")], "[0] 100%\n[0] done"),
    ],
)
def test_lines_as_they_are_shown(printed, shown):
    assert plain(transcript_of(*printed)) == shown


def test_lines_that_rank_0_has_not_printed_are_folded_by_rank_until_it_does():
    transcript = transcript_of((2, "mine\nboth\n"), (0, "zero\n"), (1, "both\n"))
    bundle = transcript.bundle()
    assert bundle["text/plain"] == "[0] zero\nranks 1-2 printed 2 other lines:\n[1-2] both\n[2] mine"
    before, _, inside = bundle["text/html"].partition("<details>")
    assert "[0] zero" in before
    assert "[2] mine" in inside
    transcript = transcript_of((1, "late\n"))
    assert "printed 1 line:" in plain(transcript)
    transcript.add(0, "out", "late\n")
    assert plain(transcript) == "[0-1] late"
    assert "text/html" not in transcript.bundle()


def test_a_line_is_shown_when_it_ends():
    transcript = Transcript()
    transcript.add(0, "out", "a")
    assert plain(transcript) == ""
    transcript.add(0, "err", "other\n")
    transcript.add(0, "out", "b\nc")
    assert plain(transcript) == "[0] other\n[0] ab"
    transcript.finish()
    assert plain(transcript) == "[0] other\n[0] ab\n[0] c"


def test_the_shown_text_is_limited(monkeypatch):
    monkeypatch.setattr("jaxrun.frontends.gang.notebook_display._MAX_LINES", 3)
    transcript = transcript_of((0, "1\n2\n3\n4\n5\n"), (1, "2\n6\n"))
    assert transcript.omitted_lines == 3
    assert plain(transcript) == "[0] 1\n[0-1] 2\n[0] 3"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), max_size=60))
def test_no_line_is_lost_or_made_up(printed):
    transcript = transcript_of(*((rank, f"{text}\n") for rank, text in printed))
    main, _, others = plain(transcript).partition("printed ")
    found = [re.match(r"\[([^\]]+)\] (.)$", line) for line in (main + others).splitlines()]
    lines = [(rank, line[2]) for line in found if line for part in parse_ranks(line[1], "") for rank in part]
    assert sorted(lines) == sorted(printed)
    assert all(line.startswith("[0") for line in main.splitlines() if line.startswith("["))
    assert not any(line.startswith("[0") for line in others.splitlines())


@pytest.mark.parametrize(
    ("done", "missing", "text"),
    [
        ((), (0, 1, 2, 3), "4 ranks running, 12 s"),
        ((), (0,), "1 rank running, 12 s"),
        ((0, 1), (2, 3), "ranks 0-1 done, ranks 2-3 running, 12 s"),
    ],
)
def test_progress_names_the_running_ranks(done, missing, text):
    assert format_progress(done, missing, 12.3) == text


def test_html_is_escaped_and_has_no_colours():
    shown = fold("<a>", "\x1b[31mred\x1b[0m & <b>")["text/html"]
    assert "&lt;a&gt;" in shown
    assert "<pre>red &amp; &lt;b&gt;</pre>" in shown


def test_equal_values_are_shown_once_and_others_folded_below_rank_0s():
    assert merge_by_rank({0: {"text/plain": "7"}, 1: {"text/plain": "7"}}) == {"text/plain": "7"}
    assert merge_by_rank({0: {}, 1: {}}) == {}
    shown = merge_by_rank(
        {0: {"text/plain": "0", "text/html": "<b>0</b>"}, 1: {"text/plain": "1"}, 2: {"text/plain": "1"}}
    )
    assert shown["text/plain"] == "0\nother on ranks 1-2:\n[1-2] 1"
    assert shown["text/html"].startswith("<b>0</b><details>")
    assert merge_by_rank({0: {}, 1: {"text/plain": "1"}})["text/plain"] == "None\nother on rank 1:\n[1] 1"


# ---- while a call runs


class FakeNotebook:
    """A notebook's `outputs`, as plain text, of a call on two ranks; the time is by hand."""

    main_rank = 0

    def __init__(self):
        self._outputs = {}
        self.display_pub = self
        self.now = 1000.0
        self.returned = {}
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
        self.returned |= dict.fromkeys(ranks)
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
    monkeypatch.setattr("jaxrun.frontends.gang.notebook_display.time", notebook)
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


def test_much_output_is_shown_less_often(fake):
    fake.after(0)
    fake.prints(0, "".join(f"{number:0500}\n" for number in range(1600)))
    fake.after(1)
    fake.prints(0, "more\n")
    pause = fake.after(1)
    assert pause == pytest.approx(2, rel=0.1) and "more" not in fake.outputs[0]
    fake.after(pause)
    assert "more" in fake.outputs[0]


@pytest.mark.parametrize(
    ("healthy", "returned", "text"),
    [
        (True, (0, 1), "the gang continues"),
        (False, (0, 1), "starts again at its next use"),
        (False, (), "ranks 0-1 could not be interrupted"),
    ],
)
def test_after_an_interrupt_the_state_of_the_gang_is_shown(fake, healthy, returned, text):
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


def test_an_error_of_one_rank_names_it_and_the_cell_and_then_the_others_and_equal_errors_are_shown_once():
    assert format_failures([_BAD], 4, "rank 0 waits") == (
        "rank 1 raised\n" + _TRACEBACK.replace('File "In[8]", line 6', "Cell In[8], line 6") + "rank 0 waits"
    )
    exits = replace(_BAD, error="SystemExit", message="3", traceback="")
    assert format_failures([exits], 4) == "rank 1 raised\nSystemExit: 3"
    same = [_BAD, replace(_BAD, rank=2, time=1.0)]
    assert format_failures(same, 4).startswith("ranks 1-2 raised the same\n")
    assert format_failures(same, 2).startswith("all ranks raised the same\n")


def test_the_first_error_in_time_comes_first_and_the_others_have_a_line_each():
    text = format_failures([_LATER, _BAD], 2)
    assert text.startswith("rank 1 raised\n") and text.endswith("ValueError: bad\nrank 0 raised KeyError: 'k'")
