"""Where the names of the hosts lead, and what proxies there are."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from jaxrun.frontends.doctor.finding import Finding, group_hosts, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.protocol.probe_messages import HostFacts


def check_names(seen: Observation) -> Iterator[Finding]:
    """Whether each host knows its own name, and those of the others. jaxrun needs no names; Gloo alone and MPI do."""
    several, found = len(seen.hosts) > 1, []
    for host, facts in seen.hosts.items():
        line = f"{_address(facts)} {host}"
        if not facts.own_addresses:
            found.append(warning(f"{host}: its own name has no address", f"add to /etc/hosts there: {line}"))
        elif several and all(ipaddress.ip_address(own).is_loopback for own in map(_plain, facts.own_addresses)):
            text = f"{host}: its own name leads to {facts.own_addresses[0]}, where no other host can reach it"
            found.append(warning(text, f"give the name the host's address in /etc/hosts there: {line}"))
    for rank, results in sorted(seen.peers.items()):
        unknown = [name for name in results.unknown_names if name != seen.host_of(rank)]
        if unknown:
            text = f"{seen.host_of(rank)} does not know the name {', '.join(unknown)}"
            found.append(warning(text, "mpirun and srun may need it: add it to DNS, or to /etc/hosts there"))
    yield from found
    if seen.hosts and not found:
        yield ok("each host knows its name and those of the others" if several else _own(seen))


def check_proxies(seen: Observation) -> Iterator[Finding]:
    """jaxrun keeps its own connections off proxies; other libraries may not, and a difference shows in downloads."""
    texts = {
        host: ", ".join(f"{name}={value}" for name, value in sorted(facts.proxies.items())) or "none"
        for host, facts in seen.hosts.items()
    }
    groups = group_hosts(texts)
    if len(groups) > 1:
        found = "; ".join(f"{text} on {hosts}" for text, hosts in groups.items())
        yield warning(f"proxies differ: {found}", "jaxrun --env http_proxy=… --env https_proxy=… sets them alike")
    elif groups and "none" not in groups:
        yield ok(f"{next(iter(groups))}; jaxrun's own connections go past it")


def _own(seen: Observation) -> str:
    ((host, facts),) = seen.hosts.items()
    return f"{host} is {', '.join(facts.own_addresses)}"


def _address(facts: HostFacts) -> str:
    """One that the others may reach, "10.1.0.4"."""
    found = (interface.rpartition(" ")[2] for interface in facts.interfaces)
    return next((ip for ip in found if not ipaddress.ip_address(_plain(ip)).is_loopback), "ADDRESS")


def _plain(ip: str) -> str:
    return ip.partition("%")[0]
