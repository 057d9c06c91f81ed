"""What is shown: lines of the ranks on one screen, prose as the terminal wants it, and ranks and seconds as text."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.records.output.line_buffer import LineBuffer
from jaxrun.records.output.screen import Interleaver
from jaxrun.terminal import A_FILE, PROSE_WIDTH, TerminalFormat, terminal_width, wrap_prose
from jaxrun.text import format_ranges, format_ranks, format_ranks_on_hosts, format_seconds, format_signal, parse_ranks

# Few letters, so that line ends, returns and Gloo's text meet often.
GLOO = b"[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n"
pieces = st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\x00", b"\xff\xfe", b"[3] ", b"[Gloo]", GLOO])
texts = st.lists(pieces, max_size=40).map(b"".join)


def chunked(text: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def split(chunks: list[bytes]) -> bytes:
    lines = LineBuffer()
    return b"".join([*map(lines.feed, chunks), lines.finish()])


def slowly(text: bytes) -> bytes:
    """The same by the rule, line by line."""
    *lines, last = text.split(b"\n")
    if last.strip(b"\r"):
        lines.append(last)
    kept = [line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines]
    return b"".join(line.replace(GLOO, b"\n") for line in kept if line != GLOO)


@given(texts, st.lists(st.integers(0, 500), max_size=12))
def test_any_chunking_gives_the_lines_of_the_slow_rule(text: bytes, cuts: list[int]) -> None:
    assert split(chunked(text, cuts)) == slowly(text)


@given(texts, st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=12))
def test_showing_partials_loses_no_byte_of_a_stream_that_is_alone(text: bytes, cuts: list[tuple[int, bool]]) -> None:
    text = text.replace(b"\r", b"").replace(GLOO, b"gloo\n").replace(b"[Gloo]", b"[gloo]")
    lines, interleaver = LineBuffer(), Interleaver()
    screen = b""
    for chunk, (_, show) in zip(chunked(text, [cut for cut, _ in cuts]), [*cuts, (0, False)], strict=True):
        screen += interleaver.render("v", b"> ", lines.feed(chunk))
        if show and (partial := lines.flush_partial()):
            screen += interleaver.render("v", b"> ", partial)
    final = lines.finish()
    screen += interleaver.render("v", b"> ", final)
    assert screen == b"".join(b"> " + line + b"\n" for line in split([text]).split(b"\n")[:-1])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"10%\r50%\r100%\n", b"100%\n"),
        (b"\r10%\r50%\r\n", b"50%\n"),
        (b"one\r\ntwo\r\r\n", b"one\ntwo\n"),
        (b"\n\n\r\n", b"\n\n\n"),
        (b"no newline", b"no newline\n"),
        (b"a\rb\nc\rd", b"b\nd\n"),
    ],
)
def test_a_return_collapses_its_line_to_the_last_state(text: bytes, shown: bytes) -> None:
    assert split([text]) == shown
    assert split([bytes([byte]) for byte in text]) == shown


def test_returns_without_end_cost_neither_memory_nor_time() -> None:
    lines = LineBuffer()
    for _ in range(20):
        assert lines.feed(b"\r" * 2**18) == b""
        assert lines.feed(b"x\r" * 2**17) == b""
    assert len(lines.pending) <= 3
    assert lines.feed(b"\r" * 2**18 + b"x\n") == b"x\n"
    assert lines.feed(b"y" * 2**20 + b"\r\n") == b"y" * 2**20 + b"\n"


def test_gloo_in_fragments_is_folded_and_its_fragments_are_not_shown() -> None:
    lines = LineBuffer()
    fragments = re.findall(rb"\d+|\D+", GLOO)
    for fragment in fragments[:-1]:
        assert lines.feed(fragment) == b""
        assert not lines.has_partial
    assert lines.feed(b"\nloss 1\n[Gloo] is what I say\n") == b"loss 1\n[Gloo] is what I say\n"


def test_gloo_ends_an_unfinished_line() -> None:
    assert split([b"step 1 " + GLOO]) == b"step 1 \n"
    lines = LineBuffer()
    lines.feed(b"step 1 ")
    assert lines.flush_partial() == b"step 1 "
    assert lines.feed(GLOO) == b"\n"


def play(interleaver: Interleaver, *turns: tuple[str, bytes]) -> bytes:
    return b"".join(interleaver.render(owner, owner.encode() + b": ", text) for owner, text in turns)


def test_another_stream_ends_an_unfinished_line_and_the_rest_gets_its_prefix_again() -> None:
    assert play(Interleaver(), ("a", b"half"), ("b", b"whole\n"), ("a", b"half\n")) == b"a: half\nb: whole\na: half\n"


def test_a_newline_that_an_interruption_has_written_is_not_written_twice() -> None:
    turns = ("a", b"half"), ("b", b"x\n"), ("a", b"\n"), ("a", b"\nnext\n")
    assert play(Interleaver(), *turns) == b"a: half\nb: x\na: \na: next\n"


@pytest.mark.parametrize(("overwrites", "between"), [(False, b"\n"), (True, b"\r\x1b[K")])
def test_a_progress_bar_that_was_shown_is_drawn_anew(overwrites: bool, between: bytes) -> None:
    lines, interleaver = LineBuffer(), Interleaver(overwrites=overwrites)
    assert lines.feed(b"10%\r50%\r") == b""
    assert lines.is_progress_bar
    screen = interleaver.render("a", b"a: ", lines.flush_partial())
    assert not lines.has_partial
    assert lines.feed(b"60%") == b""
    screen += interleaver.render("a", b"a: ", lines.flush_partial())
    screen += interleaver.render("a", b"a: ", lines.feed(b"\r100%\n"))
    assert screen == b"a: 50%" + between + b"a: 60%" + between + b"a: 100%\n"


def test_a_bar_that_is_done_where_it_was_shown_ends_its_line() -> None:
    lines, interleaver = LineBuffer(), Interleaver()
    lines.feed(b"100%\r")
    screen = interleaver.render("a", b"a: ", lines.flush_partial())
    screen += interleaver.render("a", b"a: ", lines.feed(b"\nok\n"))
    assert screen == b"a: 100%\na: ok\n"


# ---- prose


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


# ---- ranks, seconds and signals as text, and ranks read back


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 2, 1, 1], "0-2, 5"), ([7, 5, 3], "3, 5, 7")],
)
def test_runs_are_compacted(ranks, text):
    assert format_ranges(ranks) == text


def test_ranks_are_named_with_their_hosts_where_there_are_several():
    assert (format_ranks(iter([4])), format_ranks([4, 5])) == ("rank 4", "ranks 4-5")
    hosts = {0: "h1", 1: "h1", 2: "h2", 3: "h3"}
    assert format_ranks_on_hosts([2], hosts) == "rank 2 (h2)"
    assert format_ranks_on_hosts(iter([3, 0, 1]), hosts) == "ranks 0-1, 3 (h1, h3)"
    assert format_ranks_on_hosts([0, 1], {0: "h1", 1: "h1"}) == "ranks 0-1"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1))
def test_any_ranges_are_read_as_they_are(spans):
    text = ", ".join(f"{first}-{first + more}" if more else str(first) for first, more in spans)
    assert parse_ranks(text, "--x") == tuple(range(first, first + more + 1) for first, more in spans)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "--x takes ranks such as 1-3,7")
            for text in ("", "a", "1-", "-1", "1,,2", "1-2-3", "1.5", "٣", "0x1")
        ),
        ("1,7-3", "7-3 runs backwards; write 3-7"),
    ],
)
def test_what_is_not_ranks_is_named(text, message):
    with pytest.raises(UsageError, match=message):
        parse_ranks(text, "--x")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "0.00 s"),
        (0.0312, "0.03 s"),
        (0.996, "1.0 s"),
        (41.31, "41.3 s"),
        (119.96, "2 min 0 s"),
        (3725, "1 h 2 min"),
    ],
)
def test_seconds_keep_two_or_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_signals_have_names() -> None:
    names = [format_signal(number) for number in (9, 34, 37, 99)]
    assert names == ["SIGKILL (9)", "SIGRTMIN (34)", "SIGRTMIN+3 (37)", "signal 99"]
