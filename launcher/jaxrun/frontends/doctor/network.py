"""Checks whether all hosts reach each other, names resolve, proxies are equal, and clocks agree."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from jaxrun.analysis.diagnosis.findings import Finding, describe_values, failure, ok, warning
from jaxrun.frontends.doctor.observation import Observation, Pair
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.text import format_seconds

_CLOCK_S = 1.0  # a larger offset makes logs misleading, and leases and certificates fail
_OPEN_PORTS = "open all TCP ports between the hosts, since JAX uses free ones; --interface NAME chooses another network"


class Blame(Struct, frozen=True):
    """Closed connections in few words: hosts with closed connections to all others, and the remaining pairs."""

    hosts: tuple[str, ...]
    pairs: tuple[Pair, ...]


def blame(closed: set[Pair], hosts: set[str]) -> Blame:
    """Name a host as long as there is one with closed connections to at least half of the others, and at least two."""
    left, named = set(closed), set[str]()
    if closed == {(one, other) for one in hosts for other in hosts if one != other} and len(hosts) > 2:
        return Blame(tuple(sorted(hosts)), ())
    while left:
        partners = Counter(host for pair in {frozenset(pair) for pair in left} for host in pair)
        host, count = max(partners.items(), key=lambda item: (item[1], item[0]))
        if count < max(2, (len(hosts) - len(named) - 1) / 2):
            break
        named.add(host)
        left = {pair for pair in left if host not in pair}
    return Blame(tuple(sorted(named)), tuple(sorted(left)))


def check_network(seen: Observation) -> Iterator[Finding]:
    """Check whether each host can connect to each other, and by which interface."""
    if len(seen.peers) < 2:
        return
    hosts = {seen.host_of(agent) for agent in seen.peers}
    errors = seen.errors
    if errors:
        found = blame(set(errors), hosts)
        parts = []
        for host in found.hosts:
            reasons = sorted({reason for pair, reason in errors.items() if host in pair})
            parts.append(f"{host} cannot be connected with the others ({', '.join(reasons)})")
        parts += (f"{one} cannot connect to {other} ({errors[one, other]})" for one, other in found.pairs)
        yield failure("; ".join(parts), _OPEN_PORTS)
        return
    interfaces: dict[str, list[str]] = {}
    for (host, _), interface in seen.interfaces.items():
        interfaces.setdefault(host, []).append(interface)
    by = describe_values({host: " and ".join(sorted(set(names))) for host, names in interfaces.items()})
    yield ok(f"each host reaches each other, by {by}")


def check_clocks(seen: Observation) -> Iterator[Finding]:
    """Compare the clocks of the hosts, as far as they are known, with this host's clock."""
    offsets = {seen.host_of_rank(rank): clock for rank, clock in seen.clocks.items()}
    off = {host: clock for host, clock in offsets.items() if abs(clock.offset_s) > _CLOCK_S + clock.error_s}
    for host, clock in off.items():
        side = "behind" if clock.offset_s > 0 else "ahead of"
        text = f"the clock of {host} is {format_seconds(abs(clock.offset_s))} {side} this host's clock"
        yield warning(text, "timedatectl set-ntp true there, or chronyc makestep")
    if len(offsets) > 1 and not off:
        worst = max(abs(clock.offset_s) + clock.error_s for clock in offsets.values())
        yield ok(f"within {1e3 * worst:.3g} ms of this host's")


def check_names(seen: Observation) -> Iterator[Finding]:
    """Check whether each host knows its own name and the others' names. jaxrun needs none; Gloo alone and MPI do."""
    several, found = len(seen.hosts) > 1, []
    for host, facts in seen.hosts.items():
        line = f"{_usual_address(facts)} {host}"
        if not facts.name_addresses:
            found.append(warning(f"{host}: its own name has no address", f"add to /etc/hosts there: {line}"))
        elif several and all(map(_is_loopback, facts.name_addresses)):
            text = f"{host}: its own name resolves to {facts.name_addresses[0]}, which no other host can reach"
            found.append(warning(text, f"map the name to the host's address in /etc/hosts there: {line}"))
    for agent, results in sorted(seen.peers.items()):
        unknown = [name for name in results.unknown_names if name != seen.host_of(agent)]
        if unknown:
            text = f"{seen.host_of(agent)} does not know the name {', '.join(unknown)}"
            found.append(warning(text, "mpirun and srun may need it: add it to DNS, or to /etc/hosts there"))
    yield from found
    if several and not found:
        yield ok("each host knows its name and the others' names")
    elif seen.hosts and not found:
        ((host, facts),) = seen.hosts.items()
        yield ok(f"{host} is {', '.join(facts.name_addresses)}")


def check_proxies(seen: Observation) -> Iterator[Finding]:
    """jaxrun keeps its own connections off proxies; other libraries may not, and a difference shows in downloads."""
    texts = {
        host: ", ".join(f"{name}={value}" for name, value in sorted(facts.proxies.items())) or "none"
        for host, facts in seen.hosts.items()
    }
    if len(set(texts.values())) > 1:
        advice = "jaxrun --env http_proxy=… --env https_proxy=… sets the same ones"
        yield warning(f"proxies differ: {describe_values(texts)}", advice)
    elif texts and "none" not in texts.values():
        yield ok(f"{describe_values(texts)}; jaxrun's own connections bypass it")


def _usual_address(facts: HostFacts) -> str:
    """Return an address that the others may reach, "10.1.0.4"."""
    return next((ip for ip in facts.addresses if not _is_loopback(ip)), "ADDRESS")


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback
