"""Hears the agents of a job on other hosts, and has them do what the head decides.

One loop over the door, the lines to the agents, the process that starts them, and signals. It is to those agents what
agent.py is to workers: nothing is decided here.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxrun.agent.agent import Orders
from jaxrun.agent.readiness import Readiness
from jaxrun.agent.signals import SignalPipe
from jaxrun.channel.door import Admitted, Door
from jaxrun.channel.line import TO_HEAD
from jaxrun.channel.messages import Chunk, FirstOutput, ShowStacks, SignalWorker, StreamEnded, Taken, ToHead
from jaxrun.contract import STACKS_SIGNAL, Failed, Hello, Proof
from jaxrun.desk import Desk
from jaxrun.errors import ProtocolError
from jaxrun.head.events import (
    Action,
    AgentSignalled,
    Begin,
    Describe,
    Dismiss,
    Ending,
    Event,
    Exited,
    Finish,
    Inflict,
    Kill,
    Lost,
    Report,
    Say,
    Send,
    Signalled,
    StacksTaken,
    TakeStacks,
    Unavailable,
)
from jaxrun.output.output import Output
from jaxrun.ranks import locate
from jaxrun.station.lines import AgentLine, Lines
from jaxrun.station.stacks import StacksCollection
from jaxrun.station.starting import Starting
from jaxrun.station.suspicion import Known, Suspicion
from jaxrun.verdict.stacks import NATIVE_SIGNAL

_LINES, _DOOR, _SIGNALS, _STARTER = range(4)  # the order in which what is ready is served
# How Open MPI 4 and 5 write a rank: [[12345,1],3], [prterun-h1-12345@1,3].
_BY_NAME = re.compile(r"Process name: \[\S*,(\d{1,9})\]")
_RETRY = 0.01  # seconds until what the network did not take is sent again
# Seconds in which a host that is there has answered; an engine leaves the processes that it started less time.
_ANSWER = {False: 1.0, True: 0.15}
_FAREWELL = 1.0  # seconds for the last messages to leave
# Seconds that the starter gets to end by itself, and after SIGTERM: after a job that ended well, and after another.
_IN_PEACE = (5.0, 2.0)
_IN_A_HURRY = (0.6, 0.6)


class Station:
    """One job."""

    def __init__(
        self,
        desk: Desk,
        door: Door,
        output: Output,
        signals: SignalPipe,
        starting: Starting,
        clock: Callable[[], float],
        *,
        verbose: bool = False,
        attached: bool = False,
        orders: Orders | None = None,
    ) -> None:
        """`attached`: this process is one of those that somebody else started, and is sent their signals, too.

        `orders`: where whoever the launcher works for is heard, and what is to be done then.
        """
        self._desk = desk
        self._door = door
        self._output = output
        self._signals = signals
        self._starting = starting
        self._now = clock
        self._verbose = verbose
        self._attached = attached
        self._orders = orders
        self._lines = Lines()
        self._ready = Readiness()
        self._skew: dict[int, float] = {}  # seconds that a rank's clock is behind ours
        self._logs_itself: set[int] = set()
        self._stacks: dict[str, StacksCollection] = {}  # by purpose
        self._suspicion = Suspicion(_ANSWER[attached])
        self._spoke: set[int] = set()  # ranks that have said last words
        self._ending: Ending | None = None

    def run(self) -> Ending:
        """Serve the job until the head says that it is over."""
        self._ready.watch(self._signals.fileno(), _SIGNALS, self._on_signals)
        self._ready.watch(self._starting.fileno(), _STARTER, self._on_starter_words)
        if self._orders is not None:
            fd, hear = self._orders
            self._ready.watch(fd, _SIGNALS, lambda: self._carry_out_all(hear()))
        for listener in self._door.listeners:
            self._ready.watch(listener.fileno(), _DOOR, lambda listener=listener: self._on_knock(listener))  # type: ignore[misc]
        while self._ending is None:
            self._turn()
        return self._ending

    def dismiss(self, status: int) -> None:
        """Tell all agents to end with `status`."""
        self._lines.send_all(Dismiss(status))
        deadline = time.monotonic() + _FAREWELL
        while self._lines.unsent and time.monotonic() < deadline:
            self._lines.flush()
            time.sleep(_RETRY)

    def end_starter(self, *, hurry: bool) -> None:
        """See to it that what has started the agents ends, too; with `hurry`, as it may be stuck."""
        patience = _IN_A_HURRY if hurry else _IN_PEACE
        for seconds, signum in zip(patience, (signal.SIGTERM, signal.SIGKILL), strict=True):
            if self._await_starter(seconds):
                return
            self._starting.stop(signum)
        self._await_starter(patience[-1])

    def close(self) -> None:
        for line in self._lines:
            line.close()
        self._door.close()
        self._starting.close()
        self._ready.close()

    # ---- the loop

    def _turn(self) -> None:
        self._ready.serve(self._patience())
        self._lines.flush()
        self._door.drop_silent(self._ready.forget)
        if not self._output.congested:
            self._lines.acknowledge()
        for note in self._door.dropped:
            self._desk.note("dropped", text=note)
        self._door.dropped.clear()
        for purpose in [purpose for purpose, found in self._stacks.items() if found.due <= self._now()]:
            self._finish_stacks(purpose)
        if self._suspicion.due is not None and self._suspicion.due <= self._now():
            self._explain()
        self._carry_out_all(self._desk.due())

    def _patience(self) -> float | None:
        """How long nothing needs to happen: seconds, None for ever."""
        now = self._now()
        waits = [self._output.tick(), _RETRY if self._lines.unsent else None]
        dues = (self._desk.deadline(), *(found.due for found in self._stacks.values()), self._suspicion.due)
        waits += [due - now for due in dues if due]
        deadline = self._door.deadline()
        if deadline is not None:
            waits.append(deadline - time.monotonic())
        known = [max(0.0, wait) for wait in waits if wait is not None]
        return min(known, default=None)

    # ---- the head

    def _tell(self, event: Event) -> None:
        self._carry_out_all(self._desk.tell(event))

    def _carry_out_all(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        killed = [rank for action in actions if isinstance(action, Kill) for rank in action.ranks]
        if any(isinstance(action, Kill) and action.signum == signal.SIGKILL for action in actions):
            self._lines.send(killed, SignalWorker(signal.SIGSTOP))  # or they would see each other die, and complain
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Begin():
                if action.log_dir:
                    self._logs_itself.add(action.rank)
                self._lines.send((action.rank,), action)
            case Send():
                self._lines.send(action.ranks, action.message)
            case Kill():
                self._lines.send(action.ranks, SignalWorker(action.signum))
            case Inflict():
                self._lines.send(action.ranks, action)
            case TakeStacks():
                self._stacks[action.purpose] = StacksCollection(action, self._now())
                self._lines.send(action.ranks, ShowStacks(action.purpose))
                if self._stacks[action.purpose].complete:
                    self._finish_stacks(action.purpose)
            case Describe():
                self._lines.send((action.rank,), action)
            case Say():
                self._output.say(f"jaxrun: {action.text}")
            case Finish():
                self._ending = self._with_words(action.ending)

    def _with_words(self, ending: Ending) -> Ending:
        """Where agents are missing, the starter may have said why, and wait for the others."""
        words = self._starting.words()
        if ending.reason != "unavailable" or self._all_came or not words or words in ending.text:
            return ending
        return replace(ending, text=f"{ending.text}\n{self._starting.title} said:\n{words}")

    def _finish_stacks(self, purpose: str) -> None:
        self._tell(self._stacks.pop(purpose).result())

    # ---- what happens

    def _on_knock(self, listener: object) -> None:
        for fd in self._door.accept(listener):  # type: ignore[arg-type]
            self._ready.watch(fd, _DOOR, lambda fd=fd: self._on_guest(fd))  # type: ignore[misc]

    def _on_guest(self, fd: int) -> None:
        admitted = self._door.hear(fd)
        if admitted is None and self._door.is_guest(fd):
            return
        self._ready.forget(fd)
        if admitted is not None:
            self._admit(admitted)

    def _admit(self, admitted: Admitted) -> None:
        line: AgentLine = AgentLine(admitted.connection, TO_HEAD)
        self._lines.add(admitted.rank, line)
        self._ready.watch(line.fileno(), _LINES, lambda: self._on_line(admitted.rank, line))

    def _on_line(self, rank: int, line: AgentLine) -> None:
        try:
            messages = line.receive()
        except ProtocolError as error:
            messages, line.lost = [], f"its agent sent what is no message of jaxrun's: {error}"
        for message in messages:
            self._on_message(rank, line, message)
        if line.lost:
            self._ready.forget(line.fileno())
            self._lines.remove(rank, line)
            line.close()
            if rank in self._skew:
                self._suspect(Lost(rank, line.lost), ask=False)

    def _suspect(self, *events: Event, ask: bool) -> None:
        """Hold these events until it is known why agents end; `ask` whether all hosts still answer."""
        wanted = self._ask_hosts if ask and self._skew else None
        self._suspicion.hold(events, self._now(), all_came=self._all_came, ask=wanted)

    def _ask_hosts(self) -> None:
        self._lines.send_all(Taken(0))  # asks for no more than the answer of the other side's kernel

    def _explain(self) -> None:
        status = self._starting.status
        known = Known(
            silent=self._lines.silent() if self._suspicion.asked else (),
            spoke=frozenset(self._spoke),
            ended=self._starter_ended(),
            by_itself=status not in (None, 0) and not self._starting.was_killed,
            all_came=self._all_came,
        )
        for event in self._suspicion.explain(known):
            self._tell(event)

    @property
    def _all_came(self) -> bool:
        return len(self._skew) == len(self._desk.hosts)

    def _starter_ended(self) -> Unavailable | None:
        if self._starting.status is None:
            return None
        words = self._starting.words()
        said = f"; it said:\n{words}" if words else ""
        hosts = self._desk.hosts
        missing = [rank for rank in hosts if rank not in self._skew]
        named = [rank for rank in map(int, _BY_NAME.findall(words)) if rank in hosts]
        lacking = f"\nnot heard from: {locate(missing, hosts)}" if missing and self._skew else ""
        if not self._skew and named:
            lacking = f"\nthat is {locate(named, hosts)}"
        return Unavailable(f"{self._starting.end_in_words()} before the job was over{said}{lacking}")

    def _on_message(self, rank: int, line: AgentLine, message: ToHead) -> None:
        match message:
            case Chunk():
                take = self._output.show if rank in self._logs_itself else self._output.take
                take(rank, message.stream, message.data)
                self._lines.owe(line, len(message.data))
            case StreamEnded():
                self._output.end(rank, message.stream)
            case FirstOutput():
                self._desk.note("first_output", rank)
            case StacksTaken():
                found = self._stacks.get(message.purpose)
                if found is not None and found.add(message):
                    self._finish_stacks(message.purpose)
            case AgentSignalled():
                self._suspect(message, ask=True)
            case Report():
                self._skew[rank] = self._now() - message.time
                self._tell(message)
            case Failed():
                self._spoke.add(rank)
                if rank not in self._logs_itself:
                    self._output.log(rank, "err", message.traceback.encode())
                self._tell_in_turn(message)
            case Exited():
                self._tell_in_turn(message)
            case _:
                self._tell(self._by_our_clock(rank, message))

    def _tell_in_turn(self, event: Event) -> None:
        """A worker's end may come of what is held, when its engine ends all of them."""
        if self._suspicion.asked:
            self._suspect(event, ask=False)
        else:
            self._tell(event)

    def _by_our_clock(self, rank: int, message: ToHead) -> Event:
        skew = self._skew.get(rank, 0.0)
        match message:
            case Hello():
                return replace(message, time=message.time + skew, started=message.started + skew)
            case Proof():
                return replace(message, time=message.time + skew, joined=message.joined + skew)
        return message  # type: ignore[return-value]

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number != signal.SIGCHLD:
                self._on_signal(number)
            elif self._starting.status is None and self._starting.reap():
                self._on_starter_end()

    def _on_signal(self, number: int) -> None:
        if not self._attached or number in (signal.SIGQUIT, STACKS_SIGNAL, NATIVE_SIGNAL):
            self._tell(Signalled(number))
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._lines.send((0,), SignalWorker(number))  # the other ranks are sent it as well
        else:
            self._suspect(AgentSignalled(0, number), ask=True)

    def _on_starter_words(self) -> None:
        words = self._starting.read()
        if words is None:
            self._ready.forget(self._starting.fileno())
        elif words and self._verbose:
            self._output.say(words.decode(errors="replace"))

    def _on_starter_end(self) -> None:
        self._desk.note("starter_ended", status=self._starting.status)
        self._suspect(ask=True)

    def _await_starter(self, seconds: float) -> bool:
        """Wait for the starter's end, and for the ends of the lines, which are noticed in passing."""
        deadline = time.monotonic() + seconds
        while not self._starting.reap():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._signals.take()
            self._starting.read()
            time.sleep(min(left, _RETRY))
        return True
