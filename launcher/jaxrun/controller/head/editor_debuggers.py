"""Connects editors with debugpy in ranks, for `jaxrun debug`: a state machine without I/O, which passes bytes on.

From the request to the end of the session the rank counts as debugged: PROGRAM_CLOCKS stand still, and no stall is
counted. With --debug, they also do while all ranks wait at their first line: `Run` is sent once each editor that is
connected has set its breakpoints.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

from msgspec import Struct

from jaxrun.controller.head.head_state import HeadState, JobPhase
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, AnswerRequest, PrintLine, Send
from jaxrun.job_events.events import RequestEnded, RequestInput
from jaxrun.protocol.debugpy_messages import (
    DebugpyFromRank,
    DebugpyInput,
    DebugpyOutput,
    DebugpyReady,
    DebugpyStart,
    DebugpyStarted,
    DebugpyStop,
    DebugpyStopped,
)
from jaxrun.protocol.job_messages import Answer, AnswerState, DebugRequest
from jaxrun.protocol.worker_messages import Run
from jaxrun.text import agree, format_ranks, format_ranks_on_hosts

_START = "start"  # holds the clocks
START_TIMEOUT_S = 20.0  # for importing debugpy, which may come from a slow file system
STOP_TIMEOUT_S = 10.0  # for debugpy to let go of the rank; after that the clocks go on without its answer


class _Session(Struct):
    """A debugger in a rank.

    request:     the request that it answers, whose client may have gone
    is_started:  whether debugpy is connected
    is_ready:    whether the editor has set its breakpoints
    is_stopped:  whether the rank was told to end the session
    """

    number: int
    request: str
    is_started: bool = False
    is_ready: bool = False
    is_stopped: bool = False


class EditorDebuggers:
    """The sessions, one for each rank that is debugged. Times are seconds since the epoch."""

    def __init__(self, state: HeadState, shutdown: JobShutdown) -> None:
        self._state = state
        self._shutdown = shutdown
        self._at_start: list[Action] = []  # start the programs
        self._sessions: dict[int, _Session] = {}
        self._made = 0

    def handle_request(self, number: str, request: DebugRequest, now: float) -> list[Action]:
        if reason := self._find_obstacle(request.rank):
            return [_refuse(number, reason)]
        self._made += 1
        self._sessions[request.rank] = _Session(self._made, number)
        self._state.hold_clocks(now, request.rank)
        self._state.in_editor.add(request.rank)
        late = partial(self._on_no_answer, request.rank)
        self._state.timers.set(Timer.DEBUGGER_START, now + START_TIMEOUT_S, late, of=request.rank)
        return [Send((request.rank,), DebugpyStart(self._made))]

    def _find_obstacle(self, rank: int) -> str:
        """Return why the rank cannot be debugged now; empty if it can."""
        workers, phase = self._state.workers, self._state.phase
        if rank not in workers.hosts:
            return f"there is no rank {rank}: the job has {format_ranks(workers.hosts)}"
        who = format_ranks_on_hosts([rank], workers.hosts)
        if phase is JobPhase.STARTING:
            return f"{who} starts still, so there is nothing to debug; try again in a moment"
        if rank not in workers.waiting_for_debugger or phase is not JobPhase.DEBUGGING:
            if rank not in workers.live or rank in workers.live_reported:
                return f"the program of {who} has ended"
            if phase not in (JobPhase.RUNNING, JobPhase.DEBUGGING):
                return "the job is ending"
        return f"{who} is being debugged already; end that debugger first" if rank in self._sessions else ""

    def _on_no_answer(self, rank: int, now: float) -> list[Action]:
        who = format_ranks_on_hosts([rank], self._state.workers.hosts)
        why = "C++ code may hold Python's lock there, or the process is stopped; see jaxrun stacks"
        text = f"{who} has not answered in {START_TIMEOUT_S:g} s: {why}"
        return [*self._end(rank, now, text, is_refused=True), *self._start_if_ready(now)]

    # ---- --debug

    def hold_start(self, actions: list[Action], now: float) -> list[Action]:
        """Keep the orders to run the program, among these actions, until an editor is ready, or nobody wants one."""
        self._at_start = [action for action in actions if isinstance(action, Send) and isinstance(action.message, Run)]
        self._state.hold_clocks(now, _START)
        ranks = self._state.workers.hosts
        waits = f"{format_ranks(ranks)} {agree('waits', len(ranks))} for an editor before the first line"
        go = "in another terminal: jaxrun debug --rank R; to run without one: jaxrun debug --go"
        return [*(action for action in actions if action not in self._at_start), PrintLine(f"{waits} (--debug) · {go}")]

    def handle_go(self, number: str, now: float) -> list[Action]:
        if not self._state.waits_at_start:
            return [_refuse(number, "the job does not wait for an editor: it has no --debug, or runs already")]
        return [AnswerRequest(number, Answer(AnswerState.DONE)), *self._start(now)]

    def _start_if_ready(self, now: float) -> list[Action]:
        """Start the programs once each editor that is connected has set its breakpoints, and there is one."""
        sessions = self._sessions.values()
        is_ready = bool(sessions) and all(session.is_ready for session in sessions)
        return self._start(now) if is_ready and self._state.phase is JobPhase.RUNNING else []

    def _start(self, now: float) -> list[Action]:
        if not self._state.waits_at_start:
            return []
        self._state.waits_at_start = False
        self._state.run_at = now
        self._state.resume_clocks(now, _START)
        return self._at_start

    # ---- what a rank sends

    def handle(self, message: DebugpyFromRank, now: float) -> list[Action]:
        session = self._sessions.get(message.rank)
        if session is None or session.number != message.session:
            # It came too late, and the head has given it up.
            is_open = isinstance(message, DebugpyStarted) and not message.error
            return [Send((message.rank,), DebugpyStop(message.session))] if is_open else []
        match message:
            case DebugpyStarted(error=error) if error:
                return [*self._end(message.rank, now, error, is_refused=True), *self._start_if_ready(now)]
            case DebugpyStarted(staged=staged):
                session.is_started = True
                if not session.is_stopped:  # else the timer limits the wait for the rank to let go
                    self._state.timers.cancel_one(Timer.DEBUGGER_START, message.rank)
                return self._answer(session, {"staged": dict(staged)})
            case DebugpyOutput(data=data):
                return self._answer(session, {"data": base64.b64encode(data).decode()})
            case DebugpyReady():
                session.is_ready = True
                return [*self._start_if_ready(now), *self._shutdown.on_editor_ready(message.rank)]
            case DebugpyStopped():
                return [*self._end(message.rank, now, ""), *self._start_if_ready(now)]

    def _answer(self, session: _Session, content: dict[str, Any]) -> list[Action]:
        return [AnswerRequest(session.request, Answer(AnswerState.PROGRESS, content=content))]

    # ---- what a client sends

    def handle_input(self, event: RequestInput, now: float) -> list[Action]:
        found = self._find(event.number)
        if found is None or not found[1].is_started or found[1].is_stopped:
            return []
        rank, session = found
        return [Send((rank,), DebugpyInput(session.number, event.data))]

    def handle_end(self, event: RequestEnded, now: float) -> list[Action]:
        """Let go of the rank of this request; its client gets a last answer when that is done, if it is there still."""
        found = self._find(event.number)
        return self._stop(*found, now) if found is not None else []

    def _find(self, request: str) -> tuple[int, _Session] | None:
        return next(((rank, one) for rank, one in self._sessions.items() if one.request == request), None)

    # ---- ends

    def _stop(self, rank: int, session: _Session, now: float) -> list[Action]:
        if session.is_stopped:
            return []
        session.is_stopped = True
        late = partial(self._on_no_stop, rank)
        self._state.timers.set(Timer.DEBUGGER_START, now + STOP_TIMEOUT_S, late, of=rank)
        return [Send((rank,), DebugpyStop(session.number))]

    def _on_no_stop(self, rank: int, now: float) -> list[Action]:
        who = format_ranks_on_hosts([rank], self._state.workers.hosts)
        text = f"{who} has not let go of its debugger in {STOP_TIMEOUT_S:g} s; see jaxrun stacks"
        return [*self._end(rank, now, text), *self._start_if_ready(now)]

    def remove(self, rank: int, now: float) -> list[Action]:
        """Handle the end of a rank, or of its program."""
        if rank not in self._sessions:
            return []
        who = format_ranks_on_hosts([rank], self._state.workers.hosts)
        return self._end(rank, now, f"the program of {who} has ended")

    def close(self, now: float) -> list[Action]:
        """Let go of all ranks, because the job is ending: their programs must react to that."""
        return [action for rank, session in self._sessions.items() for action in self._stop(rank, session, now)]

    def forget(self, request: str, now: float) -> list[Action]:
        """Let go of the rank of this request, if it has one, without an answer."""
        found = self._find(request)
        return self._release(found[0], now) if found is not None else []

    def _end(self, rank: int, now: float, text: str, *, is_refused: bool = False) -> list[Action]:
        answer = Answer(AnswerState.REFUSED if is_refused else AnswerState.DONE, text)
        request = self._sessions[rank].request
        return [*self._release(rank, now), AnswerRequest(request, answer)]

    def _release(self, rank: int, now: float) -> list[Action]:
        session = self._sessions.pop(rank)
        stop = self._stop(rank, session, now)
        self._state.timers.cancel_one(Timer.DEBUGGER_START, rank)
        self._state.in_editor.discard(rank)
        self._state.resume_clocks(now, rank)
        return stop


def _refuse(number: str, text: str) -> AnswerRequest:
    return AnswerRequest(number, Answer(AnswerState.REFUSED, text))
