"""Takes lost ranks back while the others run: --keep-survivors with --max-restarts.

    on_loss ──▶ ENDING ──its process has ended: StartAgain──▶ JOINING ──Run──▶ RUNNING ──live_devices──▶ back
                   ▲                                             │                │
                   └──────────────── it fails again ─────────────┴────────────────┘

Nobody waits for a rank that is not back: the others go on, and it takes part from its first live_devices that they all
have come to. If they end before that, it is killed.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from jaxrun.controller.head.device_orders import DeviceOrders
from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.startup import Startup
from jaxrun.controller.head.timers import Timer
from jaxrun.errors import NotUniformError
from jaxrun.job_events.actions import Action, PrintLine, RecordReturn, Send, SignalRanks
from jaxrun.protocol.agent_messages import StartAgain
from jaxrun.protocol.worker_messages import DeviceReport, Hello
from jaxrun.text import format_ranks, format_ranks_on_hosts, format_seconds


class _Stage(enum.Enum):
    ENDING = enum.auto()  # its process, which has failed, runs its exit handlers
    JOINING = enum.auto()
    RUNNING = enum.auto()  # its program has not come to live_devices


class RankReturns:
    def __init__(self, state: HeadState, startup: Startup, orders: DeviceOrders, most: int, used: int = 0) -> None:
        """`most`: how many times ranks can be started again in all attempts; 0 if they never are.

        used:  how many of them earlier attempts have used
        """
        self._state = state
        self._startup = startup
        self._orders = orders
        self.most = most
        self.used = used
        self._differs = False
        self._stages: dict[int, _Stage] = {}

    def why_not(self, rank: int) -> str:
        """Explain why this rank, which fails, cannot be started again alone; empty if it can."""
        if self._state.workers.is_agent_lost(rank):
            return "its host is lost"
        if self._differs:
            return "it differs from the others"
        if self.used >= self.most:
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
        """Start a rank again that has failed, once its process has ended."""
        self.used += 1
        self._stages[rank] = _Stage.ENDING
        if self._state.workers.has_ended(rank):
            return self._start(rank, now)
        grace = self._state.limits.grace
        self._state.timers.set(Timer.RETURN, now + grace, partial(self._on_late, rank), of=rank)
        return []

    def give_up(self, rank: int) -> None:
        """Note that the rank will not be back, even if it was on its way."""
        self._stages.pop(rank, None)
        self._state.timers.cancel_one(Timer.RETURN, rank)

    def on_exited(self, rank: int, now: float) -> list[Action]:
        is_awaited = self._stages.get(rank) is _Stage.ENDING and self._state.phase is JobPhase.RUNNING
        return self._start(rank, now) if is_awaited else []

    def _start(self, rank: int, now: float) -> list[Action]:
        self._state.workers.start_again(rank, now)
        self._startup.start_again(rank)
        self._state.flights.pop(rank, None)
        self._stages[rank] = _Stage.JOINING
        limit = self._state.limits.init
        self._state.timers.set(Timer.RETURN, now + limit, partial(self._on_late, rank), of=rank)
        return [Send((rank,), StartAgain())]

    def _on_late(self, rank: int, now: float) -> list[Action]:
        """Kill a process that does not end, or has not joined in time; its end then counts as a failure of its own."""
        return [SignalRanks((rank,), signal.SIGKILL)] if rank in self._state.workers.live else []

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
        actions: list[Action] = []
        for rank in ranks:
            del self._stages[rank]
            back, workers = self._state.workers.add_return(rank, now), self._state.workers
            actions.append(RecordReturn(rank, workers.incarnation(rank), back.seconds))
            text = f"{self._name(rank)} is back, {format_seconds(back.seconds)} after it was lost"
            actions.append(PrintLine(f"{text}: {format_ranks(workers.working)} go on"))
        return actions

    def kill(self, ranks: Iterable[int]) -> list[Action]:
        """Kill ranks that are not back and will not be."""
        ranks = tuple(rank for rank in ranks if rank in self._state.workers.live)
        self._state.workers.mark_killed(ranks)
        return [SignalRanks(ranks, signal.SIGKILL)] if ranks else []

    def _name(self, rank: int) -> str:
        return format_ranks_on_hosts((rank,), self._state.workers.hosts)
