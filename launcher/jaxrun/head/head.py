"""Brings a job together and decides how it ends: a state machine without I/O.

It is fed events (messages of the workers, exits, signals, the clock) and answers with actions for the agent.
Everything that affects the decision lives here; what it means for people is weighed in verdict.py.

    STARTING ──all have proved themselves──▶ RUNNING ──all done──▶ LEAVING ──▶ OVER
       └───────────┬─────────────────┬──────────┘ └──signal──▶ TERMINATING ──▶ OVER
             first failure    refusal, time limit
                   ▼                 ▼
               SETTLING ─clear─▶ STOPPING ──all have ended──▶ OVER

Where the ranks' calls leave a question open, CONCLUDING comes before OVER, until it is answered or has waited too long.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxrun.contract import STACKS_SIGNAL, Call, Done, Failed, Hello, Leave, Listening, Proof, ThreadFailed
from jaxrun.contract.flight import OFF
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.head import uniform
from jaxrun.head.chaos import Chaos
from jaxrun.head.events import (
    FLIGHTS_ONLY,
    Action,
    AgentSignalled,
    Described,
    Ending,
    Event,
    Exited,
    FaultAsked,
    Finish,
    Flown,
    HungUp,
    Kill,
    Limits,
    Lost,
    Report,
    Say,
    Send,
    SignalAsked,
    Signalled,
    Spared,
    Spawned,
    StacksTaken,
    TakeStacks,
    Unavailable,
)
from jaxrun.head.gathering import Gathering
from jaxrun.head.lockstep import Lockstep
from jaxrun.head.looks import Looks
from jaxrun.head.muster import Muster
from jaxrun.head.roster import Roster
from jaxrun.planning.chaos import Fault
from jaxrun.ranks import locate, spell
from jaxrun.verdict import verdict
from jaxrun.verdict.stacks import NATIVE_SIGNAL
from jaxrun.wording import plural

TOGETHER = 1.0  # seconds to wait for the others that were told of the same
SETTLE = 0.03  # seconds to wait for the cause after the first failure: collateral errors can win the race
PATIENCE = 0.5  # seconds to wait for it when all that is known is collateral
LAST_QUESTIONS = 0.8  # seconds that the end may be put off to learn how the ranks fell out of step
PROGRESS = (2.0, 10.0)  # seconds until the start-up says whom it waits for, and between saying so again


class Phase(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    TERMINATING = enum.auto()
    SETTLING = enum.auto()
    STOPPING = enum.auto()
    CONCLUDING = enum.auto()
    OVER = enum.auto()


_HEALTHY = (Phase.STARTING, Phase.RUNNING)
_LOOKS: Mapping[int, str] = {signal.SIGQUIT: "show", STACKS_SIGNAL: "keep", NATIVE_SIGNAL: "native"}


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
        lockstep: str = OFF,
        chaos: Sequence[Fault] = (),
    ) -> None:
        self._roster = Roster(hosts)
        self._gathering = Gathering(self._roster.hosts, expected, interface, muster)
        self._chaos = Chaos(chaos, self._roster)
        self._limits = limits
        self._started = now
        self._run_at: float | None = None
        self._phase = Phase.STARTING
        self._ending = Ending("ok", ())
        self._frozen = False
        self._lockstep = Lockstep(lockstep, self._roster.hosts)
        self._looks = Looks(self._roster.hosts, limits, self._lockstep, now)
        self._alarms: dict[str, float] = {"init": now + limits.init, "progress": now + PROGRESS[0]}

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as it is known."""
        return self._roster.hosts

    def deadline(self) -> float | None:
        """When the head wants its next Tick at the latest."""
        if self._phase is Phase.OVER:
            return None
        chaos = self._chaos.deadline() if self._phase is Phase.RUNNING else None
        deadlines = (*self._alarms.values(), self._looks.deadline(), self._lockstep.deadline(), chaos)
        return min((at for at in deadlines if at is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order."""
        if self._phase is Phase.OVER:
            return []
        match event:
            case Signalled():
                return self._on_signal(event.signum, now)
            case SignalAsked() | FaultAsked() | HungUp():
                return self._on_request(event, now)
            case StacksTaken():
                return self._on_stacks(event, now)
            case Described():
                return self._or_finish(self._lockstep.on_described(event), now)
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
            case Call():
                return self._lockstep.on_call(event, self._roster.working_count, now)
            case Flown():
                self._lockstep.on_flown(event)
            case ThreadFailed():
                self._roster.thread_failed(event)
            case Spared():
                return self._chaos.spared(event)
            case Failed():
                self._roster.spoke(event, now)
                return self._on_failure(event.rank, now)
            case Done():
                self._roster.done(event.rank, now)
                self._lockstep.gone(event.rank, now)
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
            self._looks.begin(now)
            self._chaos.begin(now)
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
                self._looks.finished(now)
            return []
        self._looks.end()
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
            self._looks.end()
            wait = TOGETHER if self._lockstep.told(rank) else SETTLE
            self._alarms = {"settle": now + wait, "patience": now + PATIENCE}
        return self._settle(now, rank) if self._phase is Phase.SETTLING else []

    def _settle(self, now: float, rank: int | None = None) -> list[Action]:
        """Stop the others once the cause is known; `rank` is the only one of which more is known than before."""
        if not self._roster.any_live:
            return self._finish(now)
        if rank is not None and self._lockstep.told(rank) and not any(map(self._lockstep.told, self._roster.silent)):
            self._alarms.pop("settle", None)  # all have said it
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
        self._looks.end()
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
        if self._phase is not Phase.CONCLUDING:
            self._phase = Phase.CONCLUDING
            self._looks.end()
            self._alarms = {"conclude": now + LAST_QUESTIONS}
            questions = self._lockstep.conclude(now, well=self._ending.reason == "ok")
            if self._lockstep.busy:
                return questions
        ends = self._roster.ends(now)
        divergence = self._lockstep.divergence
        flights = self._ending.flights or self._lockstep.texts
        ending = replace(self._ending, ends=ends, run_at=self._run_at, divergence=divergence, flights=flights)
        ended_well = all(end.done or end.status == 0 for end in ends)
        if ending.reason == "interrupted" and ending.signum == signal.SIGTERM and ended_well:
            ending = replace(ending, reason="preempted")
        self._phase = Phase.OVER
        self._alarms = {}
        return [*(self._chaos.left() if ending.reason == "ok" else ()), Finish(ending)]

    def _or_finish(self, actions: list[Action], now: float) -> list[Action]:
        """An answer has come: was it the last that the end has waited for?"""
        concluded = self._phase is Phase.CONCLUDING and not self._lockstep.busy
        return [*actions, *self._finish(now)] if concluded else actions

    # ---- signals, requests, time, stacks

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        if self._phase is Phase.CONCLUDING:
            return self._finish(now)
        asked = self._roster.working
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            return [Kill(asked, signum)] if asked else []
        if signum in _LOOKS:
            return [self._take_stacks(_LOOKS[signum])]
        if self._phase in _HEALTHY:
            self._ending = Ending("interrupted", (), signum=signum, decided_at=now)
        if self._phase is not Phase.RUNNING:
            return self._stop(now, self._roster.live)
        self._phase = Phase.TERMINATING
        self._looks.end()
        self._alarms = {"kill": now + self._limits.grace}
        name = signal.Signals(signum).name
        grace = f"SIGKILL follows in {self._limits.grace:g} s, or at once with Ctrl-C"
        return [Say(f"{name}: asked {spell(asked)} to end (SIGTERM); {grace}"), Kill(asked, signal.SIGTERM)]

    def _on_request(self, asked: SignalAsked | FaultAsked | HungUp, now: float) -> list[Action]:
        match asked:
            case SignalAsked():
                ranks = self._roster.working if self._phase is Phase.RUNNING else ()
                return [Kill(ranks, asked.signum)] if ranks else []
            case FaultAsked():
                healthy = self._phase in _HEALTHY
                return self._chaos.order(asked.kind, asked.ranks, "its gang", now) if healthy else []
        if self._phase is Phase.CONCLUDING:
            return self._finish(now)
        if self._phase in _HEALTHY:
            self._ending = Ending("interrupted", (), text=asked.by, signum=signal.SIGHUP, decided_at=now)
        return self._stop(now, self._roster.live)

    def _on_time(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name in [name for name, at in self._alarms.items() if at <= now]:
            if self._alarms.pop(name, None) is not None:
                actions += self._on_alarm(name, now)
        if self._phase is Phase.RUNNING:
            actions += self._chaos.due(now)
        actions += [self._take_stacks(purpose) for purpose in self._looks.due(now)]
        return self._or_finish([*actions, *self._lockstep.due(now)], now)

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
        self._lockstep.hurry()
        return self._finish(now)

    def _take_stacks(self, purpose: str) -> TakeStacks:
        # Only of those with a fault handler: before its hello, the signal that asks would kill a worker.
        ranks = self._roster.live if purpose in FLIGHTS_ONLY else self._roster.working
        return TakeStacks(tuple(filter(self._gathering.knows, ranks)), purpose)

    def _on_stacks(self, taken: StacksTaken, now: float) -> list[Action]:
        seen = self._looks.take(taken, self._roster.waiting, now)
        if seen.ending is None or self._phase not in _HEALTHY:
            return self._or_finish([*seen.actions], now)
        self._ending = seen.ending
        return [*seen.actions, *self._stop(now, self._roster.live)]
