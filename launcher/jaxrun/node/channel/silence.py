"""Decides whether a host is alive: its kernel answers whatever its processes do. A host that ignores probes is lost.

A probe is the first packet of a TCP connection to a port at which nothing listens. The other kernel refuses it at once.
Each probe is a new connection, because TCP repeats lost packets ever more slowly. The number of unanswered probes
decides, not the time: a process, or a host, that stands still itself sends none meanwhile.

The head sends beats, which the agents' kernels acknowledge, so that probes are rare. They cost the head some time, so
many agents get them less often.

Nothing else declares a host lost. Code that must know at once whether a host is alive asks its watch, and waits until
host has answered or is lost.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.node.channel.connection import Connection

BEAT_INTERVAL_S = 0.5
_MANY_AGENTS = 1000
_LATE_S = 0.5  # by which beats, suspicions and losses come later with many agents
LONGEST_SILENCE_S = 8.0  # of the connection, if probes are useless
GRACE_S = 0.1  # for late answers; an extra probe does no harm
_PROBE_INTERVAL_S = 0.2
_SENT = (errno.EINPROGRESS, errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)
_ANSWERED = (errno.ECONNREFUSED, errno.EISCONN, 0)
_KERNEL_CLOCK_S = 0.02  # error of the kernel's time since it last received something


def reserve_port() -> socket.socket:
    """Return a socket that holds a TCP port of this host at which nothing listens. Raises OSError."""
    reserved = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    reserved.bind(("", 0))
    return reserved


class SilenceLimit(Struct, frozen=True):
    """A host is probed `suspect_after` seconds after its last packet, and lost after `timeout`."""

    timeout: float
    beat_interval: float = BEAT_INTERVAL_S
    suspect_after: float = BEAT_INTERVAL_S + GRACE_S

    @staticmethod
    def of_head(timeout: float, agents: int) -> SilenceLimit:
        """Return the head's limit for the hosts of this many agents."""
        late_s = _LATE_S if agents > _MANY_AGENTS else 0.0
        interval = BEAT_INTERVAL_S + late_s
        return SilenceLimit(timeout + late_s, interval, interval + GRACE_S)

    @property
    def probes(self) -> int:
        """The number of unanswered probes after which a host is lost."""
        return max(1, round((self.timeout - self.suspect_after) / _PROBE_INTERVAL_S))

    @staticmethod
    def of_agent(timeout: float) -> SilenceLimit:
        """Return an agent's limit for the head's host."""
        # A host whose link is down forgets its neighbours' addresses, and asks for one that it needs once a second. If
        # it begins while the link is cut, it can answer nobody for up to a second after: so an agent probes late.
        usual = SilenceLimit(timeout)
        return replace(usual, suspect_after=max(usual.suspect_after, timeout - 2 * _PROBE_INTERVAL_S))


class Probes(Struct, frozen=True):
    """The number of probes of a host left unanswered in a row, and whether it has ever answered one."""

    unanswered: int = 0
    answers: bool = False

    def update(self, limit: SilenceLimit, silence_s: float, *, answered: bool) -> Probes:
        """Return the new state after `silence_s` seconds of silence; `answered`: the latest probe was."""
        return Probes(0, True) if answered or (self.answers and silence_s < limit.suspect_after) else self

    def is_due(self, limit: SilenceLimit, silence_s: float) -> bool:
        """Whether to send another probe: to a silent host, and at first, to find out whether it answers."""
        return silence_s >= limit.suspect_after if self.answers else not self.in_vain(limit)

    def in_vain(self, limit: SilenceLimit) -> bool:
        """Whether probes are useless: a firewall may drop them."""
        return not self.answers and self.unanswered >= limit.probes

    def lost_after(self, limit: SilenceLimit, silence_s: float) -> float | None:
        """Return the seconds of silence after which the host is lost, if it is."""
        if self.answers and self.unanswered >= limit.probes:
            return limit.timeout
        longest = max(LONGEST_SILENCE_S, limit.timeout)  # also if something else answers in its place
        return longest if silence_s >= longest else None


class HostWatch:
    """Probes one host, at a TCP address where nothing listens, whenever it is silent.

    Without an address, as for a host behind a tunnel, there are no probes: the host is lost once no data has come from
    it for LONGEST_SILENCE_S.
    """

    def __init__(self, limit: SilenceLimit, address: tuple[Any, ...] | None, clock: Callable[[], float]) -> None:
        self.probes = Probes()
        self._limit = limit
        self._clock = clock
        self._address = address
        self._probe: socket.socket | None = None
        self._probed_at = 0.0
        self._next_check = 0.0
        self._alive_at = 0.0  # when the latest probe was sent that was answered: its answer may have waited here
        self._asked_at = 0.0
        self._to_confirm: dict[Connection[Any], int] = {}  # bytes sent when the host was asked

    def poll(self, connections: Sequence[Connection[Any]]) -> float:
        """Do what is due; return the seconds until the next call. Gives all connections up if the host is lost."""
        now = self._clock()
        if now < self._next_check:
            return self._next_check - now
        address, only_data = self._address, self._address is None
        silence_s = min(connection.silence_s(only_data=only_data) for connection in connections)
        answered = self._probe is not None and address is not None and self._probe.connect_ex(address) in _ANSWERED
        self._alive_at = self._probed_at if answered else self._alive_at
        self.close()
        probes = self.probes.update(self._limit, silence_s, answered=answered)
        if lost_after := probes.lost_after(self._limit, silence_s):
            for connection in connections:
                connection.give_up(lost_after)
            return 0.0
        wait = max(self._limit.suspect_after - (0 if answered else silence_s), GRACE_S)
        if address is not None and probes.is_due(self._limit, silence_s) and not answered:
            wait = _PROBE_INTERVAL_S
            with contextlib.suppress(OSError):  # descriptors may be short
                self._probe = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
                self._probe.setblocking(False)
                self._probed_at = now
                is_sent = self._probe.connect_ex(address) in _SENT
                probes = Probes(probes.unanswered + is_sent, probes.answers)
        self.probes, self._next_check = probes, max(self._next_check + wait, now + GRACE_S)
        return self._next_check - now

    def ask(self, connections: Sequence[Connection[Any]]) -> None:
        """Ask whether the host is alive now; `has_answered` reports it as soon as it is known."""
        self._asked_at = self._clock()
        self._to_confirm = {one: one.queued_bytes for one in connections if one.send_beat()}

    def has_answered(self, connections: Sequence[Connection[Any]]) -> bool:
        """Whether the host's kernel is known to have been alive after it was asked; a later packet shows it, too."""
        asked = self._to_confirm
        if any(one in asked and one.acknowledged_bytes() >= asked[one] for one in connections):
            return True
        heard_at = self._clock() - min(one.silence_s() for one in connections)
        return heard_at > self._asked_at + _KERNEL_CLOCK_S or self._alive_at >= self._asked_at

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
