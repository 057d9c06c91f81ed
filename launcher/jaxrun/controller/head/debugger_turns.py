"""Gives the terminal to the debuggers of ranks, one after another: a state machine without I/O.

A rank has it from its breakpoint until it continues. A rank that was told to step, and does not come back soon, may be
waiting for a rank that waits for the terminal: then the next one gets it. While a rank is at its prompt, PROGRAM_CLOCKS
stand still, and no stall is counted. The end of an allocation comes nearer all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import (
    Action,
    ReadTerminalLine,
    Send,
    ShowTerminalText,
)
from jaxrun.job_events.events import TerminalLine
from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerInput,
    DebuggerMessage,
    DebuggerOutput,
    DebuggerReadRequest,
    DebuggerRequest,
    TerminalDecision,
)
from jaxrun.text import format_ranks_on_hosts

_PROMPT = "prompt"  # holds the clocks
HANDOVER_S = 1.0  # a step that waits for no other rank ends within this time


class DebuggerTurns:
    """The rank that has the terminal, and those that wait for it. Times are seconds since the epoch."""

    def __init__(self, state: HeadState, shutdown: JobShutdown) -> None:
        self._state = state
        self._shutdown = shutdown
        self._owner: int | None = None
        self._waiting: dict[int, list[DebuggerMessage]] = {}
        self._read: DebuggerReadRequest | None = None  # of the owner, which is at its prompt
        self._stepping_since: float | None = None

    def handle(self, message: DebuggerMessage, now: float) -> list[Action]:
        is_late = isinstance(message, DebuggerClosed) and self._owner is None  # it was debugged by an editor
        actions = [] if is_late else self._handle(message, now)
        if isinstance(message, DebuggerClosed):
            actions += self._shutdown.on_debugger_closed(message.rank, now)
        return actions

    def _handle(self, message: DebuggerMessage, now: float) -> list[Action]:
        if self._state.terminal_refusal:
            return list(self._refuse(message))
        if self._owner not in (None, message.rank):
            if isinstance(message, DebuggerClosed):
                self._withdraw(message.rank)
                return []
            self._state.at_prompt.add(message.rank)
            self._waiting.setdefault(message.rank, []).append(message)
            self._schedule_handover()
            return []
        return [*self._give_to(message.rank, message), *self._handle_owners(message, now)]

    def handle_line(self, event: TerminalLine, now: float) -> list[Action]:
        """Handle a typed line; an empty one means the end of the input."""
        if self._read is None:  # the debugger that has read it was left meanwhile
            return []
        read, self._read, self._stepping_since = self._read, None, now
        self._schedule_handover()
        self._state.resume_clocks(now, _PROMPT)
        return [Send((read.rank,), DebuggerInput(read.number, event.line))]

    def _schedule_handover(self) -> None:
        """Give the next rank the terminal if its owner does not come back soon from a step."""
        if self._stepping_since is not None and self._waiting:
            self._state.timers.set(Timer.HANDOVER, self._stepping_since + HANDOVER_S, self._hand_over)
        else:
            self._state.timers.cancel(Timer.HANDOVER)

    def _hand_over(self, now: float) -> list[Action]:
        text = f"\n>>> rank {self._owner} has not come back from that step: it may wait for another rank"
        return [ShowTerminalText(text), *self._release(now)]

    def _withdraw(self, rank: int) -> None:
        """Forget the messages of a rank that waits for the terminal no longer."""
        self._waiting.pop(rank, None)
        self._state.at_prompt.discard(rank)
        self._schedule_handover()

    def remove(self, rank: int, now: float) -> list[Action]:
        self._withdraw(rank)
        return self._release(now) if rank == self._owner else []

    def close(self, now: float) -> list[Action]:
        """End all debugging because the job is ending: debuggers get end-of-file, and breakpoints do nothing."""
        actions: list[Action] = []
        if self._state.is_terminal_closed:
            return actions
        if self._read is not None:
            actions += self._refuse(self._read)
        self._state.is_terminal_closed = True
        for messages in self._waiting.values():
            actions += [action for message in messages for action in self._refuse(message)]
        self._owner, self._waiting, self._read, self._stepping_since = None, {}, None, None
        self._schedule_handover()
        self._state.resume_clocks(now, _PROMPT)
        return actions

    def _give_to(self, rank: int, message: DebuggerMessage) -> Iterator[Action]:
        if self._owner is None:
            self._owner = rank
            self._state.at_prompt.add(rank)
            place = f" at {message.place}" if isinstance(message, DebuggerRequest) and message.place else ""
            who = format_ranks_on_hosts([rank], self._state.workers.hosts)
            others = ", and others may wait for it" if len(self._state.workers.hosts) > 1 else ""
            yield ShowTerminalText(f"\n>>> {who} is in its debugger{place}{others}; c continues\n")

    def _handle_owners(self, message: DebuggerMessage, now: float) -> Iterator[Action]:
        self._stepping_since = None
        self._schedule_handover()
        match message:
            case DebuggerRequest():
                yield Send((message.rank,), TerminalDecision(message.number, True))
            case DebuggerOutput(text=text):
                yield ShowTerminalText(text)
            case DebuggerReadRequest():
                self._read = message
                self._state.hold_clocks(now, _PROMPT)
                yield ReadTerminalLine()
            case DebuggerClosed():
                yield from self._release(now)

    def _release(self, now: float) -> list[Action]:
        """Take the terminal from its owner, and give it to the rank that has waited longest."""
        if self._owner is not None:
            self._state.at_prompt.discard(self._owner)
        self._owner, self._read, self._stepping_since = None, None, None
        self._schedule_handover()
        self._state.resume_clocks(now, _PROMPT)
        if not self._waiting:
            return []
        messages = self._waiting.pop(next(iter(self._waiting)))
        return [action for message in messages for action in self._handle(message, now)]

    def _refuse(self, message: DebuggerMessage) -> Iterator[Action]:
        if isinstance(message, DebuggerRequest):
            yield Send((message.rank,), TerminalDecision(message.number, False, self._state.terminal_refusal))
        elif isinstance(message, DebuggerReadRequest):
            yield Send((message.rank,), DebuggerInput(message.number, ""))
