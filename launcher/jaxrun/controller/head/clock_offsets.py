"""Measures how far the clocks of the agents' hosts are from the head's, by round trips on the control channel.

An agent sends its answer at some time between the head's question and the arrival of the answer: the error of the
offset is at most half of that time. The shortest of several round trips counts, and the older it is, the less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.job_events.actions import Action, RecordClock, SendToAgents
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import ClockProbe, ClockReply

_PROBES = 3  # in a row
_KEPT = 9
_DRIFT = 5e-5  # seconds per second by which ordinary clocks drift apart
_UNIT_S = 1e-6  # resolution of logged offsets


class ClockOffset(Struct, frozen=True):
    """The offset to add to times of an agent's clock, in seconds, and its error.

    measured_at: seconds since the epoch, on the head's clock
    """

    offset_s: float
    error_s: float
    measured_at: float

    def error_at(self, now: float) -> float:
        return self.error_s + _DRIFT * max(0.0, now - self.measured_at)


class ClockOffsets:
    """The offsets of all ranks' hosts; times are seconds since the epoch."""

    def __init__(self, hosts: Mapping[int, str], registry: AgentRegistry) -> None:
        """`hosts` maps each rank to its host, and may be filled in later; the registry knows the agents."""
        self._hosts = hosts
        self._registry = registry
        self._ranks: dict[str, list[int]] = {}  # of each host, at the last probe
        self._measured: dict[str, deque[ClockOffset]] = {}
        self._left: dict[AgentId, int] = {}  # probes left to send
        self._recorded: dict[str, ClockOffset] = {}

    def probe(self, ranks: Sequence[int], now: float) -> list[Action]:
        """Measure the clocks of these ranks' hosts again, each by the agent of its first rank."""
        self._ranks.clear()
        for rank, host in sorted(self._hosts.items()):
            self._ranks.setdefault(host, []).append(rank)
        agent_of = {rank: agent for agent, own in self._registry.agents.items() for rank in own}
        agent_on = {self._hosts[rank]: agent_of[rank] for rank in sorted(ranks, reverse=True)}
        asked = tuple(sorted(agent_on.values()))
        self._left.update(dict.fromkeys(asked, _PROBES - 1))
        return [SendToAgents(asked, ClockProbe(now))] if asked else []

    def handle(self, reply: ClockReply, now: float) -> list[Action]:
        """Handle an agent's answer: ask again, or record the offset of its host's clock."""
        offset = (reply.asked_at + now) / 2 - reply.time
        ranks = self._registry.agents.get(reply.agent, ())
        if not ranks:  # a spare host has taken the place of its own
            return []
        rank = ranks[0]
        host = self._hosts[rank]
        kept = self._measured.setdefault(host, deque(maxlen=_KEPT))
        kept.append(ClockOffset(offset, max(0.0, now - reply.asked_at) / 2, now))
        left = self._left.get(reply.agent, 0)
        if left > 0:
            self._left[reply.agent] = left - 1
            return [SendToAgents((reply.agent,), ClockProbe(now))]
        return self._record(rank, host, now)

    def offset(self, rank: int, now: float) -> ClockOffset | None:
        """Return the best known offset; None if there is none."""
        measured = self._measured.get(self._hosts[rank], ())
        return min(measured, key=lambda offset: offset.error_at(now), default=None)

    def _record(self, rank: int, host: str, now: float) -> list[Action]:
        """Log the offset of a host, at first and when it differs from the last logged one."""
        best, last = self.offset(rank, now), self._recorded.get(host)
        if best is None or (last is not None and abs(best.offset_s - last.offset_s) <= last.error_s + best.error_s):
            return []
        self._recorded[host] = best
        offset, error = round(best.offset_s, 6), round(best.error_s + _UNIT_S, 6)
        return [RecordClock(other, offset, error) for other in self._ranks.get(host, (rank,))]
