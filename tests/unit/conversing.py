"""A rank of a gang in this thread, and its parent by hand in another."""

import json
import os
import signal
import socket
import threading
from contextlib import contextmanager

import jax

from jaxrun.protocol.gang_messages import GangMessageKind, GangMessageReader, GangMessageWriter, pack
from jaxrun_runtime.gang import calls


class Parent:
    """The other end of the rank's connection."""

    def __init__(self, connection):
        self.connection = connection
        self.inbox, self.outbox = GangMessageReader(connection), GangMessageWriter(connection)

    def put(self, parcel):
        self.outbox.add(parcel)
        self.outbox.flush()

    def run(self, fn, *args, number=1, **order):
        self.put(pack(GangMessageKind.CALL, number, (fn, args, {}), share=True, note=json.dumps(order).encode()))

    def say(self, value, number=1):
        self.put(pack(GangMessageKind.VALUE, number, value, share=True))

    def hear(self):
        parcel = self.inbox.receive()
        return parcel.kind, parcel.load() if parcel.kind not in (
            GangMessageKind.STDOUT,
            GangMessageKind.STDERR,
        ) else bytes(parcel.payload.body).decode()

    def hear_all(self):
        """Until the function is over."""
        heard = [self.hear()]
        while heard[-1][0] not in (GangMessageKind.RESULT, GangMessageKind.EXCEPTION):
            heard.append(self.hear())
        return heard

    def interrupt(self):
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def playing(monkeypatch):
    """run(function of a Parent): serves until that is over, and gives what it has returned."""
    monkeypatch.setattr(jax, "local_devices", lambda: [1, 2])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(calls, "_current", None)
    before = signal.getsignal(signal.SIGINT)

    def run(script):
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        outcome = []

        def parent():
            with ours:
                side = Parent(ours)
                try:
                    side.about = side.hear()
                    outcome.append(script(side))
                except BaseException as error:
                    outcome.append(error)

        thread = threading.Thread(target=parent)
        thread.start()
        with theirs:
            calls.serve(theirs)
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    try:
        yield run
    finally:
        signal.signal(signal.SIGINT, before)
