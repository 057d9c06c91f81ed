"""Serves clients that query a running job, follow it or give it orders, with the messages of protocol/job_messages.py.

It serves the whole job, in the job's loop: what clients want waits between two attempts for the next one. No client
can delay the job. A client that reads too slowly is disconnected, and so is one that sends an invalid message, or more
requests at once than allowed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from jaxrun.errors import ProtocolError, UsageError
from jaxrun.files.own_files import is_trusted
from jaxrun.job_events.events import (
    EndRequested,
    Event,
    FaultRequested,
    ParentExited,
    Requested,
    RequestEnded,
    RequestInput,
    SignalRequested,
)
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.framed_connection import FramedConnection
from jaxrun.protocol.codec import Form, MessageDecoder, encode_json_frame, message_types
from jaxrun.protocol.job_messages import (
    MAX_ANSWER_FRAME_BYTES,
    MAX_CLIENT_FRAME_BYTES,
    SOCKET_VERSION,
    Answer,
    Answered,
    AnswerState,
    Ask,
    Cancel,
    Dropped,
    EndOrder,
    FaultOrder,
    Follow,
    FromClient,
    Greeting,
    Input,
    JobBegan,
    JobEnded,
    JobEvent,
    NotStarted,
    SignalOrder,
)
from jaxrun.protocol.names import CONTROL_FD, GANG_ADDRESS
from jaxrun.records.rundir import job_sockets
from jaxrun.text import format_user

_RECEIVE_BYTES = 2**16
_MAX_CLIENTS = 64
_MAX_REQUESTS = 64  # of one client, without their last answers
_MAX_UNSENT_BYTES = 2**24  # of events, for a client that reads slowly, in addition to one answer
_LAST_SEND_S = 0.5  # for clients to read the last frames, when the job has ended
_TYPES = message_types(FromClient)


class Client:
    """One connection, from this launcher's side; reading notices its end."""

    def __init__(self, link: socket.socket, number: int, *, is_parent: bool = False) -> None:
        decoder: MessageDecoder[FromClient] = MessageDecoder(_TYPES, MAX_CLIENT_FRAME_BYTES, form=Form.JSON)
        self.link = link
        self.connection = FramedConnection(link, decoder)
        self.number = number
        self.is_parent = is_parent
        self.has_greeted = False
        self.follows = False

    @property
    def unsent_bytes(self) -> int:
        return self.connection.unsent_bytes

    def send(self, frame: bytes) -> None:
        """Send a frame, or keep what cannot be sent now."""
        self.connection.send_frame(frame)


class JobSockets(Struct, frozen=True):
    """The sockets of a job; either may be missing.

    path:     where the `listener` listens; the server removes it
    parent:   inherited from the process that this launcher works for
    trouble:  why there is no listener, where there should be one
    """

    listener: socket.socket | None = None
    path: str = ""
    parent: socket.socket | None = None
    trouble: str = ""

    def close(self) -> None:
        """Close the listener and remove its path."""
        if self.listener is not None:
            self.listener.close()
            job_sockets.remove(self.path)


class JobServer:
    """Serves the socket of a job, and the inherited socket of the process that the launcher works for."""

    def __init__(
        self,
        job_id: str,
        sockets: JobSockets,
        loop: EventLoop,
        order: int,
        handle: Callable[[Event], None],
        notify: Callable[[str], None],
    ) -> None:
        """Serve in this loop: `handle` what clients want, and `notify` the user of dropped ones."""
        self._path = sockets.path
        self._listener = sockets.listener
        self._clients: list[Client] = []
        self._made = 0
        self._asked: dict[str, tuple[Client, int]] = {}  # unanswered requests, by the number that the head knows
        self._greeting = encode_json_frame(Greeting(SOCKET_VERSION, job_id))
        self._parent_end: ParentExited | None = None
        self._loop, self._order, self._handle, self._notify = loop, order, handle, notify
        if self._listener is not None:
            loop.add_reader(self._listener.fileno(), order, self._accept)
        if sockets.parent is not None:
            self._add(sockets.parent, is_parent=True)

    def begin_attempt(self, waiting: Collection[Event]) -> None:
        """Refuse the requests that an earlier attempt has left, except those in the `waiting` events."""
        kept = {event.number for event in waiting if isinstance(event, Requested)}
        self._refuse("the attempt ended before its ranks answered; ask again", self._asked.keys() - kept)
        if self._parent_end is not None and self._parent_end not in waiting:
            self._handle(self._parent_end)  # the earlier attempt may have ended without it

    def answer(self, number: str, answer: Answer) -> None:
        """Answer the request that Requested has this number of; a client that is gone needs none."""
        client, own_number = self._asked.get(number, (None, 0))
        if client is None:
            return
        if answer.state is not AnswerState.PROGRESS:
            del self._asked[number]
        try:
            frame = encode_json_frame(Answered(own_number, answer), MAX_ANSWER_FRAME_BYTES)
        except ProtocolError as error:
            frame = encode_json_frame(
                Answered(own_number, Answer(AnswerState.REFUSED, f"the answer is too long: {error}"))
            )
        self._send(client, frame)

    def publish(self, line: str) -> None:
        """An event has been logged: send its line to those that follow."""
        followers = [client for client in self._clients if client.follows]
        if followers:
            frame = encode_json_frame(JobEvent(line), MAX_ANSWER_FRAME_BYTES)
            for client in followers:
                self._send(client, frame)

    def announce(self, run_dir: str) -> None:
        """The job has begun: tell the process that this launcher works for; `run_dir` is empty if there is none."""
        frame = encode_json_frame(JobBegan(run_dir))
        for client in self._clients:
            if client.is_parent:
                client.send(frame)

    def end(self, verdict: str) -> None:
        """The job is over: send the verdict, and close all connections."""
        self._refuse("the job has ended", self._asked.keys())
        frame = encode_json_frame(JobEnded(verdict), MAX_ANSWER_FRAME_BYTES)
        for client in tuple(self._clients):
            client.send(frame)
            self._await_room(client)
        self._loop.run_until(lambda: not any(client.unsent_bytes for client in self._clients), _LAST_SEND_S)
        self.close()

    def close(self) -> None:
        """Close all connections and remove the socket. May be called again."""
        for client in self._clients:
            self._loop.remove_reader(client.link.fileno())
            client.link.close()
        self._clients.clear()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            job_sockets.remove(self._path)

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._loop.remove_reader(self._listener.fileno())  # it waits until another client has gone
            return
        self.admit(link)

    def admit(self, link: socket.socket) -> None:
        """Serve another client, or close its connection with a reason."""
        _, user, _ = job_sockets.peer_of(link)
        if not is_trusted(user):
            _refuse(link, f"only the user who has started the job may ask it, not {format_user(user)}")
        elif len(self._clients) >= _MAX_CLIENTS:
            _refuse(link, f"{_MAX_CLIENTS} others ask or follow this job already")
        else:
            self._add(link)

    def _add(self, link: socket.socket, *, is_parent: bool = False) -> Client:
        self._made += 1
        client = Client(link, self._made, is_parent=is_parent)
        self._clients.append(client)
        client.send(self._greeting)
        self._loop.add_reader(client.link.fileno(), self._order, lambda: self._read(client))
        self._await_room(client)
        return client

    def _await_room(self, client: Client) -> None:
        """Go on sending when the client takes more."""
        self._loop.set_writer(client.link.fileno(), (lambda: self._flush(client)) if client.unsent_bytes else None)

    def _flush(self, client: Client) -> None:
        if client in self._clients:
            client.connection.flush()
            self._await_room(client)

    def _send(self, client: Client, frame: bytes) -> None:
        if client not in self._clients:
            return
        if client.unsent_bytes > _MAX_UNSENT_BYTES:
            self._drop(client, f"it has not read {client.unsent_bytes} bytes that were sent to it")
            return
        client.send(frame)
        self._await_room(client)

    def _drop(self, client: Client, reason: str) -> None:
        """Close the connection of a client that behaves wrongly, and say so once."""
        if client.is_parent:
            self._notify(f"the process that started jaxrun has sent what is not understood: {reason}")
            self._end_by_parent(client, "a message of the process that started it, which was not understood")
            return
        pid = job_sockets.peer_of(client.link)[0]
        if not client.unsent_bytes:
            client.send(encode_json_frame(Dropped(reason)))
        self._forget(client)
        self._notify(f"the connection to process {pid}, which asks or follows this job, was closed: {reason}")

    def _forget(self, client: Client) -> None:
        self._clients.remove(client)
        for number in [number for number, one in self._asked.items() if one[0] is client]:
            del self._asked[number]
            self._handle(RequestEnded(number))
        self._loop.remove_reader(client.link.fileno())
        if self._listener is not None and not self._loop.has_reader(self._listener.fileno()):
            self._loop.add_reader(self._listener.fileno(), self._order, self._accept)
        client.link.close()

    def _refuse(self, text: str, numbers: Collection[str]) -> None:
        for number in tuple(numbers):
            self.answer(number, Answer(AnswerState.REFUSED, text))

    # ---- what clients send

    def _read(self, client: Client) -> None:
        if client not in self._clients:
            return
        try:
            for message in client.connection.receive_each(at_once=_RECEIVE_BYTES):
                if client not in self._clients:
                    return
                self._on_message(client, message)
        except ProtocolError as error:
            self._drop(client, str(error))
        if client.connection.has_ended and client in self._clients:
            self._on_end(client)

    def _on_end(self, client: Client) -> None:
        if client.is_parent:
            self._end_by_parent(client, "the end of the process that started it")
        else:
            self._forget(client)

    def _end_by_parent(self, client: Client, reason: str) -> None:
        """The parent has nothing more to say: the job ends, in whichever attempt it is."""
        self._loop.remove_reader(client.link.fileno())
        self._parent_end = ParentExited(reason)
        self._handle(self._parent_end)

    def _on_message(self, client: Client, message: FromClient) -> None:
        """Raise ProtocolError if no client can mean this."""
        if isinstance(message, Greeting):
            if message.version != SOCKET_VERSION:
                age = "an older" if message.version < SOCKET_VERSION else "a newer"
                versions = f"speaks version {message.version} of this socket, not {SOCKET_VERSION}"
                raise ProtocolError(f"it is of {age} jaxrun, and {versions}; ask with the jaxrun that started the job")
            client.has_greeted = True
            return
        if not client.has_greeted:
            raise ProtocolError(f"its first frame is a {type(message).__name__}, not a Greeting")
        match message:
            case Ask():
                self._on_ask(client, message)
            case Input(number=own, data=data) if (number := f"{client.number}.{own}") in self._asked:
                self._handle(RequestInput(number, data))
            case Cancel(number=own) if (number := f"{client.number}.{own}") in self._asked:
                self._handle(RequestEnded(number))
            case Follow():
                client.follows = True
            case SignalOrder(signum=signum):
                self._handle(SignalRequested(signum))
            case FaultOrder(kind=kind, ranks=ranks):
                self._handle(FaultRequested(kind, ranks))
            case EndOrder(gracefully=True):
                # It is the same as `kill -TERM`, in each phase of the job and between attempts.
                signal.raise_signal(signal.SIGTERM)
            case EndOrder():
                parent = "the process that started it"
                self._handle(ParentExited(parent) if client.is_parent else EndRequested("an order at its socket"))

    def _on_ask(self, client: Client, ask: Ask) -> None:
        """Raise ProtocolError for a number whose request has no last answer yet: nobody could tell the two apart."""
        number = f"{client.number}.{ask.number}"
        if number in self._asked:
            raise ProtocolError(f"it asks by the number {ask.number} again, before that request is answered")
        if sum(one is client for one, _ in self._asked.values()) >= _MAX_REQUESTS:
            raise ProtocolError(f"it asks once more, while {_MAX_REQUESTS} of its requests are not answered")
        self._asked[number] = client, ask.number
        self._handle(Requested(number, ask.request))


def open_sockets(job_id: str, environ: Mapping[str, str], *, is_named: bool) -> JobSockets:
    """Open the job's socket, and the parent's.

    is_named:  whether there is a job.json, without which nobody would find the socket

    Raises UsageError if the environment names a parent's descriptor that does not exist.
    """
    parent = parent_socket(environ)
    listener, path, trouble = None, "", ""
    if is_named:
        try:
            listener, path = job_sockets.listen(job_id, environ)
        except OSError as error:
            trouble = f"jaxrun top, stacks and profile cannot reach this job: {error.filename}: {error.strerror}"
    return JobSockets(listener, path, parent, trouble)


def parent_socket(environ: Mapping[str, str]) -> socket.socket | None:
    """The socket that the process which started this one has left open for it, if it did. Raises UsageError."""
    number = environ.get(CONTROL_FD)
    if number is None:
        return None
    try:
        os.set_inheritable(int(number), False)
        return socket.socket(fileno=int(number))
    except (ValueError, OSError):
        raise UsageError(f"{CONTROL_FD}={number!r} names no open socket; unset it") from None


def report_not_started(error: str, exit_code: int, environ: Mapping[str, str]) -> bool:
    """Tell the process that started this one, instead of its user, why there is no job.

    Returns False if no process waits for that, as after a command line. A gang reads what its launcher prints.
    """
    if CONTROL_FD not in environ or GANG_ADDRESS in environ:
        return False
    try:
        with socket.socket(fileno=os.dup(int(environ[CONTROL_FD]))) as link:
            link.sendall(encode_json_frame(NotStarted(error, exit_code)), socket.MSG_NOSIGNAL)
    except (ValueError, OSError, ProtocolError):
        return False
    return True


def _refuse(link: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        link.setblocking(False)
        link.send(encode_json_frame(Dropped(reason)), socket.MSG_NOSIGNAL)
    link.close()
