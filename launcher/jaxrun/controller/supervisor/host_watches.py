"""Watches the hosts of connections to agents: beats, probes, and which connections are lost with a silent host.

Whoever must know whether a host lives asks here: the losses of an attempt (losses.py), and an agent that claims the
place of another (controller/roster.py).
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrun.controller.seat import LinkId
from jaxrun.controller.supervisor.transport import AgentConnection, Transport
from jaxrun.node.channel.silence import LONGEST_SILENCE_S, HostWatch, SilenceLimit

_CHECK_INTERVAL_S = 0.1  # at least; there may be many hosts


class HostWatches:
    """A HostWatch for each address from which agents have connected; the ports of these connections refuse probes.

    It lives as long as the job: what is known of a host is known in the next attempt.
    """

    def __init__(self, transport: Transport, limit: SilenceLimit, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._limit = limit
        self._clock = clock
        self._watches: dict[str, HostWatch] = {}
        self._to_confirm: dict[LinkId, int] = {}  # bytes that must be acknowledged on connections that were asked
        self._next_beat = 0.0
        self._has_said_firewall = False
        self.next_check = 0.0

    def begin(self, connection: AgentConnection) -> None:
        """Probe the host of a new connection at once: if it is lost soon, it is known to have answered before."""
        ip = connection.peer[0]
        if ip not in self._watches:
            self.next_check = min(self.next_check, self._clock() + self._watch(ip, [connection]).poll([connection]))

    def check(self) -> tuple[list[LinkId], str]:
        """Do what is due; return the connections that are lost from now on, and a line for people.

        The line is empty if there is nothing to report.
        """
        now, links, notice = self._clock(), list(self._transport), ""
        if now >= self._next_beat:
            self._next_beat = now + self._limit.beat_interval
            for _, connection in links:
                connection.send_beat()
        self.next_check = self._next_beat
        for ip, of_host in self._by_host().items():
            watch = self._watch(ip, of_host)
            self.next_check = min(self.next_check, now + max(watch.poll(of_host), _CHECK_INTERVAL_S))
            if watch.probes.in_vain(self._limit) and self._limit.timeout < LONGEST_SILENCE_S:
                notice = notice or self._describe_firewall(ip)
            if all(connection.lost_reason for connection in of_host):
                self._watches.pop(ip).close()  # if it comes back, nothing is known of it
        return [link for link, connection in links if connection.lost_reason], notice

    def ask(self) -> None:
        """Ask whether all hosts are alive now."""
        for ip, of_host in self._by_host().items():
            self._watch(ip, of_host).ask(of_host)

    def unanswered(self) -> list[LinkId]:
        """Return the connections to hosts from which nothing was received since they were asked.

        Each of these hosts will answer, or will be lost.
        """
        hosts = self._by_host()
        silent = {ip for ip, of_host in hosts.items() if not self._watch(ip, of_host).has_answered(of_host)}
        return [link for link, one in self._transport if one.peer[0] in silent] if silent else []

    def ask_one(self, link: LinkId) -> None:
        """Ask the kernel at the other end of a connection for an answer; `take_confirmed` returns it once it has come.

        A host that was started again would answer for itself, but not on this connection.
        """
        connection = self._transport.connection(link)
        self._to_confirm[link] = connection.queued_bytes if connection.send_beat() else 0

    @property
    def is_asking(self) -> bool:
        """Whether a connection was asked that has not answered, and is not lost."""
        return any(link in self._transport for link in self._to_confirm)

    def take_confirmed(self) -> list[LinkId]:
        """Return the connections that were asked and whose hosts have answered, or whose processes read nothing."""
        asked = {link: sent for link, sent in self._to_confirm.items() if link in self._transport}
        done = [link for link, sent in asked.items() if self._transport.connection(link).acknowledged_bytes() >= sent]
        self._to_confirm = {link: sent for link, sent in asked.items() if link not in done}
        return done

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()

    def _by_host(self) -> dict[str, list[AgentConnection]]:
        """Return the connections to each address."""
        hosts: dict[str, list[AgentConnection]] = {}
        for _, connection in self._transport:
            hosts.setdefault(connection.peer[0], []).append(connection)
        return hosts

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
