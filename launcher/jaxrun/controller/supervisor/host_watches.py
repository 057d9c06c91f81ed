"""Watches the hosts of connections to agents: beats, probes, and which connections are lost with a silent host."""

from __future__ import annotations

from collections.abc import Callable

from jaxrun.controller.seat import LinkId
from jaxrun.controller.supervisor.transport import AgentConnection, Transport
from jaxrun.node.channel.silence import LONGEST_SILENCE_S, HostWatch, SilenceLimit

_CHECK_INTERVAL_S = 0.1  # at least; there may be many hosts


class HostWatches:
    """A HostWatch for each address from which agents have connected; the ports of these connections refuse probes."""

    def __init__(self, limit: SilenceLimit, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._watches: dict[str, HostWatch] = {}
        self._next_beat = 0.0
        self._has_said_firewall = False
        self.next_check = 0.0

    def begin(self, connection: AgentConnection) -> None:
        """Probe the host of a new connection at once: if it is lost soon, it is known to have answered before."""
        ip = connection.peer[0]
        if ip not in self._watches:
            self.next_check = min(self.next_check, self._clock() + self._watch(ip, [connection]).poll([connection]))

    def check(self, transport: Transport) -> tuple[list[LinkId], str]:
        """Do what is due; return the connections that are lost from now on, and a line for people.

        The line is empty if there is nothing to report.
        """
        now, links, notice = self._clock(), list(transport), ""
        if now >= self._next_beat:
            self._next_beat = now + self._limit.beat_interval
            for _, connection in links:
                connection.send_beat()
        self.next_check = self._next_beat
        for ip, of_host in _by_host(transport).items():
            watch = self._watch(ip, of_host)
            self.next_check = min(self.next_check, now + max(watch.poll(of_host), _CHECK_INTERVAL_S))
            if watch.probes.in_vain(self._limit) and self._limit.timeout < LONGEST_SILENCE_S:
                notice = notice or self._describe_firewall(ip)
        return [link for link, connection in links if connection.lost_reason], notice

    def ask(self, transport: Transport) -> None:
        """Ask whether all hosts are alive now."""
        for ip, of_host in _by_host(transport).items():
            self._watch(ip, of_host).ask(of_host)

    def unanswered(self, transport: Transport) -> list[LinkId]:
        """Return the connections to hosts from which nothing was received since they were asked.

        Each of these hosts will answer, or will be lost.
        """
        hosts = _by_host(transport)
        silent = {ip for ip, of_host in hosts.items() if not self._watch(ip, of_host).has_answered(of_host)}
        return [link for link, one in transport if one.peer[0] in silent] if silent else []

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()

    def _watch(self, ip: str, of_host: list[AgentConnection]) -> HostWatch:
        if ip not in self._watches:
            self._watches[ip] = HostWatch(self._limit, of_host[0].peer, self._clock)
        return self._watches[ip]

    def _describe_firewall(self, ip: str) -> str:
        """Return the notice about the first host behind a firewall."""
        if self._has_said_firewall:
            return ""
        self._has_said_firewall = True
        return (
            f"jaxrun: {ip.removeprefix('::ffff:')} answers no probes, as behind a firewall: such a host is "
            f"lost after {LONGEST_SILENCE_S:g} s of silence, not after {self._limit.timeout:g} s"
        )


def _by_host(transport: Transport) -> dict[str, list[AgentConnection]]:
    """The connections to each address."""
    hosts: dict[str, list[AgentConnection]] = {}
    for _, connection in transport:
        hosts.setdefault(connection.peer[0], []).append(connection)
    return hosts
