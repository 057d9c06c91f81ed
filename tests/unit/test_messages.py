"""Messages between worker, fork server, agent and head: they are decoded unchanged, and nothing else is accepted."""

import json
import struct
import tracemalloc
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_args

import pytest
from handshakes import frame
from hypothesis import given, settings
from hypothesis import strategies as st
from values_by_type import Values

from jaxrun.analysis.diagnosis.snapshot import Overview, Snapshot
from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import OutputChunk
from jaxrun.protocol.codec import FRAME_VERSION, MAX_FRAME_BYTES, MessageDecoder, encode, message_types
from jaxrun.protocol.flight import (
    CallTiming,
    DispatchedCall,
    Flight,
    PendingCall,
    ProgramDetails,
    ProgramInfo,
    parse_group,
)
from jaxrun.protocol.flight_file import EVERY_CALL, LEVELS
from jaxrun.protocol.forkserver_messages import ForkServerMessage
from jaxrun.protocol.job_messages import FromClient, ToClient
from jaxrun.protocol.worker_messages import ThreadFailed, WorkerMessage
from jaxrun.text import format_ranges

CHANNELS = {
    "of a worker": message_types(WorkerMessage | ForkServerMessage),
    "to the head": AGENT_TO_HEAD,
    "to an agent": HEAD_TO_AGENT,
    "to the head, first": message_types(auth.ToServer),
    "to an agent, first": message_types(auth.ToClient),
    "at a job's socket": message_types(FromClient),
    "from a job's socket": message_types(ToClient),
}
SENT = {name: kind for known in CHANNELS.values() for name, kind in known.items()}
ALL = dict(sorted((SENT | message_types(Overview | Snapshot)).items()))
KINDS = list(ALL.values())
FEW = settings(max_examples=10)
TEXT = st.text(max_size=20)
RANKS = st.integers(0, 9999)
NUMBERS = st.floats(allow_nan=False)
WORDS = st.integers(0, 2**64 - 1)
TIMES = st.floats(0, 2e9)
MICROSECONDS = st.integers(0, 2**51).map(lambda number: number / 1e6)
GROUPS = st.sampled_from(["0-3", "0,2"])
FLIGHTS = st.builds(
    Flight,
    level=st.sampled_from(LEVELS),
    strict=st.booleans(),
    compiling=st.none() | st.tuples(TEXT, TIMES),
    pending=st.none() | st.builds(PendingCall, GROUPS, WORDS, WORDS, WORDS, TIMES),
    calls=st.lists(st.builds(DispatchedCall, TIMES, GROUPS, *[WORDS] * 4, st.just(0.0)), max_size=3).map(tuple),
    timings=st.lists(st.builds(CallTiming, GROUPS, WORDS, MICROSECONDS, MICROSECONDS, WORDS), max_size=3).map(tuple),
    entered=TIMES,
    marks=st.dictionaries(GROUPS, st.dictionaries(WORDS, WORDS, min_size=1, max_size=3)),
    call_counts=st.fixed_dictionaries({group: WORDS for group in ("0-3", "0,2")}),
    programs=st.dictionaries(WORDS, st.builds(ProgramInfo, TEXT, TEXT, TEXT, TEXT), max_size=3),
    sites=st.dictionaries(WORDS, st.lists(TEXT, max_size=3).map(tuple), max_size=3),
    unknown_programs=st.integers(0, 9),
    trouble=TEXT,
)
ARRAYS = st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=2).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
BY_TYPE = {
    int: st.integers(),
    float: NUMBERS,
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=300),
    type(None): st.none(),
    Any: JSON,
    Flight: FLIGHTS,
    ProgramDetails: st.builds(ProgramDetails, TEXT, ARRAYS, ARRAYS, TEXT, TEXT),
}
VALUES = Values(BY_TYPE, keys={str: TEXT, int: RANKS})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_reads_back_the_same(kind):
    @FEW
    @given(VALUES.of(kind))
    def round_trip(message):
        assert MessageDecoder(ALL).feed(encode(message)) == [message]

    round_trip()


@given(st.lists(st.one_of(*map(VALUES.of, KINDS)), max_size=4), st.lists(st.integers(0, 999), max_size=8))
def test_messages_arrive_in_order_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(map(encode, sent))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    decoder = MessageDecoder(ALL)
    assert [message for a, b in pairwise(edges) for message in decoder.feed(stream[a:b])] == sent


def test_text_that_is_not_unicode_survives():
    message = ThreadFailed(rank=0, time=1.0, thread="\udcff", error="é\n", traceback="")
    assert MessageDecoder(ALL).feed(encode(message)) == [message]


def test_no_message_type_is_accepted_in_the_wrong_direction():
    to_head, to_agent, *first = (set(known) for name, known in CHANNELS.items() if name != "of a worker")
    assert not to_head & to_agent and not set().union(*first) & (to_head | to_agent)
    for known in CHANNELS.values():
        strange = next(kind for kind in KINDS if kind not in known.values() and fields(kind))
        example = {field.name: 0 for field in fields(strange)}
        with pytest.raises(ProtocolError, match="of no known type"):
            MessageDecoder(known).feed(frame({"v": FRAME_VERSION, "type": strange.__name__, **example}))


def test_every_message_of_the_worker_passes_through_the_agent():
    assert {kind.__name__ for kind in get_args(WorkerMessage)} <= set(AGENT_TO_HEAD) | set(HEAD_TO_AGENT)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_of_any_type_are_a_message_or_a_protocol_error(kind):
    names = [field.name for field in fields(kind)]

    @FEW
    @given(st.fixed_dictionaries({}, optional={name: JSON for name in [*names, "stray"]}))
    def check(content):
        try:
            (message,) = MessageDecoder(ALL).feed(frame({"v": FRAME_VERSION, "type": kind.__name__, **content}))
        except ProtocolError as error:
            assert kind.__name__ in str(error)
        else:
            assert type(message) is kind and set(content) == set(names)

    check()


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_no_message_but_a_protocol_error(noise, framed):
    try:
        assert MessageDecoder(ALL, 4096).feed(frame(noise) if framed else noise) == []
    except ProtocolError as error:
        assert str(error).startswith("a frame ")


def of_type(kind, **content):
    return {"v": FRAME_VERSION, "type": kind, **content}


def with_bytes(size, said=5):
    """The body of a frame with so many bytes, of which its JSON says something."""
    content = of_type("OutputChunk", rank=0, stream="out", data={"\0": said})
    return json.dumps(content).encode() + bytes(1 + size)


ANSWER = {"number": 0, "nonce": "", "proof": "", "purpose": "join"}
REFUSED = [
    (b"GET / HTTP/1.1", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b'"\xff"', "not JSON"),
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"9" * 4000, "not of version"),
    (b"9" * 5000, "not JSON"),
    ({}, "not of version"),
    ([1], "not of version"),
    ({"v": FRAME_VERSION + 1, "type": "Run"}, "not of version"),
    ({"type": "Run"}, "not of version"),
    (of_type("Rum"), "no known type"),
    (of_type(["Run"]), "no known type"),
    (of_type("Run", x=1), "Run has no field 'x'"),
    (of_type("ChallengeResponse", **ANSWER, x=1), "ChallengeResponse has no field 'x'"),
    (of_type("ChallengeResponse", number=0, nonce=""), "ChallengeResponse lacks its field proof"),
    (of_type("ChallengeResponse", **ANSWER | {"number": "0"}), "ChallengeResponse.number must be of type int, not '0'"),
    (of_type("ChallengeResponse", **ANSWER | {"proof": None}), "ChallengeResponse.proof must be of type str, not None"),
    (with_bytes(4), "4 bytes after its JSON, which says 5"),
    (with_bytes(6, -1), "says -1"),
    (with_bytes(6, [0]), "6 bytes after its JSON, which says .0."),
    (of_type("Join"), "Join lacks its field address"),
    (of_type("Join", address=1), "Join.address must be of type str, not 1"),
    (of_type("Done", rank=True, time=1), "Done.rank must be of type int, not True"),
    (of_type("Done", rank=1, time=10**400), "Done.time must be of type float"),
    (of_type("ProbePeers", addresses={"9" * 5000: ""}, cookies={}, hosts={}), "ProbePeers.addresses must be"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_foreign_frame_is_refused_with_its_reason(content, message):
    with pytest.raises(ProtocolError, match=message):
        MessageDecoder(ALL).feed(frame(content))


@pytest.mark.parametrize(
    ("limit", "length"), [(4096, 4097), (MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1), (4 * 2**20, 2**32 - 1)]
)
def test_an_announced_giant_is_refused_before_it_comes(limit, length):
    with pytest.raises(ProtocolError, match=f"announces {length} bytes"):
        MessageDecoder(AGENT_TO_HEAD, limit).feed(struct.pack("!I", length))


# ---- flights


def test_no_content_means_no_recorder():
    assert Flight.from_content({}) == Flight()
    assert not Flight().complete


MALFORMED_FLIGHTS = """[] 7 {"level":"many"} {"level":null} {"level":Infinity} {"calls":[[1,2]]}
{"calls":[[1.0,0,1,1,1,1]]} {"marks":[[0,[[1,2]]]]} {"programs":[[1,["a"]]]} {"pending":["0-3",1]} {"sites":7}"""
MALFORMED_FLIGHTS += f' {{"entered":1{400 * "0"}}}'


@pytest.mark.parametrize("text", MALFORMED_FLIGHTS.split())
def test_a_malformed_flight_is_refused(text):
    with pytest.raises(ValueError):
        Flight.from_content(json.loads(text))


def test_a_brief_of_sixteen_calls_and_the_times_of_more_is_short():
    start = 1763707578.123456
    calls = tuple(DispatchedCall(start, "0-3", number, 2**63 + number, 3, 7) for number in range(16))
    timings = tuple(CallTiming("0-3", n, start + 0.0312 * n, start + 0.0312 * n + 0.0012, 7) for n in range(128))
    flight = Flight(
        EVERY_CALL,
        calls=calls,
        timings=timings,
        call_counts={"0-3": 16},
        programs={3: ProgramInfo("jit(step)", "a" * 16, "b" * 16, "s at f:1")},
    )
    assert len(json.dumps(flight.to_content(), separators=(",", ":"))) < 1000 + 20 * len(timings)


def test_queries_of_a_flight():
    calls = tuple(
        DispatchedCall(float(number), group, number, 0, 3, 7)
        for number, group in enumerate(["0-3", "0,2", "0-3"], start=1)
    )
    pending = PendingCall("0,2", 4, 5, 8, 9.0)
    flight = Flight(
        pending=pending,
        calls=calls,
        call_counts={"0-3": 3, "0,2": 2},
        programs={3: ProgramInfo("jit(f)", "k", "c")},
        sites={7: ("/home/a b/train.py:88 Model.step", "/home/x.py:1 main"), 9: ()},
    )
    assert flight.last_call == calls[-1]
    assert flight.calls_of("0-3") == (calls[0], calls[2])
    assert flight.known_calls == (*calls, pending)
    assert (flight.last_number("0-3"), flight.last_number("0,2"), flight.last_number("1-2")) == (3, 4, 0)
    assert (flight.place(calls[0]), flight.place(pending)) == ("train.py:88 Model.step", "")
    assert (flight.program(calls[0]).name, flight.program(pending).name) == ("jit(f)", "")
    assert Flight().last_call is None


@given(st.frozensets(st.integers(0, 40), min_size=1))
def test_the_members_of_a_group_are_those_it_names(ranks):
    text = format_ranges(ranks)
    assert parse_group(text, 41) == parse_group(text.replace(", ", ","), 41) == ranks


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1--2", "1,x"])
def test_a_group_that_is_not_a_list_of_ranks_has_no_members(text):
    assert parse_group(text, 4) in (frozenset(), frozenset({1}))


HOSTILE_GROUPS = ["0-300000000", "0,1-99999999999999999999", "5" * 5000, "7-" + "9" * 5000, "0-\0", "\ud800"]


@pytest.mark.parametrize("text", HOSTILE_GROUPS, ids=["many", "more", "long", "long end", "NUL", "surrogate"])
def test_of_a_group_that_no_job_can_have_only_the_ranks_of_the_job_are_listed(text):
    tracemalloc.start()
    try:
        assert parse_group(text, 3) <= {0, 1, 2}
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_bytes_travel_as_they_are():
    chunk = OutputChunk(0, "out", bytes(range(256)) * 256)
    assert len(encode(chunk)) < len(chunk.data) + 100
    assert MessageDecoder(ALL).feed(encode(chunk)) == [chunk]
