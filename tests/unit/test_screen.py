"""What is shown of the ranks' output: their lines on one screen, without what native libraries write into it."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.records.output.line_buffer import LineBuffer
from jaxrun.records.output.repeated_usage import HOLD_S, RepeatedUsage, shared_prefix
from jaxrun.records.output.screen import Interleaver

# Few letters, so that line ends, returns and Gloo's text meet often.
GLOO = b"[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n"
pieces = st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\x00", b"\xff\xfe", b"[3] ", b"[Gloo]", GLOO])
texts = st.lists(pieces, max_size=40).map(b"".join)


def chunked(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def split(chunks):
    lines = LineBuffer()
    return b"".join([*map(lines.feed, chunks), lines.finish()])


def slowly(text):
    """The same by the rule, line by line."""
    *lines, last = text.split(b"\n")
    if last.strip(b"\r"):
        lines.append(last)
    kept = [line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines]
    return b"".join(line.replace(GLOO, b"\n") for line in kept if line != GLOO)


@given(texts, st.lists(st.integers(0, 500), max_size=12))
def test_any_chunking_gives_the_lines_of_the_slow_rule(text, cuts):
    assert split(chunked(text, cuts)) == slowly(text)


@given(texts, st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=12))
def test_showing_partials_loses_no_byte_of_a_stream_that_is_alone(text, cuts):
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
def test_a_return_collapses_its_line_to_the_last_state(text, shown):
    assert split([text]) == shown
    assert split([bytes([byte]) for byte in text]) == shown


def test_returns_without_end_cost_neither_memory_nor_time():
    lines = LineBuffer()
    for _ in range(20):
        assert lines.feed(b"\r" * 2**18) == b""
        assert lines.feed(b"x\r" * 2**17) == b""
    assert len(lines.pending) <= 3
    assert lines.feed(b"\r" * 2**18 + b"x\n") == b"x\n"
    assert lines.feed(b"y" * 2**20 + b"\r\n") == b"y" * 2**20 + b"\n"


def test_gloo_in_fragments_is_folded_and_its_fragments_are_not_shown():
    lines = LineBuffer()
    fragments = re.findall(rb"\d+|\D+", GLOO)
    for fragment in fragments[:-1]:
        assert lines.feed(fragment) == b""
        assert not lines.has_partial
    assert lines.feed(b"\nloss 1\n[Gloo] is what I say\n") == b"loss 1\n[Gloo] is what I say\n"


def test_gloo_ends_an_unfinished_line():
    assert split([b"step 1 " + GLOO]) == b"step 1 \n"
    lines = LineBuffer()
    lines.feed(b"step 1 ")
    assert lines.flush_partial() == b"step 1 "
    assert lines.feed(GLOO) == b"\n"


@pytest.mark.parametrize(("overwrites", "between"), [(False, b"\n"), (True, b"\r\x1b[K")])
def test_a_progress_bar_that_was_shown_is_drawn_anew(overwrites, between):
    lines, interleaver = LineBuffer(), Interleaver(overwrites=overwrites)
    assert lines.feed(b"10%\r50%\r") == b""
    assert lines.is_progress_bar
    screen = interleaver.render("a", b"a: ", lines.flush_partial())
    assert not lines.has_partial
    assert lines.feed(b"60%") == b""
    screen += interleaver.render("a", b"a: ", lines.flush_partial())
    screen += interleaver.render("a", b"a: ", lines.feed(b"\r100%\n"))
    assert screen == b"a: 50%" + between + b"a: 60%" + between + b"a: 100%\n"


def test_on_a_terminal_whole_lines_of_others_go_above_an_unfinished_line():
    screen = Interleaver(overwrites=True)
    shown = screen.render(0, b"[0] ", b"loss ")
    shown += screen.render(1, b"[1] ", b"one\ntwo\n")
    shown += screen.render(0, b"[0] ", b"of step 3: ")
    shown += screen.render(1, b"[1] ", b"three\n")
    shown += screen.render(0, b"[0] ", b"3.25\n")
    assert _as_seen(shown) == ["[1] one", "[1] two", "[1] three", "[0] loss of step 3: 3.25"]


@pytest.mark.parametrize(("line", "other"), [(b"x" * 80, b"whole\n"), (b"loss ", b"also unfinished ")])
def test_on_a_terminal_a_line_that_cannot_be_drawn_again_is_ended(line, other):
    screen = Interleaver(overwrites=True)
    shown = screen.render(0, b"[0] ", line) + screen.render(1, b"[1] ", other)
    assert _as_seen(shown)[:2] == [f"[0] {line.decode()}", f"[1] {other.decode().rstrip(chr(10))}"]
    assert b"\r" not in shown


def _as_seen(shown):
    """The lines of a terminal after these bytes."""
    return [line.rpartition("\r\x1b[K")[2] for line in shown.decode().removesuffix("\n").split("\n")]


def test_a_bar_that_is_done_where_it_was_shown_ends_its_line():
    lines, interleaver = LineBuffer(), Interleaver()
    lines.feed(b"100%\r")
    screen = interleaver.render("a", b"a: ", lines.flush_partial())
    screen += interleaver.render("a", b"a: ", lines.feed(b"\nok\n"))
    assert screen == b"a: 100%\na: ok\n"


# ---- what native libraries write is removed, and nothing else

GLOO_PIECES = re.findall(rb"\d+|[^\d\n]+|\n", GLOO)
# JAX 0.12.0.1, rank 0 has ended by os._exit.
SERVICE = b"""\
W1122 12:35:05.840495   30828 preemption_sync_manager.cc:147] Failed to retrieve preemption notice from coordination \
service: UNAVAILABLE: Stream removed (Socket closed)
Additional GRPC error information from remote target coordination_service while calling /xla.coordination.X/GetKeyValue:
:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/tsl/distributed_runtime/rpc/grpc_util.h:89
. This is only expected if one of the tasks is unhealthy. Check the logs for the actual root cause.
E1122 12:35:05.840543   30828 preemption_sync_manager.cc:159] Failed to cancel preemption barrier: FAILED_PRECONDITION
=== Source Location Trace: ===
external/xla+/xla/util.h:302

E1122 12:35:05.840585   30828 coordination_service_agent.cc:288] Polled an error from coordination service (this can \
be an error from this or another task).
F1122 12:35:05.840591   30828 client.h:86] Terminating process because the JAX distributed service detected fatal \
errors. This most likely indicates that another task died; see the other task logs for more details.
*** Check failure stack trace: ***
    @     0x7f6dd4f5c0a4  (unknown)
"""


@given(st.lists(st.integers(0, 2000), max_size=12))
def test_the_last_words_of_jaxs_service_are_removed_however_they_arrive(places):
    assert split(chunked(b"loss 1\n" + SERVICE + b"loss 2\n\nloss 3\n", places)) == b"loss 1\nloss 2\n\nloss 3\n"


@given(st.integers(0, len(GLOO_PIECES)), st.lists(st.integers(0, 200), max_size=6))
def test_gloos_line_is_removed_wherever_a_line_of_the_program_has_torn_it(place, places):
    text = b"".join([*GLOO_PIECES[:place], b"loss 1\n", *GLOO_PIECES[place:], b"loss 2\n"])
    assert split(chunked(text, places)) == b"loss 1\nloss 2\n"


@given(st.lists(st.booleans(), min_size=2 * len(GLOO_PIECES), max_size=2 * len(GLOO_PIECES)))
def test_two_lines_of_gloo_that_have_torn_each_other_are_removed(turns):
    pieces = {True: iter(GLOO_PIECES), False: iter(GLOO_PIECES)}
    mixed = [next(pieces[turn], b"") for turn in turns]
    text = b"".join([*mixed, *pieces[True], *pieces[False]])
    assert split([text, b"\nstep 7\n12\n"]) in (b"\nstep 7\n12\n", b"step 7\n12\n")


@pytest.mark.parametrize("length", range(1, len(GLOO_PIECES)))
def test_gloos_line_that_ends_with_the_rank_is_removed(length):
    assert split(GLOO_PIECES[:length]) == b""


OTHER = b"W1122 12:27:49.697533   32186 export_shardings.cc:486] This branch is not expected.\n"
RESEMBLES = b"we have 3 peer ranks. Fine\n", b"rank 0 is connected to 3\n", b"[Gloo]\n", b"a client.h: of mine\n"


@pytest.mark.parametrize("text", [*RESEMBLES, b"12\n\n", OTHER + b"external/xla/a.cc:12\n    @ 0x12\n"])
def test_text_that_only_resembles_noise_is_shown(text):
    assert split([text, text]) == split([GLOO + text, text + SERVICE]) == text + text


def test_jaxs_line_about_sigterm_is_removed_and_nothing_like_it():
    notice = (
        b"W1122 12:07:45.132109   16747 preemption_notifier.cc:94] SIGTERM caught at 2026-11-22T12:07:45.13+00:00\n"
    )
    other = b"my own preemption_notifier.cc: SIGTERM caught at 3\n"
    assert split([b"before\n" + notice + other + notice]) == b"before\n" + other


def test_what_grpc_says_of_a_certificate_at_an_ipv6_address_is_removed_and_of_a_name_is_shown():
    said = b"E1128 13:41:34.137555   25796 ssl_transport_security.cc:3050] No match found for server name: "
    assert split([said + b"fd00::2\n" + said + b"login.example.org\n"]) == said + b"login.example.org\n"


def test_a_usage_error_of_several_ranks_is_one_text_and_what_else_they_print_is_not_held():
    usage = RepeatedUsage()
    assert not usage.hold(0, "err", b"step 1\n", 0.0) and usage.due is None
    assert usage.hold(2, "err", b"usage: x.py [-h]\n", 1.0) and usage.hold(0, "err", b"usage: x.py [-h]\n", 1.5)
    assert usage.hold(0, "err", b"x.py: error: no\n", 1.6) and usage.hold(2, "err", b"x.py: error: no\n", 1.7)
    assert usage.hold(1, "err", b"Usage: other\n", 1.8) and usage.hold(3, "out", b"usage: x.py [-h]\n", 1.8)
    assert not usage.hold(1, "out", b"step 2\n", 1.9)
    assert usage.due == 1.0 + HOLD_S
    assert usage.release() == [
        ([0, 2], "err", b"usage: x.py [-h]\nx.py: error: no\n"),
        ([1], "err", b"Usage: other\n"),
        ([3], "out", b"usage: x.py [-h]\n"),
    ]
    assert usage.due is None and usage.release() == []
    assert not usage.hold(1, "err", b"usage: 30 %\n", 9.0)  # it prints such lines all the time
    assert usage.hold(4, "err", b"usage: x.py [-h]\n", 9.0) and usage.hold(4, "err", bytes(100_000), 9.1)
    assert usage.due == float("-inf")
    assert shared_prefix([0, 1, 2, 5]) == b"[0-2,5] "


def test_for_a_terminal_what_moves_the_cursor_is_left_out_and_colours_stay():
    lines = LineBuffer()
    assert lines.feed(b"\x1b[2Ka\x1b[?25l\n") == b"\x1b[2Ka\x1b[?25l\n"  # for a pipe
    lines.drops_cursor = True
    assert lines.feed(b"\x1b[2K\x1b[1;31mred\x1b[0m\x1b[1A\x1b[?2") == b"" and lines.feed(b"5l\n\x1b[?25h") == (
        b"\x1b[1;31mred\x1b[0m\n"
    )
    assert not lines.has_partial and lines.finish() == b""
