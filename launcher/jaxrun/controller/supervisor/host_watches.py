"""Watches the hosts of all agents: sends beats to the agents, and gives up the connections to hosts that are lost."""

from __future__ import annotations

from collections.abc import Callable

from jaxrun.controller.supervisor.connections import AgentConnection, AgentConnections
from jaxrun.node.channel.silence import LONGEST_SILENCE_S, HostWatch, SilenceLimit
from jaxrun.protocol.agent_id import AgentId

_CHECK_INTERVAL_S = 0.1  # the least; hosts are many


class HostWatches:
    """A HostWatch for each address from which agents have connected; the ports of these connections refuse probes."""

    def __init__(self, limit: SilenceLimit, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._limit = limit
        self._clock = clock
        self._say = say
        self._watches: dict[str, HostWatch] = {}
        self._next_beat = 0.0
        self.next_check = 0.0

    def check(self, connections: AgentConnections) -> list[tuple[AgentId, AgentConnection]]:
        """Do what is due; return the connections that are lost from now on, with their agents."""
        now, items = self._clock(), connections.items()
        if now >= self._next_beat:
            self._next_beat = now + self._limit.beat_interval
            for _, connection in items:
                connection.send_beat()
        hosts: dict[str, list[AgentConnection]] = {}
        for _, connection in items:
            hosts.setdefault(connection.peer[0], []).append(connection)
        self.next_check = self._next_beat
        for ip, of_host in hosts.items():
            if ip not in self._watches:
                self._watches[ip] = HostWatch(self._limit, of_host[0].peer, self._clock)
            self.next_check = min(self.next_check, now + max(self._watches[ip].poll(of_host), _CHECK_INTERVAL_S))
            if self._watches[ip].probes.in_vain(self._limit) and self._limit.timeout < LONGEST_SILENCE_S:
                self._say(
                    f"jaxrun: {ip.removeprefix('::ffff:')} answers no probes, as behind a firewall: such a host is "
                    f"lost after {LONGEST_SILENCE_S:g} s of silence, not after {self._limit.timeout:g} s"
                )
                self._say = lambda text: None  # once will do
        return [(agent, connection) for agent, connection in items if connection.lost_reason]

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
