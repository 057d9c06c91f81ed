"""A gang without processes: the test plays the ranks and the launcher of a caller, or the caller of a rank."""

import json
import os
import signal
import socket
import threading
from contextlib import contextmanager

import pytest
from fakes import RankWorker

from jaxrun.frontends.gang.call import GangCall
from jaxrun.frontends.gang.rank_connections import RankConnections
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.gang_connection import GangMessageReader, GangMessageWriter
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, pack
from jaxrun.protocol.payload import Payload, pickle_exception

NUMBER = 1  # of the call


def events(call, count):
    return [call.receive(60) for _ in range(count)]


class End:
    """The end of a connection that the test plays."""

    def __init__(self, connection):
        self.connection = connection
        self.reader, self.writer = GangMessageReader(connection, None), GangMessageWriter(connection, None)

    def send_message(self, message):
        self.writer.add(message)
        self.writer.flush()

    def send(self, value, kind=GangMessageKind.VALUE, *, number=NUMBER, note=b""):
        self.send_message(pack(kind, number, value, share=True, note=note))


class Rank(End):
    """A rank of the caller that is tested."""

    def returns(self, value=None, calls=None):
        self.send(value, GangMessageKind.RESULT, note=json.dumps(calls or {}).encode())

    def fails(self, error, calls=None):
        words = {"error": type(error).__name__, "message": str(error), "traceback": "", "notes": (), "status": 1}
        value = {**words, "time": 1.0, "home": "builtins", "exception": pickle_exception(error)}
        self.send(value, GangMessageKind.EXCEPTION, note=json.dumps(calls or {}).encode())

    def prints(self, text, kind=GangMessageKind.STDOUT):
        self.send_message(GangMessage(kind, NUMBER, Payload(text.encode())))

    def receive(self):
        return self.reader.receive()

    def ends(self):
        self.connection.close()


class Caller(End):
    """The caller of the rank that is tested; `about` is what the rank has sent first."""

    def run(self, fn, *args, number=NUMBER, **note):
        self.send((fn, args, {}), GangMessageKind.CALL, number=number, note=json.dumps(note).encode())

    def receive(self):
        """The kind of the next message, and what is in it, except those that say that a function has ended."""
        message = self.reader.receive()
        if message.kind is GangMessageKind.ENDED:
            message = self.reader.receive()
        if message.kind in (GangMessageKind.STDOUT, GangMessageKind.STDERR):
            return message.kind, bytes(message.payload.body).decode()
        return message.kind, message.load()

    def receive_all(self):
        """All messages until the function has ended."""
        received = [self.receive()]
        while received[-1][0] not in (GangMessageKind.RESULT, GangMessageKind.EXCEPTION):
            received.append(self.receive())
        return received

    def interrupt(self):
        os.kill(os.getpid(), signal.SIGINT)


class FakeGang:
    """The job and the display that a GangCall works with, and the launcher of its connections, all in one.

    Its ranks return when they are interrupted, as they are at the end of a call, unless `on_interrupt` is set. None is
    compiling, unless `find_compiling` is set.
    """

    shares_memory = True

    def __init__(self, size):
        self.output_fd, self._output = os.pipe()
        os.set_blocking(self.output_fd, False)
        self.pidfd, self._alive = os.pipe()
        self.connections = RankConnections(self)
        self.workers = [RankWorker(f"h{rank}") for rank in range(size)]
        self.interrupts, self.broken, self.stopped, self.ended = 0, "", False, 0
        self.on_interrupt = lambda: [self.ranks[rank].returns() for rank in self.connections.ranks]
        self.find_compiling = lambda ranks: []
        self.printed, self.raised = [], {}
        self.lock = threading.RLock()
        self.ranks = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.settimeout(60)
            self.connections.add(Peer(rank, ours, None))
            self.ranks.append(Rank(theirs))

    def start_call(self, value="task", on_end=lambda: None):
        task = pack(GangMessageKind.CALL, NUMBER, value, share=True)
        return GangCall(self, NUMBER, task, self, on_end, name="task", lock=self.lock)

    def close(self):
        self.connections.close()
        for rank in self.ranks:
            rank.ends()
        self.end_launcher()
        os.close(self.output_fd)
        os.close(self.pidfd)

    # ---- the launcher

    @property
    def has_ended(self):
        return self._alive < 0

    def launcher_prints(self, text):
        os.write(self._output, text.encode())

    def end_launcher(self):
        if not self.has_ended:
            os.close(self._output)
            os.close(self._alive)
            self._alive = -1

    def read_output(self):
        try:
            return os.read(self.output_fd, 1000).decode()
        except BlockingIOError:
            return ""

    # ---- the job

    @property
    def usable(self):
        return not self.broken

    def interrupt(self):
        self.interrupts += 1
        self.on_interrupt()

    def mark_broken(self, reason):
        self.broken = self.broken or reason

    def stop(self):
        self.stopped = True

    def stacks(self, *, raised):
        self.raised = raised
        return "all in sleep"

    def explain_death(self, timeout, ranks):
        return RuntimeError(f"the launcher's verdict on {ranks}")

    # ---- the display

    def show(self, printed):
        self.printed.append(printed)

    def refresh(self, call):
        return None

    def end_call(self, call, error, *, healthy):
        self.ended += 1


@pytest.fixture
def gang():
    fake = FakeGang(2)
    yield fake
    fake.close()


@contextmanager
def serving_calls(monkeypatch):
    """run(function of a Caller) serves its calls until the function ends, and returns what it returns."""
    import jax

    from jaxrun_runtime import interrupts
    from jaxrun_runtime.gang import calls

    monkeypatch.setattr(jax, "local_devices", lambda: [1, 2])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(interrupts, "_installed", None)
    monkeypatch.setattr(signal, "default_int_handler", signal.default_int_handler)  # is restored
    before = signal.getsignal(signal.SIGINT)

    def run(script):
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        outcome = []

        def call():
            with ours:
                caller = Caller(ours)
                try:
                    caller.about = caller.receive()
                    outcome.append(script(caller))
                except BaseException as error:
                    outcome.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        with theirs:
            calls.serve(theirs, None)
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    try:
        yield run
    finally:
        signal.signal(signal.SIGINT, before)
