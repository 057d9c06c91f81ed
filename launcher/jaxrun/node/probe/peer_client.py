"""Measures the way from this host to the others: whether it is open, its round trip and its bandwidth.

All connections are tried at once. Then each host measures one other at a time, the next one first, so that no host is
measured by several at once; those for which the time does not suffice are left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxrun.node.probe.peer_server import ANSWER, COUNT, PING, SINK
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.probe_messages import MeasurePeers, PeerResults

_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 3.0
_ALL_S = 2.5  # for measuring all peers, after they were reached
_PINGS = 20
_TRIAL_BYTES = 2**18  # by which the amount is chosen that takes about _TRANSFER_S
_TRANSFER_S = 0.01
_MAX_BYTES = 2**25
# The fastest transfer counts, as a host may have other work to do: of three, or of more while all were slow.
_TRANSFERS, _FAST_BYTES_PER_S, _SLOW_TRANSFERS_S = 3, 300e6, 0.3
_BLOCK = bytes(2**18)
_LOOKUP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Way:
    """As in PeerResults."""

    round_trip: float
    bytes_per_s: float


def measure_peers(rank: int, order: MeasurePeers) -> PeerResults:
    """Measure the way from the agent of `rank` to all others of the order."""
    addresses = {peer: parse_addresses(text)[0] for peer, text in order.addresses.items() if peer != rank}
    errors = _try_to_connect(addresses)
    ways: dict[int, _Way] = {}
    deadline = time.monotonic() + _ALL_S
    for peer in sorted(addresses, key=lambda peer: (peer < rank, peer)):
        if peer not in errors and time.monotonic() < deadline:
            try:
                ways[peer] = _measure(addresses[peer], order.cookies[peer])
            except OSError as error:
                errors[peer] = _describe(error)
    return PeerResults(
        rank=rank,
        errors=errors,
        round_trip={peer: way.round_trip for peer, way in ways.items()},
        bytes_per_s={peer: way.bytes_per_s for peer, way in ways.items()},
        unknown_names=_find_unknown(order.hosts.values()),
    )


def _try_to_connect(addresses: Mapping[int, Address]) -> dict[int, str]:
    """Why some of the peers cannot be reached."""
    errors = dict.fromkeys(addresses, "timed out")
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for peer, address in addresses.items():
            attempt = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET))
            attempt.setblocking(False)
            status = attempt.connect_ex((address.ip, address.port))
            if status in (0, errno.EINPROGRESS):
                selector.register(attempt, selectors.EVENT_WRITE, peer)
            else:
                errors[peer] = os.strerror(status)
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                status = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if status:
                    errors[key.data] = os.strerror(status)
                else:
                    del errors[key.data]
    return errors


def _measure(address: Address, cookie: str) -> _Way:
    """Measure the way to one peer. Raises OSError."""
    with socket.create_connection((address.ip, address.port), timeout=_ANSWER_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(cookie.encode())
        round_trip = min(_ping(connection) for _ in range(_PINGS))
        speed = _TRIAL_BYTES / _transfer(connection, _TRIAL_BYTES)
        count = min(max(int(speed * _TRANSFER_S), _TRIAL_BYTES), _MAX_BYTES)
        taken = [_transfer(connection, count) for _ in range(_TRANSFERS)]
        while count / min(taken) < _FAST_BYTES_PER_S and sum(taken) < _SLOW_TRANSFERS_S:
            taken.append(_transfer(connection, count))
        return _Way(round_trip, count / min(taken))


def _ping(connection: socket.socket) -> float:
    """Seconds for a round trip."""
    began = time.perf_counter()
    connection.sendall(PING)
    _wait_for_answer(connection)
    return time.perf_counter() - began


def _transfer(connection: socket.socket, count: int) -> float:
    """Seconds until the peer has so many bytes."""
    began = time.perf_counter()
    connection.sendall(SINK + COUNT.pack(count))
    for start in range(0, count, len(_BLOCK)):
        connection.sendall(memoryview(_BLOCK)[: min(len(_BLOCK), count - start)])
    _wait_for_answer(connection)
    return time.perf_counter() - began


def _wait_for_answer(connection: socket.socket) -> None:
    if connection.recv(len(ANSWER)) != ANSWER:
        raise ConnectionError("closed by what listens there")


def _describe(error: OSError) -> str:
    return "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _find_unknown(hosts: Iterable[str]) -> tuple[str, ...]:
    """Those of the hosts whose name leads nowhere here; by a process, as nothing else ends a lookup that hangs."""
    names = tuple(dict.fromkeys(hosts))
    try:
        done = subprocess.run(["getent", "hosts", *names], capture_output=True, text=True, timeout=_LOOKUP_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    known = set(done.stdout.split())
    return tuple(name for name in names if name not in known)
