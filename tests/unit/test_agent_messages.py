"""Messages between agent and head: they are decoded unchanged, and nothing else is accepted."""

import json
import struct
from dataclasses import fields
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT
from jaxrun.errors import ProtocolError
from jaxrun.protocol import auth
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.flight import Flight, ProgramDetails
from jaxrun.protocol.snapshot_messages import RankVitals, SnapshotPurpose
from jaxrun.protocol.worker_messages import WorkerStage

TO_HEAD_FIRST, TO_AGENT_FIRST = (
    message_types(auth.ToServer),
    message_types(auth.ToClient),
)
DIRECTIONS = {
    "to the head": AGENT_TO_HEAD,
    "to an agent": HEAD_TO_AGENT,
    "to the head, first": TO_HEAD_FIRST,
    "to an agent, first": TO_AGENT_FIRST,
}
ALL = sorted({kind for known in DIRECTIONS.values() for kind in known.values()}, key=lambda kind: kind.__name__)
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
STRATEGIES = {
    "int": st.integers(-(2**63), 2**63),
    "float": NUMBERS,
    "bool": st.booleans(),
    "WorkerStage": st.sampled_from(WorkerStage),
    "SnapshotPurpose": st.sampled_from(SnapshotPurpose),
    "str": TEXT,
    "Flight": FLIGHTS,
    "ProgramDetails": st.builds(ProgramDetails, TEXT, ARRAYS, ARRAYS, TEXT, TEXT),
    "Mapping[int, RankVitals]": st.dictionaries(
        RANKS, st.builds(RankVitals, NUMBERS, NUMBERS, st.integers(0), TEXT, NUMBERS, st.integers(-1)), max_size=3
    ),
    "Mapping[int, Flight]": st.dictionaries(RANKS, FLIGHTS, max_size=3),
    "bytes": st.binary(max_size=300),
    "tuple[int, ...]": st.lists(st.integers(), max_size=4).map(tuple),
    "tuple[str, ...]": st.lists(TEXT, max_size=3).map(tuple),
    "tuple[tuple[float, ...], ...]": st.lists(st.lists(NUMBERS, max_size=3).map(tuple), max_size=3).map(tuple),
    "Mapping[str, str]": st.dictionaries(TEXT, TEXT, max_size=3),
    "Mapping[str, int]": st.dictionaries(TEXT, st.integers(-1, 2**60), max_size=3),
    "Mapping[int, str]": st.dictionaries(RANKS, TEXT, max_size=3),
    "Mapping[int, float]": st.dictionaries(RANKS, NUMBERS, max_size=3),
    "Mapping[int, tuple[int, ...]]": st.dictionaries(RANKS, st.tuples(st.integers(0, 2**64)), max_size=3),
    "Mapping[int, int]": st.dictionaries(st.integers(0, 9999), st.integers(0, 2**60), max_size=3),
}


def some(kind):
    return st.builds(kind, **{field.name: STRATEGIES[str(field.type)] for field in fields(kind)})


def frame(content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_reads_back_the_same(kind):
    directions = [known for known in DIRECTIONS.values() if kind in known.values()]

    @given(some(kind))
    def round_trip(message):
        for known in directions:
            assert MessageDecoder(known).feed(encode(message)) == [message]

    round_trip()


@given(st.lists(st.one_of(*map(some, AGENT_TO_HEAD.values())), max_size=4), st.lists(st.integers(0, 999), max_size=8))
def test_messages_arrive_in_order_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(map(encode, sent))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    codec = MessageDecoder(AGENT_TO_HEAD)
    assert [message for a, b in pairwise(edges) for message in codec.feed(stream[a:b])] == sent


def test_no_message_type_is_accepted_in_the_wrong_direction():
    one_way = {name: set(known) for name, known in DIRECTIONS.items()}
    assert not one_way["to the head"] & one_way["to an agent"]
    assert not (one_way["to the head, first"] | one_way["to an agent, first"]) & (
        set(AGENT_TO_HEAD) | set(HEAD_TO_AGENT)
    )
    for known in DIRECTIONS.values():
        strange = next(kind for kind in ALL if kind not in known.values() and fields(kind))
        example = {field.name: 0 for field in fields(strange)}
        with pytest.raises(ProtocolError, match="of no known type"):
            MessageDecoder(known).feed(frame({"v": 1, "type": strange.__name__, **example}))


def test_every_message_of_the_worker_passes_through_the_agent():
    from jaxrun.protocol.worker_messages import WorkerMessage

    assert {kind.__name__ for kind in get_args(WorkerMessage)} <= set(AGENT_TO_HEAD) | set(HEAD_TO_AGENT)


WRONG = {
    "another version": {"v": 2, "type": "ChallengeResponse", "rank": 0, "nonce": "", "proof": ""},
    "no version": {"type": "ChallengeResponse", "rank": 0, "nonce": "", "proof": ""},
    "an unknown type": {"v": 1, "type": "Shell", "command": "true"},
    "a type that is no name": {"v": 1, "type": ["ChallengeResponse"]},
    "a field too few": {"v": 1, "type": "ChallengeResponse", "rank": 0, "nonce": ""},
    "a field too many": {"v": 1, "type": "ChallengeResponse", "rank": 0, "nonce": "", "proof": "", "x": 1},
    "a rank that is true": {"v": 1, "type": "ChallengeResponse", "rank": True, "nonce": "", "proof": ""},
    "a rank in words": {"v": 1, "type": "ChallengeResponse", "rank": "0", "nonce": "", "proof": ""},
    "a proof that is none": {"v": 1, "type": "ChallengeResponse", "rank": 0, "nonce": "", "proof": None},
    "a list": [1],
    "nothing": b"",
    "no JSON": b"{",
    "no Unicode": b'"\xff"',
    "deep brackets": b"[" * 3000,
    "a giant number": b"9" * 4000,
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_malformed_answer_is_a_protocol_error(content):
    with pytest.raises(ProtocolError):
        MessageDecoder(TO_HEAD_FIRST, 4096).feed(frame(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("known", DIRECTIONS.values(), ids=DIRECTIONS)
def test_any_bytes_are_messages_or_a_protocol_error(known):
    names = sorted({field.name for kind in known.values() for field in fields(kind)})
    body = st.dictionaries(st.sampled_from(names), JSON, max_size=6)

    @given(body, st.sampled_from(sorted(known)), st.binary(max_size=60))
    def survive(content, name, noise):
        for data in (frame({"v": 1, "type": name, **content}), frame(noise), noise):
            try:
                MessageDecoder(known, 4096).feed(data)
            except ProtocolError as error:
                assert str(error)

    survive()


def test_a_table_by_rank_takes_no_number_that_python_refuses():
    content = {
        "v": 1,
        "type": "SnapshotReply",
        "purpose": "show",
        "kernel_waits": {},
        "cpu_seconds": {},
        "stacks": {"9" * 5000: ""},
    }
    with pytest.raises(ProtocolError):
        MessageDecoder(AGENT_TO_HEAD).feed(frame(content))


@pytest.mark.parametrize(("limit", "length"), [(4096, 4097), (4 * 2**20, 2**32 - 1)])
def test_an_announced_giant_is_refused_before_it_comes(limit, length):
    with pytest.raises(ProtocolError, match=f"announces {length} bytes"):
        MessageDecoder(AGENT_TO_HEAD, limit).feed(struct.pack("!I", length))
