"""Brings a job together and decides how it ends: a state machine without I/O.

It is fed events (messages of the workers, exits, signals, the clock) and answers with actions for the agent. Everything that
affects the decision lives here; what the decision means for people is weighed in verdict.py.

    MEETING ──all said hello──▶ JOINING ──all have proved──▶ RUNNING ──all done──▶ LEAVING ──▶ OVER
       └────────────┬──────────────┴───────────────┬───────────┘ └──signal──▶ TERMINATING ──▶ OVER
              first failure              refusal, time limit
                    ▼                              ▼
                SETTLING ──the cause is clear──▶ STOPPING ──all have ended──▶ OVER
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace

from . import stacks, uniform, verdict
from .contract import Done, Failed, Hello, Join, Lead, Leave, Listening, Proof, Run, ThreadFailed
from .early_exit import EarlyExit
from .ends import End
from .events import (
    Action,
    Ending,
    Event,
    Exited,
    Finish,
    Kill,
    Limits,
    Say,
    Send,
    Signalled,
    Spawned,
    StacksTaken,
    TakeStacks,
    Unavailable,
)
from .ranks import spell

SETTLE = 0.03  # seconds to wait for the cause after the first failure: collateral errors can win the race
PATIENCE = 0.5  # seconds to wait for it when all that is known is collateral
PROGRESS = (2.0, 10.0)  # seconds until the start-up says whom it waits for, and between saying so again


class Phase(enum.Enum):
    MEETING = enum.auto()
    JOINING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    TERMINATING = enum.auto()
    SETTLING = enum.auto()
    STOPPING = enum.auto()
    OVER = enum.auto()


_HEALTHY = (Phase.MEETING, Phase.JOINING, Phase.RUNNING)


class Head:
    """One job. `hosts` maps each rank to its host; times are seconds since the epoch, always passed in.

    `interface` is the address of rank 0's host at which the coordinator is to listen.
    """

    def __init__(
        self, hosts: Mapping[int, str], expected: uniform.Expected, limits: Limits, interface: str, now: float
    ) -> None:
        self._hosts = dict(hosts)
        self._expected = expected
        self._limits = limits
        self._interface = interface
        self._started = now
        self._run_at: float | None = None
        self._phase = Phase.MEETING
        self._ending = Ending("ok", ())
        self._spawned: set[int] = set()
        self._hellos: dict[int, Hello] = {}
        self._proofs: dict[int, Proof] = {}
        self._words: dict[int, Failed] = {}
        self._threads: dict[int, list[ThreadFailed]] = {}
        self._done: set[int] = set()
        self._exits: dict[int, Exited] = {}
        self._signs: dict[int, float] = {}
        self._stopped: set[int] = set()
        self._early = EarlyExit()
        self._alarms: dict[str, float] = {"init": now + limits.init, "progress": now + PROGRESS[0]}
        if limits.job is not None:
            self._alarms["job"] = now + limits.job

    @property
    def phase(self) -> Phase:
        return self._phase

    def deadline(self) -> float | None:
        """When the head wants its next Tick at the latest."""
        return min(self._alarms.values(), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order."""
        if self._phase is Phase.OVER:
            return []
        match event:
            case Spawned():
                self._spawned.add(event.rank)
                return []
            case Hello():
                return self._on_hello(event, now)
            case Listening():
                return [Send(tuple(rank for rank in self._hosts if rank != event.rank), Join(event.address))]
            case Proof():
                return self._on_proof(event, now)
            case ThreadFailed():
                self._threads.setdefault(event.rank, []).append(event)
                return []
            case Failed():
                self._words[event.rank] = event
                return self._on_failure(event.rank, now)
            case Done():
                return self._on_done(event.rank, now)
            case Exited():
                return self._on_exit(event, now)
            case Unavailable():
                return self._give_up("unavailable", event.text, now, traceback=event.traceback)
            case Signalled():
                return self._on_signal(event.signum, now)
            case StacksTaken():
                return self._on_stacks(event, now)
        return self._on_time(now)

    # ---- bringing the job together

    def _on_hello(self, hello: Hello, now: float) -> list[Action]:
        known = self._hellos.get(hello.rank)
        if known is not None:
            return self._give_up("refused", uniform.duplicate(known, hello), now)
        self._hellos[hello.rank] = hello
        if len(self._hellos) < len(self._hosts) or self._phase is not Phase.MEETING:
            return []
        text = uniform.compare_hellos(self._hellos)
        if text:
            return self._give_up("refused", text, now)
        self._phase = Phase.JOINING
        return [Send((0,), Lead(self._interface))]

    def _on_proof(self, proof: Proof, now: float) -> list[Action]:
        self._proofs[proof.rank] = proof
        if len(self._proofs) < len(self._hosts) or self._phase is not Phase.JOINING:
            return []
        text = uniform.check_proofs(self._proofs, self._hellos, self._expected)
        if text:
            return self._give_up("refused", text, now)
        self._phase = Phase.RUNNING
        self._run_at = now
        del self._alarms["init"], self._alarms["progress"]
        return [Send(tuple(self._hosts), Run())]

    def _give_up(self, reason: str, text: str, now: float, traceback: str = "") -> list[Action]:
        self._ending = Ending(reason, (), text=text, traceback=traceback, decided_at=now)
        return self._stop(now, self._live())

    # ---- a worker ends

    def _on_done(self, rank: int, now: float) -> list[Action]:
        self._done.add(rank)
        return self._on_finished(now)

    def _on_finished(self, now: float) -> list[Action]:
        """Somebody's program has ended well: when all have, they leave, rank 0 and its coordinator last."""
        live = self._live()
        if self._phase not in (Phase.RUNNING, Phase.TERMINATING) or not live:
            return []
        if any(rank not in self._done for rank in live):
            if self._phase is Phase.RUNNING:
                self._alarms.setdefault("early", now + self._early.first_look)
            return []
        self._alarms = {"kill": now + self._limits.grace}
        self._phase = Phase.LEAVING
        return [Send(tuple(rank for rank in live if rank != 0) or live, Leave())]

    def _on_exit(self, exited: Exited, now: float) -> list[Action]:
        rank = exited.rank
        self._exits[rank] = exited
        well = exited.status == 0 and self._run_at is not None
        if self._phase in _HEALTHY and not well:
            return self._on_failure(rank, now)
        self._signs.setdefault(rank, now)
        if not self._live():
            return self._finish(now)
        if self._phase is Phase.LEAVING and self._live() == (0,):
            return [Send((0,), Leave())]
        return self._settle(now) if self._phase is Phase.SETTLING else self._on_finished(now)

    def _on_failure(self, rank: int, now: float) -> list[Action]:
        """A rank has failed, or is about to: wait a moment for the cause, for it may be another's."""
        self._signs.setdefault(rank, now)
        if self._phase in _HEALTHY:
            self._phase = Phase.SETTLING
            self._ending = Ending("failed", (), decided_at=now)
            self._alarms = {"settle": now + SETTLE, "patience": now + PATIENCE}
        return self._settle(now) if self._phase is Phase.SETTLING else []

    def _settle(self, now: float) -> list[Action]:
        if not self._live():
            return self._finish(now)
        ends = self._ends(now)
        if "settle" in self._alarms or ("patience" in self._alarms and not verdict.certain(ends)):
            return []
        victims = tuple(rank for rank in self._live() if rank not in self._words)
        blamed = verdict.culprits(ends)
        others = f"; stopping the other {len(victims)}" if victims else ""
        # Those that have said their last words are running their exit handlers, and have the grace for it.
        wait = len(victims) < len(self._live())
        return [Say(f"{spell(blamed)} failed{others}"), *self._stop(now, victims, wait=wait)]

    def _stop(self, now: float, victims: Iterable[int], *, wait: bool = False) -> list[Action]:
        """Kill the victims; with `wait`, the other live ranks only when the grace is over."""
        killed = tuple(victims)
        self._phase = Phase.STOPPING
        self._alarms = {"kill": now + self._limits.grace} if wait else {}
        self._stopped.update(killed)
        if not self._live():
            return self._finish(now)
        return [Kill(killed, signal.SIGKILL)] if killed else []

    def _finish(self, now: float) -> list[Action]:
        ends = self._ends(now)
        ending = replace(self._ending, ends=ends, run_at=self._run_at)
        if ending.reason == "interrupted" and ending.signum == signal.SIGTERM and all(e.status == 0 for e in ends):
            ending = replace(ending, reason="preempted")
        self._phase = Phase.OVER
        self._alarms = {}
        return [Finish(ending)]

    # ---- signals, time, stacks

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            return [Kill(self._live(), signum)]
        if signum == signal.SIGQUIT:
            return [TakeStacks(tuple(rank for rank in self._live() if rank in self._hellos), "show")]
        if self._phase in _HEALTHY:
            self._ending = Ending("interrupted", (), signum=signum, decided_at=now)
        if self._phase is not Phase.RUNNING:
            return self._stop(now, self._live())
        self._phase = Phase.TERMINATING
        self._alarms = {"kill": now + self._limits.grace}
        name = signal.Signals(signum).name
        grace = f"SIGKILL follows in {self._limits.grace:g} s, or at once with Ctrl-C"
        asked = self._live()
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
                return self._stop(now, self._live())
            case "progress":
                self._alarms[name] = now + PROGRESS[1]
                return [Say(self._waiting_line(now))]
            case "init":
                present, step = self._present("started", "joined")
                text = uniform.missing(len(self._hosts), self._hosts, present, self._limits.init, step)
                return self._give_up("unavailable", text, now)
            case "job":
                return [TakeStacks(self._live(), "timeout")]
        return [TakeStacks(tuple(rank for rank in self._live() if rank not in self._done), "early")]

    def _on_stacks(self, taken: StacksTaken, now: float) -> list[Action]:
        if taken.purpose == "show":
            return [Say(stacks.describe(taken.dumps, self._hosts))]
        if self._phase not in _HEALTHY:
            return []
        stuck = taken.purpose == "early" and self._early.look(taken.dumps, taken.cpu, now)
        if taken.purpose == "timeout" or stuck:
            reason = "early-exit" if stuck else "timeout"
            self._ending = Ending(reason, (), dumps=taken.dumps, decided_at=now)
            return self._stop(now, self._live())
        self._alarms["early"] = now + self._early.next_look
        return []

    # ---- who is where

    def _live(self) -> tuple[int, ...]:
        return tuple(rank for rank in sorted(self._spawned) if rank not in self._exits)

    def _present(self, meeting: str, joining: str) -> tuple[Iterable[int], str]:
        return (self._hellos, meeting) if self._phase is Phase.MEETING else (self._proofs, joining)

    def _waiting_line(self, now: float) -> str:
        present, step = self._present("starting", "joining")
        there = set(present)
        absent = spell(rank for rank in self._hosts if rank not in there)
        return f"{step}: {len(there)} of {len(self._hosts)} ranks after {now - self._started:.0f} s, waiting for {absent}"

    def _ends(self, now: float) -> tuple[End, ...]:
        return tuple(self._end(rank, now) for rank in sorted(self._hosts))

    def _end(self, rank: int, now: float) -> End:
        exited = self._exits.get(rank)
        return End(
            rank=rank,
            host=self._hosts[rank],
            time=self._signs.get(rank, now),
            status=exited.status if exited else None,
            words=self._words.get(rank),
            threads=tuple(self._threads.get(rank, ())),
            fatal=exited.fatal if exited else "",
            tail=exited.tail if exited else "",
            stopped=rank in self._stopped,
            done=rank in self._done,
            out_of_memory=exited.out_of_memory if exited else "",
        )
