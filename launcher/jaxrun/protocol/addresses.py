"""Addresses of heads and of gangs' parents, and their notation: 10.1.0.4:40, [fd00::4]:40, unix:/tmp/x."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from jaxrun.errors import UnavailableError, UsageError

_UNIX = "unix:"
LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
_DISCARD_PORT = 9  # any port will do
_LABEL = re.compile("[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")  # one label of a host name


class Address(Struct, frozen=True):
    """A TCP port of a host; `ip` may be a host name."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


class UnixAddress(Struct, frozen=True):
    """A Unix socket of this machine."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"

    @contextlib.contextmanager
    def short_path(self) -> Iterator[str]:
        """A short path to the socket: the kernel accepts 107 bytes, and temporary directories may have long paths.

        Raises OSError if there is no such directory.
        """
        folder, name = os.path.split(self.path)
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{descriptor}/{name}"
        finally:
            os.close(descriptor)


AnyAddress = Address | UnixAddress


def loopback_address() -> str:
    """The address at which this machine reaches itself: LOOPBACK, or LOOPBACK_6 if it has no other.

    Raises UnavailableError.
    """
    for address, family in ((LOOPBACK, socket.AF_INET), (LOOPBACK_6, socket.AF_INET6)):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            probe.connect((address, _DISCARD_PORT))  # sends nothing
            return address
    raise UnavailableError(
        f"this machine reaches itself neither at {LOOPBACK} nor at {LOOPBACK_6}, which JAX's processes need; "
        "its loopback interface may be down: ip link set lo up"
    )


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parse TCP addresses with commas between them; a host name is allowed in place of an IP address.

    Raises UsageError.
    """
    found = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        bare = host.strip("[]")
        written = f"[{bare}]" if ":" in bare else bare
        if not (bare and host == written and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(f"an address is written host:port or [fd00::1]:port, not {part.strip()!r}")
        if not _may_resolve(bare):
            raise UsageError(f"{bare!r} in {part.strip()!r} is not a host: it is neither an address nor a name")
        found.append(Address(bare, int(port)))
    return tuple(found)


def _may_resolve(host: str) -> bool:
    """Whether this is an IP address or a syntactically valid host name, which may resolve now or later."""
    is_v6 = ":" in host
    with contextlib.suppress(OSError):
        if is_v6:
            socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        else:
            socket.inet_aton(host)
        return True
    try:
        labels = host.removesuffix(".").encode("idna").decode().split(".")
    except UnicodeError:
        return False
    return not is_v6 and not labels[-1].isdecimal() and all(map(_LABEL.fullmatch, labels))


def resolve(address: Address) -> list[tuple[Any, ...]]:
    """Return getaddrinfo's entries for this address, at least one. Raises OSError if the name does not resolve now."""
    return [*socket.getaddrinfo(address.ip, address.port, type=socket.SOCK_STREAM)]


def parse_any_addresses(text: str) -> tuple[AnyAddress, ...]:
    """Parse one Unix socket, or TCP addresses with commas between them. Raises UsageError."""
    return (UnixAddress(text.removeprefix(_UNIX)),) if text.startswith(_UNIX) else parse_addresses(text)


def format_addresses(addresses: Iterable[AnyAddress]) -> str:
    return ",".join(map(str, addresses))
