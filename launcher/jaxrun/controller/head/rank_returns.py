"""Takes lost ranks back while the others run: --keep-survivors with --max-restarts.

    on_loss ──▶ ENDING ──its process has ended: StartAgain──▶ JOINING ──Run──▶ RUNNING ──live_devices──▶ back
                   ▲                                             │                │
                   └──────────────── it fails again ─────────────┴────────────────┘

Nobody waits for a rank that is not back: the others go on, and it takes part from its first live_devices that they all
have come to. If they end before that, it is killed.

A rank is started again on its host. If that is lost, another may take its place (replacement_hosts.py):

    ENDING ──a spare host has the place: AgentReport, StartWorkers──▶ JOINING
       └─its host is awaited──▶ AWAITED ──AgentReport: StartWorkers──────┘
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import partial

from jaxrun.analysis.diagnosis.job_outcome import RankReturn
from jaxrun.controller.head.device_orders import DeviceOrders
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.replacement_hosts import ReplacementHosts
from jaxrun.controller.head.startup import Startup
from jaxrun.controller.head.timers import Timer
from jaxrun.errors import NotUniformError
from jaxrun.job_events.actions import Action, PrintLine, RecordReturn, Send, SendToAgents, SignalRanks
from jaxrun.protocol.agent_messages import AgentReport, StartAgain, StartWorkers
from jaxrun.protocol.worker_messages import DeviceReport, Hello
from jaxrun.text import agree, format_ranks, format_ranks_on_hosts, format_seconds


class _Stage(enum.Enum):
    ENDING = enum.auto()  # its process, which has failed, runs its exit handlers, or all of its host is being lost
    AWAITED = enum.auto()  # its host is lost, and may come back
    JOINING = enum.auto()
    RUNNING = enum.auto()  # its program has not come to live_devices


class RankReturns:
    def __init__(
        self,
        state: HeadState,
        startup: Startup,
        orders: DeviceOrders,
        hosts: ReplacementHosts,
        *,
        most: int,
        used: int = 0,
    ) -> None:
        """`most`: how many times ranks can be started again in all attempts; 0 if they never are.

        hosts:  on which ranks are started again whose own are lost
        used:   how many of them earlier attempts have used
        """
        self._state = state
        self._startup = startup
        self._orders = orders
        self._hosts = hosts
        self.most = most
        self.used = used
        self._differs = False
        self._stages: dict[int, _Stage] = {}
        self._uncounted: set[int] = set()  # the ranks whose next start does not count as a restart

    def why_not(self, rank: int, *, leaves: bool = False) -> str:
        """Explain why this rank, which fails, cannot be started again alone; empty if it can.

        leaves:  it does not fail yet, but its pod goes away
        """
        leaves = leaves or self._hosts.is_leaving(rank)
        if why := self._hosts.why_none(rank, leaves=leaves):
            return why
        if self._differs:
            return "it differs from the others"
        if self.used >= self.most and not leaves:
            used = "the one restart" if self.most == 1 else f"all {self.most} restarts"
            return f"{used} of a lost rank {'is' if self.most == 1 else 'are'} used up"
        back = {rank, *self._state.workers.working, *self._stages}
        if not self._orders.has_another(back, self._state.platform):
            return f"on CPU, {format_ranks(back)} have been connected in every order, so that no rank can come back"
        return ""

    def is_under_way(self, rank: int) -> bool:
        """Whether a new process of the rank exists, or will soon, that is not back."""
        return self._stages.get(rank) in (_Stage.JOINING, _Stage.RUNNING)

    def on_loss(self, rank: int, now: float) -> list[Action]:
        """Start a rank again that has failed, once its process has ended. If its pod goes away, that does not count."""
        if self._hosts.is_leaving(rank):
            self._uncounted.add(rank)
        else:
            self.used += 1
        self._stages[rank] = _Stage.ENDING
        if self._hosts.is_gone(rank):
            self._state.timers.cancel_one(Timer.RETURN, rank)
            return []  # until `on_agent_lost`
        if self._state.workers.has_ended(rank):
            return self._start(rank, now)
        grace = self._state.limits.grace
        self._state.timers.set(Timer.RETURN, now + grace, partial(self._on_late, rank), of=rank)
        return []

    def counts(self, rank: int) -> bool:
        """Whether the next start of this rank, which has failed, is one of those that are counted."""
        return rank not in self._uncounted

    def give_up(self, rank: int) -> None:
        """Note that the rank will not be back, even if it was on its way."""
        self._stages.pop(rank, None)
        self._state.timers.cancel_one(Timer.RETURN, rank)

    def on_exited(self, rank: int, now: float) -> list[Action]:
        is_ending = self._stages.get(rank) is _Stage.ENDING and self._state.phase is JobPhase.RUNNING
        return self._start(rank, now) if is_ending and not self._hosts.is_gone(rank) else []

    def on_agent_lost(self, ranks: Sequence[int], beside: Sequence[int], now: float) -> list[Action]:
        """Await these ranks' host; or let a spare one take its place, once all ranks there are lost.

        beside:  all ranks on that host
        """
        workers, hosts = self._state.workers, self._hosts
        back = [rank for rank in beside if self._stages.get(rank) in (_Stage.ENDING, _Stage.AWAITED)]
        if hosts.is_awaited(ranks[0]):
            awaited = [rank for rank in back if hosts.is_awaited(rank)]  # another agent may still be there, with others
            self._stages.update(dict.fromkeys(awaited, _Stage.AWAITED))
            hosts.expect(awaited)
            return []
        if not back or not all(map(workers.has_ended, beside)):
            return []
        if not hosts.spare_for(back[0]):
            return self._give_up_all(back, format_ranks_on_hosts(back, workers.hosts), self.why_not(back[0]))
        for rank in back:
            self._begin(rank, now)
        return hosts.use_spare(back)

    def on_report(self, report: AgentReport, ranks: Sequence[int], now: float) -> list[Action]:
        """Start ranks of an agent, on a spare host or one that was awaited, which has checked its host.

        ranks:  all of the agent's
        """
        if self._state.phase is not JobPhase.RUNNING:
            return []
        awaited = [rank for rank in ranks if self._stages.get(rank) is _Stage.AWAITED]
        try:
            starts = self._hosts.take_starts(report, awaited)
        except NotUniformError as error:
            return self._give_up_all(awaited, format_ranks(awaited), str(error))
        for rank in awaited:
            self._begin(rank, now)
        noted = self._hosts.use_host(awaited, report)
        wanted = tuple(start for start in starts if self._stages.get(start.worker.rank) is _Stage.JOINING)
        for start in wanted:
            self._limit_join(start.worker.rank, now)  # --host-check does not count
        return [*noted, SendToAgents((report.agent,), StartWorkers(wanted))] if wanted else []

    def on_start_failed(self, rank: int, text: str) -> list[Action]:
        """Give up a rank whose next process could not be started."""
        lines = self._give_up_all((rank,), self._name(rank), text)
        return lines if self._state.phase is JobPhase.RUNNING else []

    def _give_up_all(self, ranks: Iterable[int], names: str, why: str) -> list[Action]:
        """Give up these ranks, and print why; `names` are these ranks in the line."""
        for rank in ranks:
            self.give_up(rank)
        return [PrintLine(f"{names} cannot be started again: {why}")]

    def _start(self, rank: int, now: float) -> list[Action]:
        self._begin(rank, now)
        return [Send((rank,), StartAgain())]

    def _begin(self, rank: int, now: float) -> None:
        self._state.workers.start_again(rank, now, counts=rank not in self._uncounted)
        self._uncounted.discard(rank)
        self._startup.start_again(rank)
        self._state.flights.pop(rank, None)
        self._stages[rank] = _Stage.JOINING
        self._limit_join(rank, now)

    def _limit_join(self, rank: int, now: float) -> None:
        """Give the rank's process the --init-timeout to join, from now on."""
        limit = self._state.limits.init
        self._state.timers.set(Timer.RETURN, now + limit, partial(self._on_late, rank), of=rank)

    def _on_late(self, rank: int, now: float) -> list[Action]:
        """Kill a process that does not end, or has not joined in time; its end then counts as a failure of its own.

        If it does not even exist, give the rank up.
        """
        if rank in self._state.workers.live:
            return [SignalRanks((rank,), signal.SIGKILL)]
        if self._stages.get(rank) is not _Stage.JOINING:
            return []
        why = f"there was no process within {self._state.limits.init:g} s (--init-timeout)"
        return self._give_up_all((rank,), self._name(rank), why)

    def handle(self, event: Hello | DeviceReport, now: float) -> list[Action]:
        """Let the rank join and run, unless the job ends, or the rank differs from the others."""
        if self._state.phase is not JobPhase.RUNNING:
            return self.kill((event.rank,))
        try:
            actions = self._startup.add_again(event)
        except NotUniformError as error:
            self._differs = True
            return [PrintLine(f"{self._name(event.rank)} cannot come back: {error}"), *self.kill((event.rank,))]
        if isinstance(event, DeviceReport):
            self._stages[event.rank] = _Stage.RUNNING
            self._state.timers.cancel_one(Timer.RETURN, event.rank)
        return actions

    def ready(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of these ranks that can take part again, as their programs run."""
        return tuple(sorted(rank for rank in ranks if self._stages.get(rank) is _Stage.RUNNING))

    def is_any_on_its_way(self, but: Collection[int]) -> bool:
        """Whether any other rank than these has failed, and is not back."""
        return bool(self._stages.keys() - set(but))

    def admit(self, ranks: Sequence[int], now: float) -> list[Action]:
        """Let these ranks, which are ready, take part again, and say so."""
        workers, actions = self._state.workers, list[Action]()
        together: dict[Hashable, list[RankReturn]] = {}
        for rank in ranks:
            del self._stages[rank]
            back = workers.add_return(rank, now)
            actions.append(RecordReturn(rank, workers.incarnation(rank), back.seconds))
            together.setdefault(back.worker.lost_with, []).append(back)
        for group in together.values():
            names = format_ranks_on_hosts([back.worker.rank for back in group], workers.hosts)
            after = format_seconds(max(back.seconds for back in group))
            text = f"{names} {agree('is', len(group))} back, {after} after {agree('it was', len(group))} lost"
            actions.append(PrintLine(f"{text}: {format_ranks(workers.working)} go on"))
        return actions

    def kill(self, ranks: Iterable[int]) -> list[Action]:
        """Kill ranks that are not back and will not be."""
        ranks = tuple(rank for rank in ranks if rank in self._state.workers.live)
        self._state.workers.mark_killed(ranks)
        return [SignalRanks(ranks, signal.SIGKILL)] if ranks else []

    def _name(self, rank: int) -> str:
        return format_ranks_on_hosts((rank,), self._state.workers.hosts)
