"""The process between an editor and debugpy in a rank: debugpy's own adapter, without a port at which it listens.

    python -m jaxrun.frontends.debugger.adapter FD

Standard input and output are the editor's connection; FD is the socket with the bytes of the rank.
"""

from __future__ import annotations

import os
import socket
import sys


def main() -> None:
    # Nobody reads this output, and a full pipe would stop the adapter.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    from debugpy.adapter import clients, servers, sessions

    # The adapter would open a port for further processes to be debugged, unless it has one. This one never listens.
    servers.listener, clients.listener = socket.socket(), None
    servers.Connection(socket.socket(fileno=int(sys.argv[1])))
    clients.Client("stdio")
    servers.wait_until_disconnected()
    sessions.wait_until_ended()


if __name__ == "__main__":
    main()
