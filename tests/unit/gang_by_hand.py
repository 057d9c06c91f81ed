"""A gang without processes: its ranks and its launcher are played by the test."""

import json
import os
import socket
from types import SimpleNamespace

from jaxrun.frontends.gang.call import GangCall
from jaxrun.frontends.gang.rank_connections import RankConnections
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter, pack
from jaxrun.protocol.payload import Payload, pickle_exception

NUMBER = 5  # of the call


class Rank:
    """The rank's end of its connection."""

    def __init__(self, connection):
        self.connection = connection
        self.reader, self.writer = GangMessageReader(connection, None), GangMessageWriter(connection, None)

    def send(self, kind, value=None, *, number=NUMBER, note=b""):
        self.send_message(pack(kind, number, value, share=True, note=note))

    def send_message(self, message):
        self.writer.add(message)
        self.writer.flush()

    def returns(self, value=None, calls=None):
        self.send(GangMessageKind.RESULT, value, note=json.dumps(calls or {}).encode())

    def fails(self, error, calls=None):
        words = {"error": type(error).__name__, "message": str(error), "traceback": "", "notes": (), "status": 1}
        value = {**words, "time": 1.0, "home": "builtins", "exception": pickle_exception(error)}
        self.send(GangMessageKind.EXCEPTION, value, note=json.dumps(calls or {}).encode())

    def prints(self, text, kind=GangMessageKind.STDOUT):
        self.send_message(GangMessage(kind, NUMBER, Payload(text.encode())))

    def receive(self):
        return self.reader.receive()

    def ends(self):
        self.connection.close()


class FakeLauncher:
    """What RankConnections needs of a launcher; the test writes its output to `output_write_end`."""

    def __init__(self):
        self.output_fd, self.output_write_end = os.pipe()
        os.set_blocking(self.output_fd, False)
        self.pidfd, self._alive = os.pipe()
        self.has_ended = False

    def read_output(self):
        try:
            return os.read(self.output_fd, 1000).decode()
        except BlockingIOError:
            return ""

    def close(self):
        for descriptor in (self.output_fd, self.pidfd, self._alive):
            os.close(descriptor)
        if self.output_write_end >= 0:
            os.close(self.output_write_end)


class FakeGang:
    """The instance and the display that a GangCall works with, all in one."""

    shares_memory = True

    def __init__(self, size):
        self.launcher = FakeLauncher()
        self.connections = RankConnections(self.launcher)
        self.ranks = []
        self.workers = [SimpleNamespace(host=f"h{rank}") for rank in range(size)]
        self.interrupts, self.broken, self.stopped, self.ended = 0, "", False, 0
        self.on_interrupt = lambda: None
        self.printed = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.settimeout(60)
            self.connections.add(Peer(rank, ours, None))
            self.ranks.append(Rank(theirs))

    def start_call(self, value="task"):
        task = pack(GangMessageKind.CALL, NUMBER, value, share=True)
        return GangCall(self, NUMBER, task, self, on_end=lambda: None)

    # ---- the instance

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

    def stacks(self):
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

    def close(self):
        self.connections.close()
        for rank in self.ranks:
            rank.ends()
        self.launcher.close()
