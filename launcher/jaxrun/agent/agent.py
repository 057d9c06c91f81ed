"""Watches and stops workers, tells its superior what happens to them, and carries out what that decides.

The superior is the head itself, in this process, or the line to a head on another host. One loop: messages first, then
exits and signals, output last. The agent is the parent of its workers and, as a subreaper, of whatever they leave
behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from jaxrun.agent.child import Child
from jaxrun.agent.crew import Crew
from jaxrun.agent.faults import inflict
from jaxrun.agent.kernel_log import OomWatch, own_memory_cgroup
from jaxrun.agent.pipes import Pipes
from jaxrun.agent.readiness import Readiness
from jaxrun.agent.signals import SignalPipe
from jaxrun.contract import STACKS_SIGNAL, Done, Failed
from jaxrun.errors import EXIT_SOFTWARE, ProtocolError
from jaxrun.head.events import (
    FLIGHTS_ONLY,
    Action,
    Describe,
    Described,
    Dismiss,
    Event,
    Exited,
    Finish,
    Flown,
    Inflict,
    Kill,
    Say,
    Send,
    Signalled,
    Spared,
    StacksTaken,
    TakeStacks,
)
from jaxrun.output.drain import Sink

if TYPE_CHECKING:
    from jaxrun.agent.native import NativeLook

_STACKS_WAIT = 0.1  # seconds for the fault handlers to answer; they take some milliseconds
_MESSAGES, _SIGNALS, _PIPES = range(3)  # the order in which what is ready is served


class Superior(Protocol):
    """Who decides what becomes of the workers. Times are seconds since the epoch."""

    def tell(self, event: Event) -> list[Action]:
        """What is to be done now, in order; orders from far come later."""

    def due(self) -> list[Action]:
        """What is to be done because time has passed."""

    def deadline(self) -> float | None:
        """When `due` is to be asked at the latest."""

    def note(self, name: str, rank: int | None = None, **more: object) -> None:
        """What happened that changes no decision."""


Orders = tuple[int, Callable[[], list[Action]]]


class Agent:
    """All workers of one plan on this host."""

    def __init__(
        self,
        crew: Crew,
        superior: Superior,
        output: Sink,
        signals: SignalPipe,
        clock: Callable[[], float],
        orders: Orders | None = None,
    ) -> None:
        """`orders`: a descriptor, and what is to be done when it is readable: orders of a superior elsewhere, or of the
        process that the launcher works for.
        """
        self._crew = crew
        self._superior = superior
        self._output = output
        self._signals = signals
        self._now = clock
        self._orders = orders
        self._pipes = Pipes(output, lambda rank: superior.note("first_output", rank))
        self._ready = Readiness()
        self._oom = OomWatch(own_memory_cgroup())
        self._stacks_due: list[tuple[float, TakeStacks]] = []
        self._natives: list[tuple[StacksTaken, NativeLook]] = []
        self._last: Finish | Dismiss | None = None

    def run(self) -> Finish | Dismiss:
        """Start the workers and serve them until the superior says that it is over; returns its last word."""
        self._ready.watch(self._signals.fileno(), _SIGNALS, self._on_signals)
        if self._orders is not None:
            fd, hear = self._orders
            self._ready.watch(fd, _MESSAGES, lambda: self._carry_out_all(hear()))
        events = self._crew.start()
        if self._crew.server is not None:
            self._ready.watch(self._crew.server.channel.fileno(), _MESSAGES, self._on_server)
        self._welcome(events)
        if self._orders is not None:
            self._carry_out_all(self._orders[1]())  # what has come before we listened
        while self._last is None:
            self._turn()
        return self._last

    def close(self) -> None:
        """Hand over what is still in the pipes and let go of everything."""
        for _, look in self._natives:
            look.close()
        self._pipes.close()
        self._crew.close()
        self._oom.close()
        self._ready.close()

    # ---- the loop

    def _turn(self) -> None:
        """Wait until something happens or is due, and see to it."""
        wait = self._patience(self._output.tick())
        self._read_pipes(wanted=not self._output.congested)
        self._ready.serve(wait)
        now = self._now()
        for due, order in [item for item in self._stacks_due if item[0] <= now]:
            self._stacks_due.remove((due, order))
            self._on_stacks(order, self._read_stacks(order))
        self._turn_natives()
        self._carry_out_all(self._superior.due())

    def _patience(self, output: float | None) -> float | None:
        """How long nothing needs to happen: seconds, None for ever. `output` is the output's own answer."""
        now = self._now()
        waits = [due - now for due, _ in self._stacks_due]
        waits += [look.deadline - now for _, look in self._natives]
        deadline = self._superior.deadline()
        if deadline is not None:
            waits.append(deadline - now)
        if output is not None:
            waits.append(output)
        return max(0.0, min(waits)) if waits else None

    def _read_pipes(self, *, wanted: bool) -> None:
        fd = self._pipes.fileno()
        if wanted and not self._ready.watches(fd):
            self._ready.watch(fd, _PIPES, self._pipes.serve)
        elif not wanted:
            self._ready.forget(fd)

    def _welcome(self, events: Iterable[Event]) -> None:
        """Listen to the children that are there now, then tell the head of them."""
        for child in self._crew:
            fd = child.lines.channel.fileno()
            self._ready.watch(fd, _MESSAGES, lambda child=child: self._on_channel(child))  # type: ignore[misc]
            self._pipes.add(child.rank, child.lines.out, child.lines.err)
        self._tell_all(events)

    # ---- the superior

    def _tell_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        self._carry_out_all(self._superior.tell(event))

    def _carry_out_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send():
                for rank in action.ranks:
                    self._crew[rank].send(action.message)
            case Kill():
                self._signal(action)
            case Inflict():
                for rank in action.ranks:
                    if trouble := inflict(self._crew[rank], action.kind):
                        self._tell(Spared(rank, action.kind, trouble))
            case TakeStacks() if action.purpose in FLIGHTS_ONLY:
                self._tell(self._read_flights(action))
            case Describe():
                text = self._crew[action.rank].flight.describe(action.program)
                self._tell(Described(action.rank, action.program, text))
            case TakeStacks():
                for rank in action.ranks:
                    self._crew[rank].new_stacks()
                    self._crew[rank].signal(STACKS_SIGNAL)
                self._stacks_due.append((self._now() + _STACKS_WAIT, action))
            case Say():
                self._output.say(f"jaxrun: {action.text}")
            case Finish() | Dismiss():
                self._last = action

    def _signal(self, order: Kill) -> None:
        if order.signum == signal.SIGKILL:
            for rank in order.ranks:  # or they would see each other die, and complain
                self._crew[rank].signal(signal.SIGSTOP)
        for rank in order.ranks:
            self._crew[rank].signal(order.signum)

    # ---- what happens

    def _on_server(self) -> None:
        server = self._crew.server
        assert server is not None
        fd = server.channel.fileno()
        events = self._crew.hear_server()
        if self._crew.server is None:
            self._ready.forget(fd)
        self._tell_all(events)
        if self._crew.declined:
            self._superior.note("fork_declined", reason=self._crew.declined)
            for child in self._crew:
                self._ready.forget(child.lines.channel.fileno())
                self._pipes.discard(child.rank)
            self._welcome(self._crew.start_afresh())

    def _on_channel(self, child: Child) -> None:
        fd = child.lines.channel.fileno()
        try:
            messages = child.receive()
        except ProtocolError as error:
            self._ready.forget(fd)
            child.hang_up()
            text = f"something wrote to jaxrun's channel in the worker: {error}"
            self._tell(Failed(child.rank, self._now(), "program", EXIT_SOFTWARE, "ProtocolError", text, ""))
            return
        if messages is None:
            self._ready.forget(fd)
        for message in messages or ():
            if isinstance(message, Failed):
                self._output.log(child.rank, "err", message.traceback.encode())
            if isinstance(message, (Failed, Done)):
                self._tell_flight(child)
            self._tell(message)

    def _tell_flight(self, child: Child) -> None:
        flight = child.new_flight()
        if flight:
            self._tell(Flown(child.rank, flight))

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._tell(Signalled(number))

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._crew if child.live}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in by_pid:
                    self._on_exit(by_pid[pid], os.waitstatus_to_exitcode(status))

    def _on_exit(self, child: Child, status: int) -> None:
        child.status = status
        self._on_channel(child)  # its last words come before its end
        self._ready.forget(child.lines.channel.fileno())
        self._pipes.finish(child.rank)
        crashed = status < 0 and status != -signal.SIGKILL
        oom = self._oom.explain(child.pid) if status == -signal.SIGKILL and not child.killed else ""
        fatal = child.new_stacks() if crashed else ""
        self._tell_flight(child)
        self._tell(Exited(child.rank, status, fatal, self._output.tail(child.rank), oom))

    def _on_stacks(self, order: TakeStacks, taken: StacksTaken) -> None:
        if order.purpose != "native":
            self._tell(taken)
            return
        from jaxrun.agent import native  # rarely wanted, and slow to import

        children = (self._crew[rank] for rank in order.ranks)
        targets = (native.Target(child.rank, child.pid, child.stopped) for child in children if child.live)
        self._natives.append((taken, native.NativeLook(targets, self._now())))

    def _turn_natives(self) -> None:
        """Go on with the looks for C frames; those that are done are told."""
        for taken, look in tuple(self._natives):
            look.turn(self._now())
            if look.done:
                self._natives.remove((taken, look))
                self._tell(replace(taken, natives=look.texts))

    def _read_stacks(self, order: TakeStacks) -> StacksTaken:
        children = [self._crew[rank] for rank in order.ranks]
        return StacksTaken(
            order.purpose,
            dumps={child.rank: child.new_stacks() for child in children},
            waits={child.rank: child.kernel_wait() for child in children},
            cpu={child.rank: child.cpu_seconds() for child in children},
            written={child.rank: self._output.written(child.rank) for child in children},
            flights={child.rank: child.flight.brief() for child in children},
        )

    def _read_flights(self, order: TakeStacks) -> StacksTaken:
        readers = {rank: self._crew[rank].flight for rank in order.ranks}
        whole = order.purpose == "history"
        flights = {rank: reader.history() if whole else reader.brief() for rank, reader in readers.items()}
        return StacksTaken(order.purpose, {}, {}, {}, {}, flights)
