"""Starts real workers without the launcher: this process plays agent and head, in as few lines as will do."""

import contextlib
import ctypes
import os
import select
import socket
import sys
import time

from member import Member, environment, spawn

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import TEXT_OFFSET
from jaxrun.protocol.worker_messages import (
    FORK_DESCRIPTORS,
    Call,
    CallMismatch,
    ConfigureForkServer,
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    ForkWorker,
    Hello,
    Join,
    Proceed,
    Run,
    StartCoordinator,
    WorkerForked,
    WorkerMessageDecoder,
)

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

JOB_ID = "5eed" * 8
_TIMEOUT = 60.0


class Troupe:
    """Workers of one job, led by `play` from Hello to Leave.

    fork:       by the fork server, else each in an interpreter of its own, its command after those of `wrap`
    env:        variables for all of them
    local:      fields of each one's WorkerEnv
    stdin:      the file that rank 0 reads
    interface:  where the coordinator is to listen
    """

    def __init__(self, folder, argv, size=1, *, fork=True, env=None, local=None, stdin=None, wrap=(), interface=None):
        self.folder = folder
        self.argv = list(map(str, argv))
        self.environ = {**environment(), "JAXRUN_JOB_ID": JOB_ID, **(env or {})}
        self.local = {"host": "here", **(local or {})}
        self.stdin = stdin
        self.wrap = wrap
        self.interface = interface or "127.0.0.1"
        self.answers = []
        self.server = 0
        self._sent = set()
        self._answered = set()
        self.members = []
        ends = [self._connect(rank) for rank in range(size)]
        (self._fork if fork else self._fresh)(ends)

    # ---- starting

    def _connect(self, rank):
        ours, theirs = socket.socketpair()
        stacks, flight = os.memfd_create("stacks"), os.memfd_create("flight")
        os.ftruncate(flight, TEXT_OFFSET)
        out, err = self.folder / f"out-{rank}", self.folder / f"err-{rank}"
        self.members.append(Member(ours, stacks, flight, out, err))
        stdin = self.stdin if self.stdin is not None and rank == 0 else os.devnull
        write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return [
            os.open(stdin, os.O_RDONLY),
            os.open(out, write, 0o644),
            os.open(err, write, 0o644),
            theirs.detach(),
            stacks,
            flight,
        ]

    def _told(self, rank, channel, stacks, flight):
        size = len(self.members)
        env = WorkerEnv(
            JOB_ID,
            rank,
            size,
            rank,
            size,
            channel_fd=channel,
            stacks_fd=stacks,
            flight_fd=flight,
            init_timeout=20.0,
            **self.local,
        )
        return env.to_env()

    def _fresh(self, ends):
        for member, descriptors in zip(self.members, ends, strict=True):
            *standard, channel, stacks, flight = descriptors
            told = self._told(self.members.index(member), channel, stacks, flight)
            argv = [*self.wrap, sys.executable, "-m", "jaxrun_runtime", *self.argv]
            member.pid = spawn(argv, {**self.environ, **told}, standard, [channel, stacks, flight], self.folder)
            for descriptor in (*standard, channel):
                os.close(descriptor)

    def _fork(self, ends):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "jaxrun_runtime.forkserver", theirs.fileno(), "workers"]
        with open(os.devnull, "r+b") as null, open(self.folder / "server", "wb") as log:
            standard = [null.fileno(), null.fileno(), log.fileno()]
            self.server = spawn(argv, self.environ, standard, [theirs.fileno()], self.folder)
        theirs.close()
        ours.settimeout(_TIMEOUT)
        with ours:
            ours.send(encode(ConfigureForkServer(tuple(map(str, self.argv)), {}, (), "")))
            for rank, descriptors in enumerate(ends):
                with contextlib.suppress(BrokenPipeError):
                    socket.send_fds(ours, [encode(ForkWorker(rank, self._told(rank, -1, -1, -1)))], descriptors)
                for descriptor in descriptors[: len(FORK_DESCRIPTORS) - 2]:
                    os.close(descriptor)
                self.answers += self._answer(ours)
        for answer in self.answers:
            if isinstance(answer, WorkerForked):
                self.members[answer.rank].pid = answer.pid

    def _answer(self, channel):
        try:
            return WorkerMessageDecoder().feed(channel.recv(65536))
        except ConnectionResetError:  # comes once, before the answer, from a server that left with a request unread
            return WorkerMessageDecoder().feed(channel.recv(65536))

    # ---- leading

    def play(self, *, until=None, kill_on_failure=True, on_failed=None, timeout=_TIMEOUT):
        """Do what the head does until all have ended, or, with `until`, have sent such a message.

        `on_failed(member)` is called for each that has said its last words.
        """
        deadline = time.monotonic() + timeout
        while not all(member.status is not None or (until and member.said(until)) for member in self.members):
            assert time.monotonic() < deadline, f"not over after {timeout} s:\n{self.describe()}"
            self.listen(0.05)
            self.lead()
            if on_failed:
                for member in self.members:
                    if member.said(Failed):
                        on_failed(member)
            if kill_on_failure and any(member.said(Failed) or member.status for member in self.members):
                for member in self.members:
                    if not member.said(Failed):
                        member.kill()
        return self.members

    def listen(self, patience):
        """Take in the messages and exits that come within `patience` seconds."""
        by_channel = {member.channel: member for member in self.members if member.channel.fileno() >= 0}
        for channel in select.select(list(by_channel), [], [], patience)[0]:
            by_channel[channel].hear()
        for member in self.members:
            member.reap()

    def lead(self):
        """Send what is due now."""
        first, *others = self.members
        done = [m for m in self.members if m.said(Done) or m.said(Failed) or m.status is not None]
        steps = {
            "lead": (self._all(Hello), [first], lambda: StartCoordinator(self.interface)),
            "join": (bool(first.said(CoordinatorReady)), others, lambda: Join(first.said(CoordinatorReady)[0].address)),
            "run": (self._all(DeviceReport), self.members, Run),
            "leave": (len(done) == len(self.members), others, Exit),
            "last": (first in done and all(m.status is not None for m in others), [first], Exit),
        }
        for name, (ready, whom, message) in steps.items():
            if ready and name not in self._sent:
                self._sent.add(name)
                for member in whom:
                    member.tell(message())
        self.agree()

    def agree(self):
        """Answer the calls that wait, once all ranks of their group make them: no two may differ in key or code."""
        waiting = {}
        for member in self.members:
            for call in member.said(Call):
                if call.waits_for_answer and (call.group, call.number) not in self._answered:
                    waiting.setdefault((call.group, call.number), {})[call.rank] = call
        for (group, number), calls in waiting.items():
            if len(calls) < len(ranks_of(group)):
                continue
            self._answered.add((group, number))
            alike = len({(call.key, call.code) for call in calls.values()}) == 1
            text = f"call #{number}: " + " | ".join(f"{rank}: {calls[rank].source_line}" for rank in sorted(calls))
            for rank in calls:
                self.members[rank].tell(Proceed(group, number) if alike else CallMismatch(group, number, text))

    def _all(self, kind):
        return all(member.said(kind) for member in self.members)

    def describe(self):
        names = ([type(message).__name__ for message in member.messages] for member in self.members)
        return "\n".join(f"{m.status} {said} {m.err[-200:]!r}" for m, said in zip(self.members, names, strict=True))

    def close(self):
        if self.server:
            os.waitpid(self.server, 0)
        for member in self.members:
            member.close()


def ranks_of(group):
    """ "0-2,5" → [0, 1, 2, 5]."""
    ends = [part.split("-") for part in group.split(",")]
    return [rank for part in ends for rank in range(int(part[0]), int(part[-1]) + 1)]


@contextlib.contextmanager
def troupes(folder):
    """Yields start(argv, size, …) → a Troupe; ends them all, whatever happens."""
    started = []
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(*arguments, **more):
        place = folder / f"troupe-{len(started)}"
        place.mkdir(exist_ok=True)
        started.append(Troupe(place, *arguments, **more))
        return started[-1]

    try:
        yield start
    finally:
        for troupe in started:
            troupe.close()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
