"""The program of a gang's workers: goes to the parent, and runs what that sends until there is no more.

JAXRUN_GANG says where the parent is: "unix:PATH", or "tcp:ADDRESS,ADDRESS" with a token in JAXRUN_GANG_TOKEN.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from jaxrun.errors import ProtocolError
from jaxrun.protocol import handshake
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN

_CONNECT_TIMEOUT_S = 10.0  # seconds for each address


def main() -> None:
    from jaxrun_runtime import gang_worker

    try:
        connection = connect(os.environ.pop(GANG_ADDRESS, ""), os.environ.pop(GANG_TOKEN, ""))
    except (OSError, ProtocolError) as error:
        sys.exit(f"this rank cannot reach the Python process that its gang belongs to: {error}")
    gang_worker.serve(connection)


def connect(where: str, token: str) -> socket.socket:
    """A connection to the parent; OSError or ProtocolError with what the last address did."""
    kind, _, rest = where.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        with _closed_if_it_fails(connection), handshake.short(rest) as name:
            connection.connect(name)
        return connection
    trouble: Exception = ProtocolError(
        f"{GANG_ADDRESS}={where!r} names no address; this program is started by jaxrun.Gang"
    )
    for address in filter(None, rest.split(",")):
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S)
            with _closed_if_it_fails(connection):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                handshake.enter(connection, token)
            return connection
        except (OSError, ProtocolError) as error:
            trouble = error
    raise trouble


@contextlib.contextmanager
def _closed_if_it_fails(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


if __name__ == "__main__":
    main()
