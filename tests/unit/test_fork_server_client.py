"""The job description sent to a fork server, and the jobs that a running one cannot accept."""

import socket

import pytest

from jaxrun.forkserver.client import ForkServer
from jaxrun.protocol.codec import encode
from jaxrun.protocol.forkserver_messages import (
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    WorkerForked,
)

OWN = {"PATH": "/bin", "GONE": "1", "JAX_PLATFORMS": "cuda"}


@pytest.fixture
def make_server():
    """make_server(directory) → a ForkServer, and the server's end of its channel."""
    channels = []

    def make(directory=""):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channels.extend((ours, theirs))
        return ForkServer(1, ours, OWN, directory), theirs

    yield make
    for channel in channels:
        channel.close()


def test_a_server_gets_the_program_and_the_difference_of_the_environment(make_server):
    server, channel = make_server("/work")
    assert server.configure(("train.py", "a b"), {"PATH": "/bin", "MINE": "x", "JAX_PLATFORMS": "cpu"})
    (order,) = ForkServerMessageDecoder().feed(channel.recv(65536))
    environment = {"MINE": "x", "JAX_PLATFORMS": "cpu"}
    assert order == ConfigureForkServer(("train.py", "a b"), environment, ("GONE",), "/work")


READ_AT_START = ({"PYTHONHASHSEED": "3"}, {"PYTHONPATH": "/x"}, {"LD_PRELOAD": ""}, {"LC_ALL": "C"}, {"TZ": "UTC"})
READ_AT_IMPORT = ({"JAX_ENABLE_X64": "1"}, {"NPY_PROMOTION_STATE": "weak"})
SET_AFTER_IMPORT = ({"JAX_PLATFORMS": "cpu"}, {"JAX_NUM_CPU_DEVICES": "2"})


@pytest.mark.parametrize("changed", READ_AT_START + READ_AT_IMPORT + SET_AFTER_IMPORT)
def test_variables_that_interpreter_and_jax_have_read_already_cannot_be_changed(make_server, changed):
    for directory in ("", "/with/jax/imported"):
        server, channel = make_server(directory)
        possible = changed in SET_AFTER_IMPORT or (changed in READ_AT_IMPORT and not directory)
        assert server.configure((), {**OWN, **changed}) is possible
        server.close()
        assert bool(channel.recv(65536)) is possible


def test_the_answers_end_with_none_when_the_server_has_gone(make_server):
    server, channel = make_server()
    assert server.receive() == []
    answers = [WorkerForked(0, 7), ForkDeclined("a thread", "")]
    for answer in answers:
        channel.send(encode(answer))
    channel.close()
    assert server.receive() == [*answers, None]
