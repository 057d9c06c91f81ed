"""The addresses of this host, and those to which other hosts may connect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.node.channel.interface_addresses import interface_addresses
from jaxrun.protocol.addresses import Address, AnyAddress

_CONTAINER_INTERFACES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")


class HostAddress(Struct, frozen=True):
    """An address of this host, and the network interface that has it: "eth0"."""

    interface: str
    ip: str


def list_addresses() -> tuple[HostAddress, ...]:
    """Return the addresses of all interfaces that are up, except those that are valid on one link only."""
    return tuple(HostAddress(name, ip) for name, ip in interface_addresses() if not _is_link_local(ip))


def select_addresses(there: Iterable[HostAddress], wanted: str = "") -> tuple[HostAddress, ...]:
    """Return the addresses that `wanted` names, by an interface, address or network; likeliest first.

    If it is empty, these are all except the loopback addresses: on another host, they may belong to someone else. If
    there are only loopback addresses, no other host takes part.

    Raises UsageError, with what there is, if `wanted` names none.
    """
    known = sorted(there, key=_preference)
    if not wanted:
        return tuple(one for one in known if not _is_loopback(one)) or tuple(known)
    chosen = tuple(one for one in known if one.interface == wanted or _is_in_network(one.ip, wanted))
    if not chosen:
        found = ", ".join(f"{one.interface} {one.ip}" for one in known)
        raise UsageError(
            f"--interface {wanted} is not an interface, address or network of this host, which has: {found}"
        )
    return chosen


def describe_addresses(addresses: Sequence[AnyAddress], there: Iterable[HostAddress]) -> str:
    """Write `ib0 10.1.0.4:40123, eth0 192.168.7.4:40123`."""
    names = {one.ip: one.interface for one in there}
    return ", ".join(
        f"{names.get(address.ip, '') if isinstance(address, Address) else ''} {address}".strip()
        for address in addresses
    )


def _is_in_network(ip: str, wanted: str) -> bool:
    import ipaddress  # takes 3 ms, which a job on one machine saves

    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _is_link_local(ip: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(ip.partition("%")[0]).is_link_local


def _is_loopback(address: HostAddress) -> bool:
    import ipaddress

    return ipaddress.ip_address(address.ip.partition("%")[0]).is_loopback


def _preference(address: HostAddress) -> tuple[bool, bool, bool]:
    return _is_loopback(address), address.interface.startswith(_CONTAINER_INTERFACES), ":" in address.ip
