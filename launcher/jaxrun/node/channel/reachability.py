"""Checks that a head can be reached, from a host whose agent has not reported (`jaxrun attach --check`)."""

from __future__ import annotations

import os
import socket

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.auth import MAX_FRAME_BYTES, Challenge
from jaxrun.protocol.codec import MessageDecoder, message_types

_TIMEOUT_S = 5.0


def check_reachable(text: str) -> int:
    """Print at which of the addresses a head answers; return 0. Raises UnavailableError where there is none."""
    reached, failed = [], []
    for address in parse_addresses(text):
        try:
            own = _probe(address)
        except (OSError, ProtocolError) as error:
            failed.append(f"{address}: {error}")
        else:
            reached.append(f"a head of jaxrun answers at {address}, reached from {own}")
    if not reached:
        raise UnavailableError(f"from {os.uname().nodename} no head can be reached; {'; '.join(failed)}")
    print("\n".join(reached))
    return 0


def answers(address: Address) -> bool:
    """Whether a head answers at this address."""
    try:
        return bool(_probe(address))
    except (OSError, ProtocolError):
        return False


def _probe(address: Address) -> str:
    """Return the IP address of this end, once a head has sent its challenge."""
    with socket.create_connection((address.ip, address.port), timeout=_TIMEOUT_S) as connection:
        decoder: MessageDecoder[Challenge] = MessageDecoder(message_types(Challenge), MAX_FRAME_BYTES)
        while data := connection.recv(MAX_FRAME_BYTES):
            if decoder.feed(data):
                return str(connection.getsockname()[0])
        raise ProtocolError("somebody listens there, but it is no head of jaxrun")
