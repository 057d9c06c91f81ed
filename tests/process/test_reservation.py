"""The reservation of the coordinator's port: nobody else gets it, and JAX's coordinator can listen on it."""

import errno
import socket
import struct
import subprocess
import sys

import pytest
from harness_worker import IPV6, environment

from jaxrun_runtime.join import PortReservation

_IP_LOCAL_PORT_RANGE = 51  # since Linux 6.3
_INTERFACES = ["127.0.0.1", pytest.param("::1", marks=IPV6)]


@pytest.fixture
def reserved(request):
    port = PortReservation(getattr(request, "param", "127.0.0.1"))
    yield port
    port.release()


def _number(port):
    return int(port.address.rpartition(":")[2])


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("interface", "shape"), [("127.0.0.1", "127.0.0.1:{}"), pytest.param("::1", "[::1]:{}", marks=IPV6)]
)
def test_the_address_is_written_as_grpc_reads_it(interface, shape):
    port = PortReservation(interface)
    assert port.address == shape.format(_number(port))
    port.release()


@pytest.mark.parametrize("interface", ["127.0.0.1", "0.0.0.0"])
def test_nobody_else_can_bind_a_reserved_port_unasked(reserved, interface):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError) as caught:
            other.bind((interface, _number(reserved)))
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("shared", [False, True])
def test_a_reserved_port_is_never_handed_out(reserved, shared):
    number = _number(reserved)
    with socket.socket() as other:
        if shared:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            other.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("I", number << 16 | number))
        except OSError:
            pytest.skip("this kernel cannot narrow the range of ports for one socket")
        with pytest.raises(OSError) as caught:
            other.bind(("127.0.0.1", 0))
    assert caught.value.errno == errno.EADDRINUSE


def test_two_reservations_differ(reserved):
    others = [PortReservation("127.0.0.1") for _ in range(200)]
    assert len({port.address for port in [reserved, *others]}) == 201
    for port in others:
        port.release()


def test_it_connects_only_when_somebody_listens(reserved):
    assert not reserved.accepts_connections()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", _number(reserved)))
        assert not reserved.accepts_connections()
        listener.listen()
        assert reserved.accepts_connections()
    reserved.release()
    assert not reserved.accepts_connections()


@pytest.mark.jax_version
@pytest.mark.parametrize("reserved", _INTERFACES, indirect=True)
def test_jaxs_coordinator_can_listen_on_a_reserved_port(reserved):
    code = f"""
import jax, sys
address = {reserved.address!r}
more = dict(coordinator_bind_address=address, cluster_detection_method="deactivate")
jax.distributed.initialize(address, 1, 0, **more)
print(jax.process_count(), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    with process:
        assert process.stdout.readline() == "1\n"
        assert reserved.accepts_connections()
        process.stdin.close()
    assert process.returncode == 0
