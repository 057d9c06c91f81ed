"""Brings a job together and decides how it ends: a state machine without I/O.

It is fed events (messages of the workers, exits, signals, the clock) and answers with actions for the agent.
Everything that affects the decision lives here; what it means for people is weighed in verdict.py.

    STARTING ──all have proved themselves──▶ RUNNING ──all done──▶ LEAVING ──▶ OVER
       └───────────┬─────────────────┬──────────┘ └──signal──▶ TERMINATING ──▶ OVER
             first failure    refusal, time limit
                   ▼                 ▼
               SETTLING ─clear─▶ STOPPING ──all have ended──▶ OVER
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import replace

from jaxrun.contract import STACKS_SIGNAL, Done, Failed, Hello, Leave, Listening, Proof, ThreadFailed
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.head import uniform
from jaxrun.head.early_exit import EarlyExit
from jaxrun.head.events import (
    Action,
    AgentSignalled,
    Ending,
    Event,
    Exited,
    Finish,
    Keep,
    Kill,
    Limits,
    Lost,
    Report,
    Say,
    Send,
    Signalled,
    Spawned,
    StacksTaken,
    TakeStacks,
    Unavailable,
)
from jaxrun.head.gathering import Gathering
from jaxrun.head.muster import Muster
from jaxrun.head.roster import Roster
from jaxrun.head.stall import Stall
from jaxrun.ranks import locate, spell
from jaxrun.verdict import stacks, verdict
from jaxrun.verdict.stacks import STACKS_FILE
from jaxrun.wording import plural

SETTLE = 0.03  # seconds to wait for the cause after the first failure: collateral errors can win the race
PATIENCE = 0.5  # seconds to wait for it when all that is known is collateral
PROGRESS = (2.0, 10.0)  # seconds until the start-up says whom it waits for, and between saying so again


class Phase(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    TERMINATING = enum.auto()
    SETTLING = enum.auto()
    STOPPING = enum.auto()
    OVER = enum.auto()


_HEALTHY = (Phase.STARTING, Phase.RUNNING)


class Head:
    """One job. `hosts` maps each rank to its host; times are seconds since the epoch, always passed in.

    `interface` is the address of rank 0's host at which the coordinator is to listen; a `muster` knows better than it,
    `hosts` and `expected`, once all agents have reported.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        expected: uniform.Expected,
        limits: Limits,
        interface: str,
        now: float,
        muster: Muster | None = None,
    ) -> None:
        self._roster = Roster(hosts)
        self._gathering = Gathering(self._roster.hosts, expected, interface, muster)
        self._limits = limits
        self._started = now
        self._run_at: float | None = None
        self._phase = Phase.STARTING
        self._ending = Ending("ok", ())
        self._frozen = False
        self._early = EarlyExit()
        self._stall: Stall | None = None
        self._alarms: dict[str, float] = {"init": now + limits.init, "progress": now + PROGRESS[0]}
        if limits.job is not None:
            self._alarms["job"] = now + limits.job

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as it is known."""
        return self._roster.hosts

    def deadline(self) -> float | None:
        """When the head wants its next Tick at the latest."""
        return min(self._alarms.values(), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order."""
        if self._phase is Phase.OVER:
            return []
        match event:
            case Signalled():
                return self._on_signal(event.signum, now)
            case StacksTaken():
                return self._on_stacks(event, now)
            case Unavailable():
                return self._on_unavailable(event, now)
        rank = getattr(event, "rank", None)
        if rank is None:
            return self._on_time(now)
        if rank not in self._roster.hosts:
            return self._give_up("refused", uniform.unknown(rank, len(self._roster.hosts)), now)
        return self._on_worker(event, now)

    def _on_worker(self, event: Event, now: float) -> list[Action]:
        match event:
            case Spawned():
                return self._on_spawned(event.rank)
            case Report() | Hello() | Listening() | Proof():
                return self._on_start_up(event, now)
            case Lost():
                return self._on_lost(event, now)
            case AgentSignalled() if self._phase in _HEALTHY:
                return self._on_signal(event.signum, now)
            case ThreadFailed():
                self._roster.thread_failed(event)
            case Failed():
                self._roster.spoke(event, now)
                return self._on_failure(event.rank, now)
            case Done():
                self._roster.done(event.rank, now)
                return self._on_finished(now)
            case Exited():
                return self._on_exit(event, now)
        return []

    # ---- bringing the job together

    def _on_spawned(self, rank: int) -> list[Action]:
        self._roster.spawned(rank)
        return self._kill((rank,)) if self._phase is Phase.STOPPING else []

    def _on_start_up(self, event: Report | Hello | Listening | Proof, now: float) -> list[Action]:
        if self._phase is not Phase.STARTING:
            return []
        try:
            actions = self._gathering.take(event)
        except NotUniformError as error:
            return self._give_up("refused", str(error), now)
        except UnavailableError as error:
            return self._give_up("unavailable", str(error), now)
        if self._gathering.complete:
            self._phase = Phase.RUNNING
            self._run_at = now
            del self._alarms["init"], self._alarms["progress"]
            if self._limits.stall:
                self._stall = Stall(self._limits.stall, now)
                self._alarms["stall"] = now + self._stall.every
        return [*actions]

    def _on_unavailable(self, event: Unavailable, now: float) -> list[Action]:
        if self._phase is Phase.SETTLING and not verdict.certain(self._roster.ends(now)):
            self._phase = Phase.RUNNING  # what was lost since is explained by this
        return self._give_up("unavailable", event.text, now, traceback=event.traceback)

    def _give_up(self, reason: str, text: str, now: float, traceback: str = "") -> list[Action]:
        if self._phase not in _HEALTHY:
            return []
        self._ending = Ending(reason, (), text=text, traceback=traceback, decided_at=now)
        return self._stop(now, self._roster.live)

    # ---- a worker ends

    def _on_finished(self, now: float) -> list[Action]:
        """Somebody's program has ended well: when all have, they leave, rank 0 and its coordinator last."""
        if self._phase not in (Phase.RUNNING, Phase.TERMINATING):
            return []
        if self._roster.any_working:
            if self._phase is Phase.RUNNING:
                self._alarms.setdefault("early", now + self._early.first_look)
            return []
        self._alarms = {"kill": now + self._limits.grace}
        self._phase = Phase.LEAVING
        live = self._roster.live
        return [Send(tuple(rank for rank in live if rank != 0) or live, Leave())]

    def _on_exit(self, exited: Exited, now: float) -> list[Action]:
        self._roster.exited(exited, now)
        well = exited.status == 0 and self._run_at is not None
        if self._phase in _HEALTHY and not well:
            return self._on_failure(exited.rank, now)
        if self._phase is Phase.LEAVING and self._ending.reason == "ok" and not well:
            self._ending = Ending("failed", (), decided_at=now)
        if not self._roster.any_live:
            return self._finish(now)
        if self._phase in (Phase.LEAVING, Phase.STOPPING) and self._roster.only_rank_0_left:
            return self._let_rank_0_go()
        return self._settle(now, exited.rank) if self._phase is Phase.SETTLING else self._on_finished(now)

    def _on_lost(self, lost: Lost, now: float) -> list[Action]:
        if not self._roster.has_worker(lost.rank):
            if self._phase not in _HEALTHY:
                return []
            text = f"the agent of {locate([lost.rank], self._roster.hosts)} went away before its worker was started"
            return self._give_up("unavailable", f"{text}: {lost.text}", now)
        if self._roster.has_ended(lost.rank):
            return []
        self._roster.lost(lost, now)
        if self._phase in _HEALTHY:
            return self._on_failure(lost.rank, now)
        if self._phase is Phase.LEAVING and self._ending.reason == "ok":
            self._ending = Ending("failed", (), decided_at=now)
        if not self._roster.any_live:
            return self._finish(now)
        if self._phase is Phase.SETTLING:
            self._alarms["settle"] = now + SETTLE  # the other ranks of its host are lost with it
        goes_last = self._phase in (Phase.LEAVING, Phase.STOPPING) and self._roster.only_rank_0_left
        return self._let_rank_0_go() if goes_last else []

    def _on_failure(self, rank: int, now: float) -> list[Action]:
        """A rank has failed, or is about to: wait a moment for the cause, for it may be another's."""
        if self._phase in _HEALTHY:
            self._phase = Phase.SETTLING
            self._ending = Ending("failed", (), decided_at=now)
            self._alarms = {"settle": now + SETTLE, "patience": now + PATIENCE}
        return self._settle(now, rank) if self._phase is Phase.SETTLING else []

    def _settle(self, now: float, rank: int | None = None) -> list[Action]:
        """Stop the others once the cause is known; `rank` is the only one of which more is known than before."""
        if not self._roster.any_live:
            return self._finish(now)
        if "settle" in self._alarms:
            return []
        news = self._roster.ends(now) if rank is None else (self._roster.end(rank, now),)
        if "patience" in self._alarms and not verdict.certain(news):
            return []
        ends = self._roster.ends(now)
        victims = self._roster.silent
        blamed = locate(verdict.culprits(ends), self._roster.hosts)
        others = f"; stopping {plural(len(victims), 'other')}" if victims else ""
        # Those that have said their last words are running their exit handlers, and have the grace for it.
        wait = len(victims) < len(self._roster.live)
        return [Say(f"{blamed} failed{others}"), *self._stop(now, victims, wait=wait)]

    def _stop(self, now: float, victims: tuple[int, ...], *, wait: bool = False) -> list[Action]:
        """Kill the victims; with `wait`, the other live ranks only when the grace is over.

        Those are running their exit handlers, and JAX would abort them without the coordinator: then rank 0, which
        holds it, is only frozen, and goes last.
        """
        self._phase = Phase.STOPPING
        self._alarms = {"kill": now + self._limits.grace} if wait else {}
        if not self._roster.any_live:
            return self._finish(now)
        if wait and self._roster.live == (0,):
            return self._let_rank_0_go()
        if wait and 0 in victims:
            self._frozen = True
            return [Kill((0,), signal.SIGSTOP), *self._kill(tuple(rank for rank in victims if rank != 0))]
        return self._kill(victims)

    def _let_rank_0_go(self) -> list[Action]:
        if 0 not in self._roster.waiting:
            return self._kill((0,))
        # Its last words may have crossed with the order to freeze it.
        thaw = [Kill((0,), signal.SIGCONT)] if self._frozen else []
        return [*thaw, Send((0,), Leave())]

    def _kill(self, ranks: tuple[int, ...]) -> list[Action]:
        self._roster.stopped(ranks)
        return [Kill(ranks, signal.SIGKILL)] if ranks else []

    def _finish(self, now: float) -> list[Action]:
        ends = self._roster.ends(now)
        ending = replace(self._ending, ends=ends, run_at=self._run_at)
        ended_well = all(end.done or end.status == 0 for end in ends)
        if ending.reason == "interrupted" and ending.signum == signal.SIGTERM and ended_well:
            ending = replace(ending, reason="preempted")
        self._phase = Phase.OVER
        self._alarms = {}
        return [Finish(ending)]

    # ---- signals, time, stacks

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        asked = self._roster.working
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            return [Kill(asked, signum)] if asked else []
        if signum in (signal.SIGQUIT, STACKS_SIGNAL):
            return [self._take_stacks("show" if signum == signal.SIGQUIT else "keep")]
        if self._phase in _HEALTHY:
            self._ending = Ending("interrupted", (), signum=signum, decided_at=now)
        if self._phase is not Phase.RUNNING:
            return self._stop(now, self._roster.live)
        self._phase = Phase.TERMINATING
        self._alarms = {"kill": now + self._limits.grace}
        name = signal.Signals(signum).name
        grace = f"SIGKILL follows in {self._limits.grace:g} s, or at once with Ctrl-C"
        return [Say(f"{name}: asked {spell(asked)} to end (SIGTERM); {grace}"), Kill(asked, signal.SIGTERM)]

    def _on_time(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name in [name for name, at in self._alarms.items() if at <= now]:
            if self._alarms.pop(name, None) is not None:
                actions += self._on_alarm(name, now)
        return actions

    def _on_alarm(self, name: str, now: float) -> list[Action]:
        match name:
            case "settle" | "patience":
                return self._settle(now)
            case "kill":
                roster = self._roster
                late = roster.waiting if self._phase is Phase.STOPPING else roster.working or roster.live
                text = f"{locate(late, roster.hosts)} did not end within {self._limits.grace:g} s; sent SIGKILL"
                return [Say(text), *self._stop(now, roster.live)]
            case "progress":
                self._alarms[name] = now + PROGRESS[1]
                return [Say(self._gathering.waiting(now - self._started))]
            case "init":
                return self._give_up("unavailable", self._gathering.missing(self._limits.init), now)
            case "job":
                return [self._take_stacks("timeout")]
            case "stall":
                return [self._take_stacks("stall")]
        return [self._take_stacks("early")]

    def _take_stacks(self, purpose: str) -> TakeStacks:
        # Only of those with a fault handler: before its hello, the signal that asks would kill a worker.
        return TakeStacks(tuple(filter(self._gathering.knows, self._roster.working)), purpose)

    def _on_stacks(self, taken: StacksTaken, now: float) -> list[Action]:
        if taken.purpose == "show":
            text = stacks.describe(taken.dumps, self._roster.hosts, taken.waits)
            return [Say(text or "no rank has stacks to show yet")]
        if taken.purpose == "keep":
            return [Keep(STACKS_FILE, stacks.to_json(taken.dumps, self._roster.hosts, taken.waits, now))]
        if self._phase not in _HEALTHY:
            return []
        if taken.purpose == "stall":
            return self._on_look_for_stall(taken, now)
        stuck = taken.purpose == "early" and self._early.look(taken.dumps, taken.waits, taken.cpu, now)
        if taken.purpose == "timeout" or stuck:
            reason = "early-exit" if stuck else "timeout"
            self._ending = Ending(reason, (), dumps=taken.dumps, waits=taken.waits, decided_at=now)
            return self._stop(now, self._roster.live)
        self._alarms["early"] = now + self._early.next_look
        return []

    def _on_look_for_stall(self, taken: StacksTaken, now: float) -> list[Action]:
        assert self._stall is not None
        stall, idle = self._stall, self._stall.look(taken, now)
        if idle >= stall.limit:
            self._ending = Ending("stall", (), dumps=taken.dumps, waits=taken.waits, decided_at=now)
            return self._stop(now, self._roster.live)
        self._alarms["stall"] = now + min(stall.every, stall.limit - idle)
        if stall.warned or idle < stall.limit / 2:
            return []
        stall.warned = True
        where = stacks.describe(taken.dumps, self._roster.hosts, taken.waits)
        limit = f"the job is stopped after {stall.limit:g} s of it (--stall-timeout)"
        return [Say(f"no output and no CPU time in any rank for {idle:.0f} s; {limit} · {where}")]
