"""The addresses of this host's network interfaces, from the C library's getifaddrs."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

_IS_UP, _IS_RUNNING = 0x1, 0x40  # flags of an interface
_IP_AT: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}  # bytes of a sockaddr


class _Entry(ctypes.Structure):
    """struct ifaddrs, as far as it is read."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) for each IPv4 and IPv6 address of the interfaces that run. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        return list(_read(first))
    finally:
        libc.freeifaddrs(first)


def _read(entry: ctypes._Pointer[_Entry]) -> Iterator[tuple[str, str]]:
    while entry:
        found = entry.contents
        if found.address and found.flags & _IS_UP and found.flags & _IS_RUNNING:
            family = ctypes.c_uint16.from_address(found.address).value
            if where := _IP_AT.get(family):
                ip = socket.inet_ntop(family, ctypes.string_at(found.address, where.stop)[where])
                yield os.fsdecode(found.name), ip
        entry = found.next
