"""Messages between worker, fork server, agent and head: they are decoded unchanged, and nothing else is accepted."""

import json
import struct
import tracemalloc
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, get_args

import pytest
from handshakes import frame
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields
from values_by_type import Values

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import OutputChunk
from jaxrun.protocol.codec import (
    FRAME_VERSION,
    MAX_FRAME_BYTES,
    Form,
    MessageDecoder,
    encode,
    encode_json_frame,
    from_content,
    message_types,
)
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
from jaxrun.protocol.job_messages import Answer, Answered, AnswerState, Dropped, FromClient, Greeting, ToClient
from jaxrun.protocol.query_messages import FlightAtEnd
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
ALL = dict(sorted(SENT.items()))
KINDS = list(ALL.values())
ON_SOCKET = message_types(FromClient | ToClient)
FEW = settings(max_examples=10)
TEXT = st.text(max_size=20)
RANKS = st.integers(0, 9999)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
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
    st.none() | st.booleans() | INTEGERS | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
BY_TYPE = {
    int: INTEGERS,
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


@pytest.mark.parametrize("kind", [*ON_SOCKET.values()], ids=lambda kind: kind.__name__)
def test_every_message_of_a_jobs_socket_reads_back_the_same(kind):
    @FEW
    @given(VALUES.of(kind))
    def round_trip(message):
        assert MessageDecoder(ON_SOCKET, form=Form.JSON).feed(encode_json_frame(message)) == [message]

    round_trip()


@pytest.mark.parametrize("kind", [Overview, JobStacks], ids=lambda kind: kind.__name__)
def test_every_answer_reads_back_the_same(kind):
    @FEW
    @given(VALUES.of(kind))
    def round_trip(value):
        (answered,) = MessageDecoder(ON_SOCKET, form=Form.JSON).feed(
            encode_json_frame(Answered(1, Answer(AnswerState.DONE, content=value)))
        )
        assert from_content(kind, answered.answer.content) == value

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


def test_text_that_is_not_unicode_survives_on_a_jobs_socket_as_well():
    message = Dropped("\udcff \U0001f600 \0 \\ud800 \n")
    assert MessageDecoder(ON_SOCKET, form=Form.JSON).feed(encode_json_frame(message)) == [message]
    assert json.loads(encode_json_frame(message)[4:])["reason"] == message.reason


def test_no_message_type_is_accepted_in_the_wrong_direction():
    to_head, to_agent, *first = (set(known) for name, known in CHANNELS.items() if name != "of a worker")
    assert not to_head & to_agent and not set().union(*first) & (to_head | to_agent)
    for known in CHANNELS.values():
        strange = next(kind for kind in KINDS if kind not in known.values() and fields(kind))
        example = {field.name: 0 for field in fields(strange)}
        with pytest.raises(ProtocolError, match="of no known type"):
            MessageDecoder(known).feed(frame({"type": strange.__name__, **example}))


def test_every_message_of_the_worker_passes_through_the_agent():
    assert {kind.__name__ for kind in get_args(WorkerMessage)} <= set(AGENT_TO_HEAD) | set(HEAD_TO_AGENT)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_of_any_type_are_a_message_or_a_protocol_error(kind):
    names = [field.name for field in fields(kind)]
    needed = {field.name for field in fields(kind) if field.required}

    @FEW
    @given(st.fixed_dictionaries({}, optional={name: JSON for name in [*names, "stray"]}))
    def check(content):
        try:
            (message,) = MessageDecoder(ALL).feed(frame({"type": kind.__name__, **content}))
        except ProtocolError as error:
            assert kind.__name__ in str(error)
        else:
            assert type(message) is kind and needed <= set(content) <= set(names)

    check()


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_no_message_but_a_protocol_error(noise, framed):
    try:
        assert MessageDecoder(ALL, 4096).feed(frame(noise) if framed else noise) == []
    except ProtocolError as error:
        assert str(error).startswith("a frame ")


def of_type(kind, /, **content):
    return {"type": kind, **content}


V = bytes((FRAME_VERSION, 0))
ESCAPED = bytes((FRAME_VERSION, 1))
ANSWER = {"number": 0, "nonce": "", "proof": "", "purpose": "join"}
REFUSED = [
    (b"GET / HTTP/1.1", "not of version"),
    (b"\xff\xfe", "not of version"),
    (b"", "not of version"),
    (b'{"v":2,"type":"Run"}', "not of version"),
    (bytes((FRAME_VERSION + 1, 0)) + b"\x81\xa4type\xa3Run", "not of version"),
    (bytes((FRAME_VERSION, 2)) + b"\x81\xa4type\xa3Run", "not of version"),
    (V, "not MessagePack"),
    (V + b"\x81\xa4type", "not MessagePack"),
    (V + b"\x81\xa4type\xa2\xff\xff", "not MessagePack"),
    (V + b"\x81\xa4type\xa3Run\x00", "not MessagePack"),
    (V + b"\x81" * 100_000, "not MessagePack|no known type"),
    (ESCAPED + b"\x91" * 100_000, "not MessagePack"),
    (ESCAPED + b"\x91\x01", "no known type"),
    (ESCAPED + b"\x82\xa4type\xa3Run\xa1x\x01", "Run has no field 'x'"),
    ([1], "no known type"),
    ({}, "no known type"),
    (of_type("Rum"), "no known type"),
    (of_type(["Run"]), "no known type"),
    (of_type("Run", x=1), "Run has no field 'x'"),
    (of_type("ChallengeResponse", **ANSWER, x=1), "ChallengeResponse has no field 'x'"),
    (of_type("ChallengeResponse", number=0, nonce=""), "ChallengeResponse lacks its field proof"),
    (of_type("ChallengeResponse", **ANSWER | {"number": "0"}), "ChallengeResponse.number must be of type int, not '0'"),
    (of_type("ChallengeResponse", **ANSWER | {"proof": None}), "ChallengeResponse.proof must be of type str, not None"),
    (of_type("ChallengeResponse", **ANSWER | {"purpose": "x"}), "ChallengeResponse.purpose must be of type Purpose"),
    (of_type("AgentReport", agent=0, host="h", machine={"x": 1}), r"AgentReport\.machine has no field 'x'"),
    (of_type("ThreadFailed", rank=0, chain=[{"x": 1}]), r"ThreadFailed\.chain has no field 'x'"),
    (of_type("Join"), "Join lacks its field address"),
    (of_type("Join", address=1), "Join.address must be of type str, not 1"),
    (of_type("Join", address=b"a"), "Join.address must be of type str, not b'a'"),
    (of_type("Join", address=datetime.now(UTC)), "Join.address must be of type str"),
    (of_type("OutputChunk", rank=0, stream="out", data="text"), "OutputChunk.data must be of type bytes, not 'text'"),
    (of_type("Done", rank=True, time=1), "Done.rank must be of type int, not True"),
    (of_type("Done", rank=1, time="9" * 5000), "Done.time must be of type float, not '999"),
    (of_type("ProbePeers", addresses={"9": ""}, cookies={}, hosts={}), "ProbePeers.addresses must be"),
    (of_type("Ask", number=-1, request={"type": "GoRequest"}), "Ask.number: -1 is not at least 0"),
    (of_type("Ask", number=2**60, request={"type": "GoRequest"}), "Ask.number: 1152921504606846976 is not at most"),
    (of_type("SignalOrder", signum=9), "SignalOrder.signum must be of type OrderedSignal, not 9"),
    (of_type("SignalOrder", signum=True), "SignalOrder.signum must be of type OrderedSignal, not True"),
    (of_type("FaultOrder", kind="maim", ranks=[1]), "FaultOrder.kind: 'maim' is not of the form .*kill|pause"),
    (of_type("FaultOrder", kind="kill", ranks=[0, -1]), r"FaultOrder.ranks: \[0, -1\] is not at least 0"),
    (of_type("AgentSignalled", agent=1, signum=4711), "AgentSignalled.signum must be of type Signals, not 4711"),
    (of_type("ClockReply", agent=1, asked_at=float("inf"), time=1.0), "ClockReply.asked_at: inf is not at most 1e"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_foreign_frame_is_refused_with_its_reason(content, message):
    with pytest.raises(ProtocolError, match=message):
        MessageDecoder(ALL).feed(frame(content))


def structs_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        yield annotation
        parts = [field.type for field in fields(annotation)]
    else:
        parts = get_args(annotation)
    for part in parts:
        yield from structs_in(part)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values_within_a_message_refuse_unknown_fields_as_the_message_does(kind):
    lenient = [found for found in structs_in(kind) if not found.__struct_config__.forbid_unknown_fields]
    assert lenient == ([kind] if kind in (Greeting, Dropped) else [])  # which all versions of the socket read


PROFILE = {"type": "ProfileRequest", "steps": 1, "directory": "/p", "session": "s", "lead_s": 1.0}
UNFIT = {
    "steps": [0, -1, 10**9 + 1],
    "directory": ["", "p", "../p", "/p\0", "/" + "p" * 4096],
    "session": ["", ".", "..", "../../esc", "/esc", "a/b", "s\n", "s\0", "\ud800", "s" * 101],
    "lead_s": [float("nan"), float("inf"), -float("inf"), 1e308, -0.1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in UNFIT.items() for value in values])
def test_a_profile_that_no_rank_can_take_is_refused_where_it_is_decoded(name, value):
    (ask,) = MessageDecoder(ALL).feed(frame(of_type("Ask", number=1, request=PROFILE)))
    assert ask.request.session == "s"
    with pytest.raises(ProtocolError, match=rf"ProfileRequest\.{name}: .* is not "):
        MessageDecoder(ALL).feed(frame(of_type("Ask", number=1, request=PROFILE | {name: value})))


@pytest.mark.parametrize(
    ("limit", "length"), [(4096, 4097), (MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1), (4 * 2**20, 2**32 - 1)]
)
def test_an_announced_giant_is_refused_before_it_comes(limit, length):
    with pytest.raises(ProtocolError, match=f"announces {length} bytes"):
        MessageDecoder(AGENT_TO_HEAD, limit).feed(struct.pack("!I", length))


# ---- flights


def test_no_content_means_no_recorder():
    assert from_content(Flight, {}) == Flight()
    assert not Flight().complete


MALFORMED_FLIGHTS = """[] 7 {"level":"many"} {"level":null} {"level":Infinity} {"calls":[[1,"0-3"]]}
{"calls":[[1.0,0,1,1,1,1]]} {"marks":{"0-3":[[1,2]]}} {"programs":{"1":["a"]}} {"pending":["0-3",1]} {"sites":7}"""
MALFORMED_FLIGHTS += f' {{"entered":1{400 * "0"}}}'


@pytest.mark.parametrize("text", MALFORMED_FLIGHTS.split())
def test_a_malformed_flight_is_refused(text):
    with pytest.raises(ProtocolError, match=r"^Flight"):
        from_content(Flight, json.loads(text))


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
    assert len(encode(FlightAtEnd(0, flight))) < 1000 + 30 * len(timings)


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
    assert Flight(sites={7: ("/home/br\neak.py:8 f",)}).place(calls[0]) == "br eak.py:8 f", "it is one line of a table"


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
