"""At which addresses of this host the others may reach it, and how they are written: 10.1.0.4:40, [fd00::4]:40."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrun.errors import UsageError

_LOOPBACK = "127.0.0.1"
_CONTAINER_INTERFACES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this host."""

    name: str
    ip: str


@dataclass(frozen=True, slots=True)
class Address:
    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def list_interfaces() -> tuple[Interface, ...]:
    """The addresses of this host's interfaces that are up, less those that are good on one link only."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return tuple(
        Interface(name, found.address)
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if name in up and found.family in (socket.AF_INET, socket.AF_INET6) and not _is_link_local(found.address)
    )


def select_interfaces(there: Iterable[Interface], wanted: str = "") -> tuple[Interface, ...]:
    """Those that `wanted` names: an interface, an address or a network; all if it is empty, the likeliest first.

    UsageError, with what there is, if it names none.
    """
    known = sorted(there, key=_preference)
    if not wanted:
        return tuple(known)
    chosen = tuple(interface for interface in known if interface.name == wanted or _is_in_network(interface.ip, wanted))
    if not chosen:
        found = ", ".join(f"{interface.name} {interface.ip}" for interface in known)
        raise UsageError(f"--interface {wanted} is no interface, address or network of this host; it has: {found}")
    return chosen


def describe_addresses(addresses: Sequence[Address], there: Iterable[Interface]) -> str:
    """`ib0 10.1.0.4:40123, eth0 192.168.7.4:40123`."""
    names = {interface.ip: interface.name for interface in there}
    return ", ".join(f"{names.get(address.ip, '')} {address}".strip() for address in addresses)


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Addresses with commas between them. UsageError for what is none; a name is allowed in an address' place."""
    found = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        bare = host.strip("[]")
        written = f"[{bare}]" if ":" in bare else bare
        if not (bare and host == written and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(f"an address is written host:port or [fd00::1]:port, not {part.strip()!r}")
        found.append(Address(bare, int(port)))
    return tuple(found)


def format_addresses(addresses: Iterable[Address]) -> str:
    return ",".join(map(str, addresses))


def _is_in_network(ip: str, wanted: str) -> bool:
    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _is_link_local(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_link_local


def _preference(interface: Interface) -> tuple[bool, bool, bool]:
    loopback = ipaddress.ip_address(interface.ip).is_loopback
    return loopback, interface.name.startswith(_CONTAINER_INTERFACES), ":" in interface.ip
