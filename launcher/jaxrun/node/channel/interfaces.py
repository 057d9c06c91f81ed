"""The network interfaces of this host, and which of them other hosts may use."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrun.errors import UsageError
from jaxrun.protocol.addresses import Address, AnyAddress

_CONTAINER_INTERFACES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this host."""

    name: str
    ip: str


def list_interfaces() -> tuple[Interface, ...]:
    """Return the addresses of all interfaces that are up, but those that are valid on one link only."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return tuple(
        Interface(name, found.address)
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if name in up and found.family in (socket.AF_INET, socket.AF_INET6) and not _is_link_local(found.address)
    )


def select_interfaces(there: Iterable[Interface], wanted: str = "") -> tuple[Interface, ...]:
    """Return the interfaces that `wanted` names, an interface, address or network; likeliest first.

    If it is empty, these are all but the loopback ones: on another host, somebody else may listen at such an address.
    Where there are no others, no other host can be meant.

    Raises UsageError, with what there is, if `wanted` names none.
    """
    known = sorted(there, key=_preference)
    if not wanted:
        return tuple(interface for interface in known if not _is_loopback(interface)) or tuple(known)
    chosen = tuple(interface for interface in known if interface.name == wanted or _is_in_network(interface.ip, wanted))
    if not chosen:
        found = ", ".join(f"{interface.name} {interface.ip}" for interface in known)
        raise UsageError(f"--interface {wanted} is no interface, address or network of this host; it has: {found}")
    return chosen


def describe_addresses(addresses: Sequence[AnyAddress], there: Iterable[Interface]) -> str:
    """Return `ib0 10.1.0.4:40123, eth0 192.168.7.4:40123`."""
    names = {interface.ip: interface.name for interface in there}
    return ", ".join(
        f"{names.get(address.ip, '') if isinstance(address, Address) else ''} {address}".strip()
        for address in addresses
    )


def _is_in_network(ip: str, wanted: str) -> bool:
    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _is_link_local(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_link_local


def _is_loopback(interface: Interface) -> bool:
    return ipaddress.ip_address(interface.ip.partition("%")[0]).is_loopback


def _preference(interface: Interface) -> tuple[bool, bool, bool]:
    return _is_loopback(interface), interface.name.startswith(_CONTAINER_INTERFACES), ":" in interface.ip
