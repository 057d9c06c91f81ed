"""Slow ways between two hosts, as a kernel without netem has none: slow_link.py PEER DEVICE:ADDRESS:DELAY:PORT …

Each is a network device of this host with an address; what is sent to it leaves for the same device of the host PEER,
where such a program runs, too, as UDP packets to PORT, after DELAY seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU = 1400
_PACKET_BYTES = 2048


def open_device(name: str, address: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
    subprocess.run(["ip", "address", "add", f"{address}/24", "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "mtu", str(_MTU), "up"], check=True)
    return device


def main() -> None:
    peer, *links = sys.argv[1:]
    selector = selectors.DefaultSelector()
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    delays = set()
    for link in links:
        name, address, delay, port = link.split(":")
        delays.add(float(delay))
        device = open_device(name, address)
        wire = socket.socket(type=socket.SOCK_DGRAM)
        wire.bind(("", int(port)))
        wire.connect((peer, int(port)))

        def leave(device: int = device, wire: socket.socket = wire, delay: float = float(delay)) -> None:
            waiting.append((time.monotonic() + delay, wire, os.read(device, _PACKET_BYTES)))

        def arrive(device: int = device, wire: socket.socket = wire) -> None:
            with contextlib.suppress(ConnectionRefusedError):  # the other end has not started
                os.write(device, wire.recv(_PACKET_BYTES))

        selector.register(device, selectors.EVENT_READ, leave)
        selector.register(wire, selectors.EVENT_READ, arrive)
    print("up", flush=True)
    while True:
        for at, wire, packet in sorted(waiting, key=lambda one: one[0]):
            if at <= time.monotonic():
                waiting.remove((at, wire, packet))
                with contextlib.suppress(ConnectionRefusedError):
                    wire.send(packet)
        soonest = min((at for at, _, _ in waiting), default=None)
        for key, _ in selector.select(None if soonest is None else max(0.0, soonest - time.monotonic())):
            key.data()


if __name__ == "__main__":
    main()
