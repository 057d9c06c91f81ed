"""Prints one line about each host whose memory will soon be full: when, which ranks grow, and where they are.

Each agent sees only its own ranks, so the reports of all agents of a host are collected for a moment.
"""

from __future__ import annotations

from functools import partial

from jaxrun.analysis.verdict.memory_text import format_shortage
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.queries import RankQueries, Replies, dumps_of
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, PrintLine
from jaxrun.protocol.agent_messages import MemoryShortage

_COLLECT_S = 1.2  # agents take a reading each second
_REPEAT_S = 30.0  # reports of agents that come later count as another shortage


class MemoryShortages:
    def __init__(self, state: HeadState, queries: RankQueries) -> None:
        self._state = state
        self._queries = queries
        self._collected: dict[str, list[MemoryShortage]] = {}  # by host, until they are printed
        self._told_at: dict[str, float] = {}  # by host

    def handle(self, shortage: MemoryShortage, now: float) -> list[Action]:
        host = self._state.workers.hosts[shortage.rank]
        told_at = self._told_at.get(host)
        if self._state.phase is not JobPhase.RUNNING or (told_at is not None and now - told_at < _REPEAT_S):
            return []
        collected = self._collected.setdefault(host, [])
        collected.append(shortage)
        if len(collected) == 1:
            self._state.timers.set(Timer.MEMORY, now + _COLLECT_S, partial(self._ask_ranks, host), of=host)
        return []

    def _ask_ranks(self, host: str, now: float) -> list[Action]:
        self._told_at[host] = now
        shortages = self._collected.pop(host)
        growing = sorted({rank for one in shortages for rank in one.growing}.intersection(self._state.workers.working))

        def tell(replies: Replies, now: float) -> list[Action]:
            return [PrintLine(format_shortage(shortages, host, dumps_of(replies)))]

        return self._queries.ask_stacks(growing, tell, now)
