"""Carries the Ethernet frames between two devices, those from the first one late: relay.py SLOW FAST SECONDS MARKER.

The kernel's own means for this, netem, is a module that many kernels of virtual machines lack.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
# From linux/if_packet.h and asm/socket.h. With its virtio header, a frame that the sender's kernel left to be cut into
# pieces or to be given a checksum is passed on in that state.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 263, 15, 23, 33
LARGEST_FRAME, MOST_WAITING_BYTES, RECEIVE_BUFFER = 2**17, 2**26, 2**24
# A link that is down, and a queue that is full: frames are lost then, as on a wire.
LOSSES = {errno.ENETDOWN, errno.ENOBUFS, errno.EAGAIN, errno.ENXIO}


def attached(device: str) -> socket.socket:
    """A socket for all frames that come in at this device."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    wire.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    wire.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    wire.bind((device, ETH_P_ALL))
    wire.setblocking(False)
    return wire


def carry(slow: socket.socket, fast: socket.socket, delay: float) -> None:
    """Pass frames on for ever, in order; those that come in at `slow` after `delay` seconds."""
    waiting: deque[tuple[float, bytes]] = deque()
    waiting_bytes = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([slow, fast], [], [], patience)
        if fast in ready and (frame := receive(fast)):
            send(slow, frame)
        if slow in ready and (frame := receive(slow)) and waiting_bytes + len(frame) <= MOST_WAITING_BYTES:
            waiting.append((time.monotonic() + delay, frame))
            waiting_bytes += len(frame)
        while waiting and waiting[0][0] <= time.monotonic():
            _, frame = waiting.popleft()
            waiting_bytes -= len(frame)
            send(fast, frame)


def receive(wire: socket.socket) -> bytes:
    try:
        return wire.recv(LARGEST_FRAME)
    except OSError as error:
        if error.errno not in LOSSES:
            raise
        return b""


def send(wire: socket.socket, frame: bytes) -> None:
    try:
        wire.send(frame)
    except OSError as error:
        if error.errno not in LOSSES:
            raise


if __name__ == "__main__":
    ends = attached(sys.argv[1]), attached(sys.argv[2])
    print("ready", flush=True)
    sys.stdout.close()
    carry(*ends, float(sys.argv[3]))
