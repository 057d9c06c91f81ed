"""What somebody who does not know a job's token does to it, as a program of another user (uid 65534).

strangers.py flood HOST PORT SECONDS     from when PORT is open: connect, and say nothing, or noise, or half a word
strangers.py relay PORT HOST TO_PORT [--delay-welcome SECONDS] [--inject FILE]
    Listen at PORT of the loopback addresses, and pass on all that comes to HOST and back; print a line for each that
    comes.
    --inject: after the handshake, order the client to run a program that writes FILE, and tell the server that the
    worker has ended well.
"""

from __future__ import annotations

import argparse
import contextlib
import encodings.idna  # noqa: F401 - that sockets need, and that cannot be read any more later
import json
import os
import resource
import selectors
import socket
import struct
import sys
import time
from collections import deque

NOBODY = 65534
PER_SECOND = 4000
OPEN_AT_ONCE = 2000
NOISE = (b"", b"", b"\0\0\0", b"GET / HTTP/1.0\r\n\r\n", b"\0\0\1\0{", os.urandom(4096))


def flood(address: tuple[str, int], seconds: float) -> None:
    """Connect as fast as PER_SECOND, from when somebody listens."""
    while not _is_open(address):
        time.sleep(0.002)
    began, made, held = time.monotonic(), 0, deque()
    while (now := time.monotonic() - began) < seconds:
        while made < now * PER_SECOND:
            peer = socket.socket()
            peer.setblocking(False)
            peer.connect_ex(address)
            held.append((peer, NOISE[made % len(NOISE)]))
            made += 1
            if len(held) > OPEN_AT_ONCE:
                held.popleft()[0].close()
        for peer, noise in list(held)[-200:]:
            with contextlib.suppress(OSError):
                peer.send(noise)
        time.sleep(0.001)
    print(f"connected {made} times in {time.monotonic() - began:.1f} s", flush=True)


def _is_open(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


class Relay:
    """Two connections, and what is changed between them."""

    def __init__(self, client: socket.socket, server: socket.socket, flags: argparse.Namespace) -> None:
        self.client, self.server, self.flags = client, server, flags
        self._from_server = bytearray()
        self._frames = 0

    def to_server(self) -> bool:
        data = self.client.recv(65536)
        self.server.sendall(data)
        return bool(data)

    def to_client(self) -> bool:
        data = self.server.recv(65536)
        if self._frames >= 2 or not data:
            self.client.sendall(data)
            return bool(data)
        self._from_server += data
        while self._frames < 2 and len(self._from_server) >= 4:
            (length,) = struct.unpack_from("!I", self._from_server)
            if len(self._from_server) < 4 + length:
                break
            self._frames += 1
            if self._frames == 2:  # the Challenge was the first, this is the Welcome
                time.sleep(self.flags.delay_welcome)
            self.client.sendall(self._from_server[: 4 + length])
            del self._from_server[: 4 + length]
        if self._frames == 2:
            if self.flags.inject:
                self._inject()
            self.client.sendall(self._from_server)
        return True

    def _inject(self) -> None:
        program = ["-c", f"open({self.flags.inject!r}, 'w')"]
        worker = {"rank": 1, "size": 2, "local_rank": 0, "local_size": 1, "host": "h2", "init_timeout": 9.0}
        start = {"worker": worker, "program": program, "environment": {}, "show_output": True, "fork": False}
        tag = os.urandom(16)
        self.client.sendall(frame("StartWorkers", workers=[start], waits=False) + tag)
        self.server.sendall(frame("WorkerExited", rank=1, status=0) + tag)


def frame(name: str, **content: object) -> bytes:
    body = json.dumps({"v": 2, "type": name, **content}).encode()
    return struct.pack("!I", len(body)) + body


def relay(port: int, to: tuple[str, int], flags: argparse.Namespace) -> None:
    selector = selectors.DefaultSelector()

    def listen(address: tuple[str, int], family: int) -> None:
        listening = socket.create_server(address, family=family)
        selector.register(listening, selectors.EVENT_READ, lambda: accept(listening))

    def accept(listening: socket.socket) -> bool:
        client, _ = listening.accept()
        print("somebody came", flush=True)
        server = socket.socket()
        if server.connect_ex(to):
            client.close()
            return True
        both = Relay(client, server, flags)
        for one, move in ((client, both.to_server), (server, both.to_client)):
            selector.register(one, selectors.EVENT_READ, lambda move=move: end(both) if not _try(move) else True)
        return True

    def end(both: Relay) -> bool:
        for one in (both.client, both.server):
            selector.unregister(one)
            one.close()
        return False

    listen(("127.0.0.1", port), socket.AF_INET)
    listen(("::1", port), socket.AF_INET6)
    print("listening", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj in selector.get_map():
                key.data()


def _try(move: object) -> bool:
    try:
        return move()  # type: ignore[operator]
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["flood", "relay"])
    parser.add_argument("words", nargs="+")
    parser.add_argument("--delay-welcome", type=float, default=0.0)
    parser.add_argument("--inject", default="")
    flags = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    flags.words = [socket.gethostbyname(word) if word[0].isalpha() else word for word in flags.words]
    os.setgid(NOBODY)  # from now on Python's own files, below /root perhaps, cannot be read
    os.setuid(NOBODY)
    if flags.what == "flood":
        host, port, seconds = flags.words
        flood((host, int(port)), float(seconds))
    else:
        port, host, to_port = flags.words
        relay(int(port), (host, int(to_port)), flags)


if __name__ == "__main__":
    sys.exit(main())
