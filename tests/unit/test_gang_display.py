"""The ranks' output on the streams of this process: whole lines, each with its rank."""

import pytest

from jaxrun.gang.call_events import Printed
from jaxrun.gang.display import TerminalDisplay


@pytest.fixture
def display():
    return TerminalDisplay()


def end(display):
    display.end_call(None, None, healthy=True)


def test_a_line_is_shown_with_its_rank_on_its_stream(display, capsys):
    display.show(Printed(0, "out", b"hello\n"))
    display.show(Printed(12, "err", b"oh\n"))
    assert capsys.readouterr() == ("[0] hello\n", "[12] oh\n")


def test_several_lines_come_with_one_prefix_each(display, capsys):
    display.show(Printed(1, "out", b"a\n\nb\n"))
    assert capsys.readouterr().out == "[1] a\n[1] \n[1] b\n"


def test_a_line_waits_until_it_is_whole(display, capsys):
    display.show(Printed(0, "out", b"loss "))
    display.show(Printed(1, "out", b"other\n"))
    display.show(Printed(0, "err", b"apart\n"))
    assert capsys.readouterr() == ("[1] other\n", "[0] apart\n")
    display.show(Printed(0, "out", b"0.5\nnext"))
    assert capsys.readouterr().out == "[0] loss 0.5\n"


def test_what_was_not_ended_is_shown_at_the_end_and_once(display, capsys):
    display.show(Printed(1, "out", b"one"))
    display.show(Printed(0, "err", b"two"))
    end(display)
    assert capsys.readouterr() == ("[1] one\n", "[0] two\n")
    end(display)
    display.show(Printed(1, "out", b"new\n"))
    assert capsys.readouterr() == ("[1] new\n", "")


def test_bytes_that_are_no_text_are_shown_as_such(display, capsys):
    display.show(Printed(0, "out", b"\xff\xc3\xa9\n"))
    assert capsys.readouterr().out == "[0] \ufffd\u00e9\n"
