"""The worker's end of the channel to its agent."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import encode
from jaxrun.protocol.debugger_messages import DebuggerInput, TerminalDecision
from jaxrun.protocol.debugpy_messages import DebugpyInput, DebugpyStop
from jaxrun.protocol.stop_messages import StopAt, StopRequested
from jaxrun.protocol.survivor_messages import LiveRanks, RanksLost
from jaxrun.protocol.worker_messages import (
    CallMismatch,
    Proceed,
    ProfileCalls,
    RankSecret,
    WorkerMessage,
    WorkerMessageDecoder,
)
from jaxrun_runtime import interrupts, linux

M = TypeVar("M")
N = TypeVar("N")
_RECEIVE_BYTES = 65536
_ANSWERS = (Proceed, CallMismatch)  # to a Call
_STOP_MESSAGES = (StopRequested, StopAt)
_OF_DEBUGPY = (DebugpyInput, DebugpyStop)
_ABOUT_SURVIVORS = (LiveRanks, RanksLost)
_OF_TERMINAL = (TerminalDecision, DebuggerInput)
_NOT_FOR_RECEIVE = (
    *_ANSWERS,
    *_STOP_MESSAGES,
    *_OF_DEBUGPY,
    *_ABOUT_SURVIVORS,
    *_OF_TERMINAL,
    ProfileCalls,
    RankSecret,
)  # other methods return these


class AgentDisconnected(Exception):
    """Raised when the channel is closed: the agent closed it or died, or the program closed the descriptor."""


class AgentChannel:
    """Sends messages to the agent and receives its messages; any thread may do either.

    Of several threads that wait for messages, the first reads for all. Each thread takes its own messages.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._identity = linux.file_identity(fd)
        self._owner = os.getpid()
        self._decoder = WorkerMessageDecoder()
        self._received: list[WorkerMessage] = []
        self._handlers: dict[type, Callable[[WorkerMessage], None]] = {}
        self._sending = threading.RLock()
        self._is_sending = False
        self._unsent: deque[bytes] = deque()
        self._arrival = threading.Condition()
        self._reading = False

    def send(self, message: WorkerMessage) -> None:
        """Send a message. Raises AgentDisconnected if the agent is gone.

        A signal handler of the program may call this while its thread is in here: then the outer call sends both.
        """
        frame = encode(message)
        if not self.in_owner_process():  # another thread may have held the lock at the fork
            raise AgentDisconnected
        self._unsent.append(frame)
        with interrupts.deferred(), self._sending:
            if not self._is_sending:
                self._is_sending = True
                try:
                    self._send_all()
                finally:
                    self._is_sending = False

    def _send_all(self) -> None:
        try:
            self._check_owner()
            while self._unsent:
                self._socket.sendall(self._unsent.popleft())
        except OSError as error:
            raise AgentDisconnected from error

    def receive(self, first: type[M], second: type[N] | None = None) -> M | N:
        """Block until the next message that no other method returns, and return it.

        Raises ProtocolError if it has neither type, and AgentDisconnected if no message can come.
        """
        message = self._wait_for(lambda message: not isinstance(message, _NOT_FOR_RECEIVE))
        if isinstance(message, first) or (second is not None and isinstance(message, second)):
            return message
        wanted = " or ".join(kind.__name__ for kind in (first, second) if kind is not None)
        raise ProtocolError(f"expected {wanted} from the agent, received {message!r}")

    def poll(self, kind: type[M]) -> M | None:
        """Return a message of this type if it has arrived, else None. Raises AgentDisconnected."""
        with self._arrival:
            message = self._pop_received(lambda message: isinstance(message, kind))
            if message is not None or self._reading:  # the next poll finds what another thread reads now
                return message  # type: ignore[return-value]
            self._reading = True
        try:
            if self._poll.poll(0):
                self._read()
        finally:
            with self._arrival:
                self._reading = False
                self._arrival.notify_all()
        return self._pop_received(lambda message: isinstance(message, kind))  # type: ignore[return-value]

    def receive_answer(self, group: str, number: int) -> Proceed | CallMismatch:
        """Block until the answer to this Call. Only one Call may wait at a time. Raises AgentDisconnected."""
        while True:
            message = self._wait_for(lambda message: isinstance(message, _ANSWERS))
            assert isinstance(message, _ANSWERS)
            # Any other answer belongs to an earlier call, whose wait was ended by an exception.
            if (message.group, message.number) == (group, number):
                return message

    def receive_stop(self) -> StopRequested | StopAt:
        """Block until a request to stop the program, or the poll at which to stop. Raises AgentDisconnected."""
        message = self._wait_for(lambda message: isinstance(message, _STOP_MESSAGES))
        assert isinstance(message, _STOP_MESSAGES)
        return message

    def receive_live_ranks(self, rank: int, number: int) -> LiveRanks:
        """Block until the answer to this rank's LiveRanksAsked of this number. Raises AgentDisconnected."""
        while True:
            message = self._wait_for(lambda message: isinstance(message, LiveRanks))
            assert isinstance(message, LiveRanks)
            # Any other answer belongs to an earlier question, whose wait was ended by an exception.
            if message.questions[rank] == number:
                return message

    def receive_losses(self) -> RanksLost:
        """Block until the next ranks have died. Raises AgentDisconnected."""
        message = self._wait_for(lambda message: isinstance(message, RanksLost))
        assert isinstance(message, RanksLost)
        return message

    def receive_terminal_decision(self, number: int) -> TerminalDecision:
        """Block until the answer to the DebuggerRequest of this number. Raises AgentDisconnected."""
        message = self._wait_for(lambda message: isinstance(message, TerminalDecision) and message.number == number)
        assert isinstance(message, TerminalDecision)
        return message

    def receive_terminal_line(self, number: int) -> str:
        """Block until the answer to the DebuggerReadRequest of this number. Raises AgentDisconnected."""
        message = self._wait_for(lambda message: isinstance(message, DebuggerInput) and message.number == number)
        assert isinstance(message, DebuggerInput)
        return message.line

    def receive_debugpy(self, session: int) -> DebugpyInput | DebugpyStop:
        """Block until the next message for debugpy in this session. Raises AgentDisconnected."""
        message = self._wait_for(lambda message: isinstance(message, _OF_DEBUGPY) and message.session == session)
        assert isinstance(message, _OF_DEBUGPY)
        return message

    def handle(self, kind: type[WorkerMessage], handler: Callable[[WorkerMessage], None]) -> None:
        """Call `handler` with each message of this type, in whichever thread reads it."""
        self._handlers[kind] = handler

    def is_agent_gone(self) -> bool:
        """Whether the agent has already closed its end."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def agent_pid(self) -> int:
        """The id of the process that made the channel; 0 if that process is outside our process namespace."""
        return linux.peer_pid(self._socket)

    def in_owner_process(self) -> bool:
        """Whether this process is the worker itself, not a process that the program has forked."""
        return os.getpid() == self._owner

    def _wait_for(self, wanted: Callable[[WorkerMessage], bool]) -> WorkerMessage:
        while True:
            leads = False
            try:
                with self._arrival:
                    while (message := self._pop_received(wanted)) is None and self._reading:
                        self._arrival.wait()
                    if message is not None:
                        return message
                    leads = self._reading = True
                self._read()
            finally:
                if leads:
                    with self._arrival:
                        self._reading = False
                        self._arrival.notify_all()

    def _pop_received(self, wanted: Callable[[WorkerMessage], bool]) -> WorkerMessage | None:
        for index, message in enumerate(self._received):
            if wanted(message):
                return self._received.pop(index)
        return None

    def _read(self) -> None:
        """Block until bytes have arrived, and keep the messages that they complete."""
        try:
            self._check_owner()
        except OSError as error:
            raise AgentDisconnected from error
        self._poll.poll()  # a signal handler may end this wait by any exception, also by a TimeoutError
        try:
            with interrupts.deferred():
                data = self._socket.recv(_RECEIVE_BYTES)
                for message in self._decoder.feed(data):
                    self._handlers.get(type(message), self._received.append)(message)
        except OSError as error:
            raise AgentDisconnected from error
        if not data:
            raise AgentDisconnected

    def _check_owner(self) -> None:
        """Raise AgentDisconnected in a fork, or if the program closed our descriptor and its number is reused."""
        if not self.in_owner_process() or linux.file_identity(self._socket.fileno()) != self._identity:
            raise AgentDisconnected
