"""Messages between worker and agent: what one side writes, the other reads; nothing else is accepted."""

import json
import re
import struct
from dataclasses import fields, replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import FRAME_VERSION, MAX_FRAME_BYTES, MessageDecoder, encode, message_types
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import ForkServerMessage
from jaxrun.protocol.worker_messages import Run, WorkerMessage, WorkerStage

_KINDS = (*get_args(WorkerMessage), *get_args(ForkServerMessage))
_TYPES = message_types(WorkerMessage | ForkServerMessage)
_TEXT = st.text(max_size=20)
_STRATEGIES = {
    "int": st.integers(),
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False),
    "str": _TEXT,
    "WorkerStage": st.sampled_from(WorkerStage),
    "tuple[str, ...]": st.lists(_TEXT, max_size=3).map(tuple),
    "Mapping[str, str]": st.dictionaries(_TEXT, _TEXT, max_size=3),
}
_ENV = WorkerEnv(
    job_id="ab" * 16,
    rank=3,
    size=4,
    local_rank=1,
    local_size=2,
    host="h2",
    channel_fd=7,
    stacks_fd=8,
    flight_fd=9,
    init_timeout=120.0,
)


def _decoder():
    return MessageDecoder(_TYPES)


def _some(kind):
    return st.builds(kind, **{field.name: _STRATEGIES[field.type] for field in fields(kind)})


def _frame(content: object) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("!I", len(body)) + body


def _environments():
    ints = st.lists(st.integers(0, 999), max_size=4).map(tuple)
    number = st.integers(0, 10**6)
    names = {"str": _TEXT, "int": number, "float": st.floats(0, 1e9), "bool": st.booleans(), "tuple[int, ...]": ints}
    return st.builds(WorkerEnv, **{field.name: names[field.type] for field in fields(WorkerEnv)})


@given(_environments())
def test_a_workers_environment_reads_back_the_same(env):
    assert WorkerEnv.from_env(env.to_env()) == env


def test_a_workers_environment_is_spelled_as_documented():
    env = replace(_ENV, local_device_ids=(2, 3), cpus=(5,)).to_env()
    assert env["JAXRUN_RANK"] == "3" and env["JAXRUN_LOCAL_DEVICE_IDS"] == "2,3" and env["JAXRUN_CPUS"] == "5"
    assert (env["JAX_PROCESS_ID"], env["JAX_NUM_PROCESSES"]) == ("3", "4")


@pytest.mark.parametrize("name", sorted(set(_ENV.to_env()) - {"JAX_PROCESS_ID", "JAX_NUM_PROCESSES"}))
def test_a_missing_variable_is_named(name):
    env = _ENV.to_env()
    del env[name]
    with pytest.raises(ProtocolError, match=f"{name} is not set.*jaxrun -n"):
        WorkerEnv.from_env(env)


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAXRUN_RANK", "x"), ("JAXRUN_SIZE", ""), ("JAXRUN_INIT_TIMEOUT", "soon"), ("JAXRUN_CPUS", "1,,2")],
)
def test_a_malformed_variable_is_named_with_its_value(name, value):
    with pytest.raises(ProtocolError, match=re.escape(f"{name}={value!r} is not a valid")):
        WorkerEnv.from_env({**_ENV.to_env(), name: value})


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_every_message_reads_back_the_same(kind):
    @given(_some(kind))
    def round_trip(message):
        assert _decoder().feed(encode(message)) == [message]

    round_trip()


@given(st.lists(st.one_of(*map(_some, _KINDS)), max_size=4), st.lists(st.integers(0, 400), max_size=8))
def test_messages_arrive_in_order_however_the_stream_is_cut(messages, cuts):
    stream = b"".join(map(encode, messages))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    decoder = _decoder()
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == messages


def test_text_that_is_no_unicode_survives():
    failed = next(kind for kind in _KINDS if kind.__name__ == "ThreadFailed")
    message = failed(rank=0, time=1.0, thread="\udcff", error="é\n", traceback="")
    assert _decoder().feed(encode(message)) == [message]


def test_half_a_frame_is_no_message_yet():
    frame = encode(Run())
    assert _decoder().feed(frame[:-1]) == []


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_protocol_error(data):
    try:
        _decoder().feed(_frame(data))
    except ProtocolError as error:
        assert "frame" in str(error) or "version" in str(error)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_fields_of_any_type_are_a_message_or_a_protocol_error(kind):
    names = [field.name for field in fields(kind)]

    @given(st.fixed_dictionaries({}, optional={name: _JSON for name in [*names, "stray"]}))
    def check(content):
        try:
            (message,) = _decoder().feed(_frame({"v": FRAME_VERSION, "type": kind.__name__, **content}))
        except ProtocolError as error:
            assert kind.__name__ in str(error)
        else:
            assert type(message) is kind and set(content) == set(names)

    check()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GET / HTTP/1.1", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ({}, "not of version"),
        ([], "not of version"),
        ({"v": FRAME_VERSION + 1, "type": "Run"}, "not of version"),
        ({"v": FRAME_VERSION, "type": "Rum"}, "no known type"),
        ({"v": FRAME_VERSION, "type": ["Run"]}, "no known type"),
        ({"v": FRAME_VERSION, "type": "Run", "x": 1}, "Run has no field 'x'"),
        ({"v": FRAME_VERSION, "type": "Join"}, "Join lacks its field address"),
        ({"v": FRAME_VERSION, "type": "Join", "address": 1}, "Join.address must be of type str, not 1"),
        ({"v": FRAME_VERSION, "type": "Done", "rank": True, "time": 1}, "Done.rank must be of type int, not True"),
        ({"v": FRAME_VERSION, "type": "Done", "rank": 1, "time": 10**400}, "Done.time must be of type float"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_foreign_frame_is_refused_with_its_reason(content, message):
    with pytest.raises(ProtocolError, match=message):
        _decoder().feed(_frame(content))


def test_a_frame_that_is_too_long_is_refused_before_it_arrives():
    with pytest.raises(ProtocolError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        _decoder().feed(struct.pack("!I", MAX_FRAME_BYTES + 1))


def test_a_message_that_is_too_long_is_not_sent():
    joining = next(kind for kind in _KINDS if kind.__name__ == "Join")
    with pytest.raises(ProtocolError, match="is longer than"):
        encode(joining("x" * MAX_FRAME_BYTES))


def test_torchruns_variables_are_set_only_on_request():
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    plain, more = _ENV.to_env(), replace(_ENV, torch_env=True).to_env()
    assert {name: value for name, value in more.items() if plain.get(name) != value} == {
        **names,
        "JAXRUN_TORCH_ENV": "True",
    }
    assert WorkerEnv.from_env(more).torch_env and not WorkerEnv.from_env(plain).torch_env
    with pytest.raises(ProtocolError, match="JAXRUN_TORCH_ENV='yes' is not a valid bool"):
        WorkerEnv.from_env({**more, "JAXRUN_TORCH_ENV": "yes"})
