"""A stranger at JAX's coordinator: what comes back from it, `python coordinator_stranger.py ADDRESS [FOLDER]` prints.

An HTTP/2 server, as that of gRPC, greets a client that it has accepted. A stranger by TLS takes any server for the
right one, so that only the server's own check counts. FOLDER holds the files `certificate` and `key`; without one, the
stranger connects without TLS and then by TLS without a certificate.
"""

import socket
import ssl
import sys
from contextlib import ExitStack

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # with an empty frame of settings
_TIMEOUT_S = 60


def ask_plainly(address):
    """The server's greeting; nothing where it accepts nobody without TLS."""
    return _ask(address, None)


def ask_by_tls(address, folder=None):
    """The same by TLS, with the certificate in this folder, or with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if folder is not None:
        context.load_cert_chain(f"{folder}/certificate", f"{folder}/key")
    return _ask(address, context)


def _ask(address, context):
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S))
        try:
            if context is not None:
                connection = stack.enter_context(context.wrap_socket(connection))
            connection.sendall(_GREETING)
            return connection.recv(4096)
        except (ssl.SSLError, ConnectionError):
            return b""


if __name__ == "__main__":
    address, *folder = sys.argv[1:]
    print(*([ask_by_tls(address, *folder)] if folder else [ask_plainly(address), ask_by_tls(address)]))
