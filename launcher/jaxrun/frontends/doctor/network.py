"""Whether all hosts reach each other, how fast, and whether their clocks agree."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from jaxrun.frontends.doctor.finding import Finding, and_list, failure, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.text import format_rate, format_seconds

Pair = tuple[str, str]  # from, to
T = TypeVar("T")

# A way is slow if it is so much worse than the best one and beyond the first limit, or beyond the second one.
_TIMES_WORSE = 5
_ROUND_TRIP_S = (0.002, 0.02)
_BYTES_PER_S = (200e6, 20e6)
_CLOCK_S = 1.0  # beyond which logs are misleading, and leases and certificates fail
_OPEN_PORTS = "open all TCP ports between the hosts, for JAX takes free ones; --interface NAME chooses another network"
_SLOW = "ethtool NAME and ip -s link there: the speed of the link, its errors; is another job using the network?"


@dataclass(frozen=True, slots=True)
class Blame:
    """Bad ways in as few words as they take: hosts all of whose ways are bad, and the pairs that are left."""

    hosts: tuple[str, ...]
    pairs: tuple[Pair, ...]

    def __str__(self) -> str:
        """As the subject of a sentence."""
        return "the network " + and_list(
            (*(f"of {host}" for host in self.hosts), *(f"from {one} to {other}" for one, other in self.pairs))
        )


def blame(bad: set[Pair], hosts: set[str]) -> Blame:
    """Name a host as long as there is one with bad ways to half of the others at least, and to two."""
    left, named = set(bad), set[str]()
    if bad == {(one, other) for one in hosts for other in hosts if one != other} and len(hosts) > 2:
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
    if len(seen.peers) < 2:
        return
    hosts = {seen.host_of(rank) for rank in seen.peers}
    errors = _pairs(seen, {rank: results.errors for rank, results in seen.peers.items()})
    if errors:
        yield failure(_describe_errors(errors, blame(set(errors), hosts)), _OPEN_PORTS)
    trips, speeds = ways(seen)
    yield from _check_slow(trips, speeds, hosts)
    if trips and not errors:
        count = len(hosts) * (len(hosts) - 1)
        best = f"{format_latency(statistics.median(trips.values()))}, {format_rate(_median(speeds))}"
        yield ok(f"each host reaches each other ({count} ways), {best} at the median{_interfaces(seen)}")


def check_clocks(seen: Observation) -> Iterator[Finding]:
    """The clocks of the hosts, as far as they are known, against that of this one."""
    offsets = {seen.host_of(rank): clock for rank, clock in seen.clocks.items()}
    off = {host: clock for host, clock in offsets.items() if abs(clock.offset_s) > _CLOCK_S + clock.error_s}
    for host, clock in off.items():
        side = "behind" if clock.offset_s > 0 else "ahead of"
        text = f"the clock of {host} is {format_seconds(abs(clock.offset_s))} {side} that of this host"
        yield warning(text, "timedatectl set-ntp true there, or chronyc makestep")
    if len(offsets) > 1 and not off:
        worst = max(abs(clock.offset_s) + clock.error_s for clock in offsets.values())
        yield ok(f"within {format_latency(worst)} of this host's")


def ways(seen: Observation) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """The round trips and the bandwidths that were measured."""
    trips = _pairs(seen, {rank: results.round_trip for rank, results in seen.peers.items()})
    speeds = _pairs(seen, {rank: results.bytes_per_s for rank, results in seen.peers.items()})
    return trips, speeds


def format_latency(value: float) -> str:
    """Write 0.00005 as `0.05 ms`, which `format_seconds` would round to nothing."""
    return f"{1e3 * value:.2f} ms" if value < 0.1 else format_seconds(value)


def _describe_errors(errors: Mapping[Pair, str], found: Blame) -> str:
    parts = []
    for host in found.hosts:
        reasons = sorted({reason for pair, reason in errors.items() if host in pair})
        parts.append(f"{host} cannot be connected with the others ({', '.join(reasons)})")
    parts += (f"{one} cannot connect to {other} ({errors[one, other]})" for one, other in found.pairs)
    return "; ".join(parts)


def _check_slow(trips: Mapping[Pair, float], speeds: Mapping[Pair, float], hosts: set[str]) -> Iterator[Finding]:
    shortest, fastest = min(trips.values(), default=0.0), max(speeds.values(), default=0.0)
    far = {pair: trip for pair, trip in trips.items() if _is_far(trip, shortest)}
    thin = {pair: speed for pair, speed in speeds.items() if _is_thin(speed, fastest)}
    if far:
        text = f"takes up to {format_latency(max(far.values()))} for a round trip"
        yield warning(f"{blame(set(far), hosts)} {text}, others {format_latency(shortest)}", _SLOW)
    if thin:
        text = f"carries down to {format_rate(min(thin.values()))}, others {format_rate(fastest)}"
        yield warning(f"{blame(set(thin), hosts)} {text}", _SLOW)


def _is_far(trip: float, shortest: float) -> bool:
    suspicious, bad = _ROUND_TRIP_S
    return trip > bad or trip > max(suspicious, _TIMES_WORSE * shortest)


def _is_thin(speed: float, fastest: float) -> bool:
    suspicious, bad = _BYTES_PER_S
    return speed < bad or speed < min(suspicious, fastest / _TIMES_WORSE)


def _median(values: Mapping[Pair, float]) -> float:
    return statistics.median(values.values()) if values else 0.0


def _pairs(seen: Observation, values: Mapping[int, Mapping[int, T]]) -> dict[Pair, T]:
    name = seen.host_of
    return {(name(one), name(other)): value for one, to in values.items() for other, value in to.items()}


def _interfaces(seen: Observation) -> str:
    """By which interfaces, where all hosts call them alike."""
    names = {
        tuple(sorted({interface.split()[0] for interface in facts.interfaces if not interface.startswith("lo ")}))
        for facts in seen.hosts.values()
    }
    return f", by {next(iter(names))[0]}" if len(names) == 1 and len(next(iter(names))) == 1 else ""
