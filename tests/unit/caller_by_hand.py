"""A rank of a gang in this thread, and its caller by hand in another."""

import json
import os
import signal
import socket
import threading
from contextlib import contextmanager

import jax

from jaxrun.protocol.gang_messages import GangMessageKind, GangMessageReader, GangMessageWriter, pack
from jaxrun_runtime import interrupts
from jaxrun_runtime.gang import calls


class Caller:
    """The other end of the rank's connection; `about` is what the rank has sent first."""

    def __init__(self, connection):
        self.connection = connection
        self.reader, self.writer = GangMessageReader(connection, None), GangMessageWriter(connection, None)

    def send_message(self, message):
        self.writer.add(message)
        self.writer.flush()

    def run(self, fn, *args, number=1, **note):
        task = pack(GangMessageKind.CALL, number, (fn, args, {}), share=True, note=json.dumps(note).encode())
        self.send_message(task)

    def send(self, value, number=1):
        self.send_message(pack(GangMessageKind.VALUE, number, value, share=True))

    def receive(self):
        """The kind of the next message, and what is in it."""
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


@contextmanager
def serving_calls(monkeypatch):
    """run(function of a Caller) serves its calls until the function ends, and returns what it returns."""
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
