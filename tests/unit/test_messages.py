"""Messages between worker, fork server, agent and head: they are decoded unchanged, and nothing else is accepted."""

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from itertools import pairwise
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.analysis.diagnosis.snapshot import Overview, Snapshot
from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT
from jaxrun.protocol import auth
from jaxrun.protocol.codec import FRAME_VERSION, MAX_FRAME_BYTES, MessageDecoder, encode, message_types
from jaxrun.protocol.flight import Flight, ProgramDetails
from jaxrun.protocol.forkserver_messages import ForkServerMessage
from jaxrun.protocol.requests import Answer
from jaxrun.protocol.worker_messages import Join, Run, ThreadFailed, WorkerMessage

CHANNELS = {
    "of a worker": message_types(WorkerMessage | ForkServerMessage),
    "to the head": AGENT_TO_HEAD,
    "to an agent": HEAD_TO_AGENT,
    "to the head, first": message_types(auth.ToServer),
    "to an agent, first": message_types(auth.ToClient),
}
SENT = {name: kind for known in CHANNELS.values() for name, kind in known.items()}
ALL = dict(sorted((SENT | message_types(Answer | Overview | Snapshot)).items()))
KINDS = list(ALL.values())
FEW, SOME = settings(max_examples=20), settings(max_examples=50)
TEXT = st.text(max_size=20)
RANKS = st.integers(0, 9999)
NUMBERS = st.floats(allow_nan=False)
FLIGHTS = st.builds(
    Flight,
    trouble=TEXT,
    compiling=st.none() | st.tuples(TEXT, NUMBERS),
    call_counts=st.dictionaries(TEXT, st.integers(1, 2**60), max_size=2),
)
ARRAYS = st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=2).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
STRATEGIES = {
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


def some(kind):
    origin, inner = get_origin(kind), get_args(kind)
    if kind in STRATEGIES:
        return STRATEGIES[kind]
    if origin is UnionType:
        return st.one_of(*map(some, inner))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(some(inner[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(RANKS if inner[0] is int else TEXT, some(inner[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    return st.builds(kind, **{name: some(inner) for name, inner in get_type_hints(kind).items()})


def frame(content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_reads_back_the_same(kind):
    @FEW
    @given(some(kind))
    def round_trip(message):
        assert MessageDecoder(ALL).feed(encode(message)) == [message]

    round_trip()


@SOME
@given(st.lists(st.one_of(*map(some, KINDS)), max_size=4), st.lists(st.integers(0, 999), max_size=8))
def test_messages_arrive_in_order_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(map(encode, sent))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    decoder = MessageDecoder(ALL)
    assert [message for a, b in pairwise(edges) for message in decoder.feed(stream[a:b])] == sent


def test_text_that_is_no_unicode_survives():
    message = ThreadFailed(rank=0, time=1.0, thread="\udcff", error="é\n", traceback="")
    assert MessageDecoder(ALL).feed(encode(message)) == [message]


def test_half_a_frame_is_no_message_yet():
    assert MessageDecoder(ALL).feed(encode(Run())[:-1]) == []


def test_no_message_type_is_accepted_in_the_wrong_direction():
    to_head, to_agent, *first = (set(known) for name, known in CHANNELS.items() if name != "of a worker")
    assert not to_head & to_agent and not set().union(*first) & (to_head | to_agent)
    for known in CHANNELS.values():
        strange = next(kind for kind in KINDS if kind not in known.values() and fields(kind))
        example = {field.name: 0 for field in fields(strange)}
        with pytest.raises(ProtocolError, match="of no known type"):
            MessageDecoder(known).feed(frame({"v": 1, "type": strange.__name__, **example}))


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


@SOME
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_no_message_but_a_protocol_error(noise, framed):
    try:
        assert MessageDecoder(ALL, 4096).feed(frame(noise) if framed else noise) == []
    except ProtocolError as error:
        assert str(error).startswith("a frame ")


def of_type(kind, **content):
    return {"v": FRAME_VERSION, "type": kind, **content}


ANSWER = {"rank": 0, "nonce": "", "proof": ""}
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
    (of_type("ChallengeResponse", rank=0, nonce=""), "ChallengeResponse lacks its field proof"),
    (of_type("ChallengeResponse", **ANSWER | {"rank": "0"}), "ChallengeResponse.rank must be of type int, not '0'"),
    (of_type("ChallengeResponse", **ANSWER | {"proof": None}), "ChallengeResponse.proof must be of type str, not None"),
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


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ProtocolError, match="is longer than"):
        encode(Join("x" * MAX_FRAME_BYTES))
