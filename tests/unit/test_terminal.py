"""Prose is wrapped at a terminal's width, and coloured where the terminal wants that."""

import fcntl
import os
import pty
import struct
import termios
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.terminal import A_FILE, PROSE_WIDTH, TerminalFormat, terminal_width, wrap_prose

WORDS = st.lists(st.text("abc/-.", min_size=1, max_size=30), min_size=1, max_size=60).map(" ".join)
TABLE = f"  1 rank  0  train.py:88 step   {'in JAX: ' * 20}"


@contextmanager
def a_terminal(columns):
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


@given(WORDS, st.integers(40, 200))
def test_prose_that_was_wrapped_for_a_file_is_wrapped_for_the_terminal(text, width):
    assert TerminalFormat(width).rewrap(wrap_prose(text)) == wrap_prose(text, width)


@given(WORDS)
def test_in_a_file_nothing_changes(text):
    assert A_FILE.rewrap(text) == text
    assert all(len(line) <= PROSE_WIDTH for line in wrap_prose(text).split("\n"))


def test_tables_and_short_lines_stay():
    text = f"2 ranks, 2 groups\n{TABLE}\nrank 1 is the one that differs."
    assert TerminalFormat(50).rewrap(text) == text


def test_a_line_is_not_broken_within_a_path():
    path = "/scratch/" + "x" * 120
    assert TerminalFormat(40).rewrap(f"logs: {path}") == f"logs:\n{path}"


@pytest.mark.parametrize(("environ", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_terminal_has_colours_unless_the_user_wants_none(environ, colour):
    with a_terminal(72) as fd:
        assert TerminalFormat.at(fd, environ) == TerminalFormat(72, colour)


def test_a_pipe_has_neither_width_nor_colours():
    read, write = os.pipe()
    assert TerminalFormat.at(write, {}) == A_FILE and terminal_width(read) is None
    os.close(read)
    os.close(write)
    assert TerminalFormat.at(write, {}) == A_FILE


def test_each_line_is_painted_for_itself():
    assert TerminalFormat(80, colour=True).dim("a\n\nb") == "\x1b[2ma\x1b[0m\n\n\x1b[2mb\x1b[0m"
    assert TerminalFormat(80).red("a") == A_FILE.red("a") == "a"
