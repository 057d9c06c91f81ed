"""The program of a gang's ranks: connects to the parent, and runs the functions that it sends until it disconnects.

JAXRUN_GANG has the parent's addresses, and JAXRUN_GANG_TOKEN the token that both know.
"""

from __future__ import annotations

import os
import sys

import jaxrun_runtime
from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.protocol.addresses import parse_any_addresses
from jaxrun.protocol.connect import HeadAddress, HeadConnection, connect
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN

CONNECT_TIMEOUT_S = 10.0


def main() -> None:
    from jaxrun_runtime.gang import calls

    try:
        parent = connect_to_parent(os.environ.pop(GANG_ADDRESS, ""), os.environ.pop(GANG_TOKEN, ""))
    except (ProtocolError, UnavailableError) as error:
        sys.exit(f"this rank cannot reach the Python process that owns its gang: {error}")
    calls.serve(parent.connection, parent.tags)


def connect_to_parent(addresses: str, token: str) -> HeadConnection:
    """Return a blocking, authenticated connection. Raises ProtocolError or UnavailableError."""
    try:
        parent = HeadAddress(token, parse_any_addresses(addresses))
    except UsageError:
        text = f"{GANG_ADDRESS}={addresses!r} names no address; this program is started by jaxrun.Gang"
        raise ProtocolError(text) from None
    found = connect(lambda: parent, jaxrun_runtime.rank, CONNECT_TIMEOUT_S, target="parent of its gang")
    found.connection.setblocking(True)
    return found


if __name__ == "__main__":
    main()
