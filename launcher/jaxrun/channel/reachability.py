"""Can a head be reached from here? Asked on a host whose agent was not heard from."""

from __future__ import annotations

import os
import socket

from jaxrun.channel import addresses
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol.agent_messages import Challenge
from jaxrun.protocol.codec import MessageDecoder, message_types

_SECONDS = 5.0
_FRAME = 4096


def check_reachable(text: str) -> int:
    """Say which of the addresses a head greets at; returns 0. UnavailableError where there is none."""
    reached, failed = [], []
    for address in addresses.parse_addresses(text):
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


def _probe(address: addresses.Address) -> str:
    """The address of this end, once a head has said its first word."""
    with socket.create_connection((address.ip, address.port), timeout=_SECONDS) as connection:
        codec: MessageDecoder[Challenge] = MessageDecoder(message_types(Challenge), _FRAME)
        while not (words := codec.feed(connection.recv(_FRAME) or _nothing())):
            pass
        assert words
        return str(connection.getsockname()[0])


def _nothing() -> bytes:
    raise ProtocolError("somebody listens there, but it is no head of jaxrun")
