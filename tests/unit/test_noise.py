"""What native libraries write into a rank's output is removed, and nothing else."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.records.output.line_buffer import LineBuffer

GLOO = b"[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n"
PIECES = re.findall(rb"\d+|[^\d\n]+|\n", GLOO)
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


def shown(*chunks: bytes) -> bytes:
    lines = LineBuffer()
    return b"".join([*map(lines.feed, chunks), lines.finish()])


def cut(text: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(st.lists(st.integers(0, 2000), max_size=12))
def test_the_last_words_of_jaxs_service_are_removed_however_they_arrive(places: list[int]) -> None:
    assert shown(*cut(b"loss 1\n" + SERVICE + b"loss 2\n\nloss 3\n", places)) == b"loss 1\nloss 2\n\nloss 3\n"


def test_other_messages_of_native_libraries_are_shown() -> None:
    other = b"W1122 12:27:49.697533   32186 export_shardings.cc:486] This branch is not expected.\n"
    assert shown(other, b"external/xla/a.cc:12\n", b"    @ 0x12\n") == other + b"external/xla/a.cc:12\n    @ 0x12\n"


@given(st.integers(0, len(PIECES)), st.lists(st.integers(0, 200), max_size=6))
def test_gloos_line_is_removed_wherever_a_line_of_the_program_has_torn_it(place: int, places: list[int]) -> None:
    text = b"".join([*PIECES[:place], b"loss 1\n", *PIECES[place:], b"loss 2\n"])
    assert shown(*cut(text, places)) == b"loss 1\nloss 2\n"


@given(st.lists(st.booleans(), min_size=2 * len(PIECES), max_size=2 * len(PIECES)))
def test_two_lines_of_gloo_that_have_torn_each_other_are_removed(turns: list[bool]) -> None:
    pieces = {True: iter(PIECES), False: iter(PIECES)}
    mixed = [next(pieces[turn], b"") for turn in turns]
    text = b"".join([*mixed, *pieces[True], *pieces[False]])
    assert shown(text, b"\nstep 7\n12\n") in (b"\nstep 7\n12\n", b"step 7\n12\n")


@pytest.mark.parametrize("length", range(1, len(PIECES)))
def test_gloos_line_that_ends_with_the_rank_is_removed(length: int) -> None:
    assert shown(*PIECES[:length]) == b""


@pytest.mark.parametrize(
    "text",
    [b"we have 3 peer ranks. Fine\n", b"rank 0 is connected to 3\n", b"12\n\n", b"[Gloo]\n", b"a client.h: of mine\n"],
)
def test_text_that_only_resembles_noise_is_shown(text: bytes) -> None:
    assert shown(text, text) == shown(GLOO + text, text + SERVICE) == text + text


def test_jaxs_line_about_sigterm_is_removed_and_nothing_like_it() -> None:
    notice = (
        b"W1122 12:07:45.132109   16747 preemption_notifier.cc:94] SIGTERM caught at 2026-11-22T12:07:45.13+00:00\n"
    )
    other = b"my own preemption_notifier.cc: SIGTERM caught at 3\n"
    assert shown(b"before\n" + notice + other + notice) == b"before\n" + other
