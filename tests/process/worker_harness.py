"""Runs real workers without the launcher: this process does what agent and head do, in as few lines as possible."""

import contextlib
import ctypes
import os
import select
import socket
import sys
import time

from harness import TIME_LIMIT
from harness_worker import HarnessWorker, environment, spawn

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import TEXT_OFFSET
from jaxrun.protocol.forkserver_messages import (
    FORK_DESCRIPTORS,
    ConfigureForkServer,
    ForkServerMessageDecoder,
    ForkWorker,
    WorkerForked,
)
from jaxrun.protocol.worker_command import runtime_directory, worker_argv
from jaxrun.protocol.worker_messages import (
    Call,
    CallMismatch,
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    Hello,
    Join,
    Proceed,
    Run,
    StartCoordinator,
)

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

JOB_ID = "5eed" * 8


class WorkerHarness:
    """The workers of one job, which `run` takes from Hello to Exit.

    fork:       start them by the fork server; else each in a new interpreter, with the command prefix `wrap`
    env:        variables for all workers
    local:      fields of every worker's WorkerEnv
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
        self.workers = []
        ends = [self._connect(rank) for rank in range(size)]
        (self._fork if fork else self._fresh)(ends)

    # ---- starting

    def _connect(self, rank):
        ours, theirs = socket.socketpair()
        stacks, flight = os.memfd_create("stacks"), os.memfd_create("flight")
        os.ftruncate(flight, TEXT_OFFSET)
        out, err = self.folder / f"out-{rank}", self.folder / f"err-{rank}"
        self.workers.append(HarnessWorker(ours, stacks, flight, out, err))
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

    def _worker_env(self, rank, channel, stacks, flight):
        size = len(self.workers)
        env = WorkerEnv(
            JOB_ID,
            rank,
            size,
            rank,
            size,
            channel_fd=channel,
            stacks_fd=stacks,
            flight_fd=flight,
            init_timeout=float(TIME_LIMIT),
            **{"compile": "each", **self.local},
        )
        return env.to_env()

    def _fresh(self, ends):
        for worker, descriptors in zip(self.workers, ends, strict=True):
            *standard, channel, stacks, flight = descriptors
            env = self._worker_env(self.workers.index(worker), channel, stacks, flight)
            argv = [*self.wrap, *worker_argv(sys.executable, self.argv)]
            worker.pid = spawn(argv, {**self.environ, **env}, standard, [channel, stacks, flight], self.folder)
            for descriptor in (*standard, channel):
                os.close(descriptor)

    def _fork(self, ends):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, runtime_directory("forkserver"), theirs.fileno(), "workers"]
        with open(os.devnull, "r+b") as null, open(self.folder / "server", "wb") as log:
            standard = [null.fileno(), null.fileno(), log.fileno()]
            self.server = spawn(argv, self.environ, standard, [theirs.fileno()], self.folder)
        theirs.close()
        ours.settimeout(TIME_LIMIT)
        with ours:
            ours.send(encode(ConfigureForkServer(tuple(map(str, self.argv)), {}, (), "")))
            for rank, descriptors in enumerate(ends):
                with contextlib.suppress(BrokenPipeError):
                    socket.send_fds(ours, [encode(ForkWorker(rank, self._worker_env(rank, -1, -1, -1)))], descriptors)
                for descriptor in descriptors[: len(FORK_DESCRIPTORS) - 2]:
                    os.close(descriptor)
                self.answers += self._answer(ours)
        for answer in self.answers:
            if isinstance(answer, WorkerForked):
                self.workers[answer.rank].pid = answer.pid

    def _answer(self, channel):
        try:
            return ForkServerMessageDecoder().feed(channel.recv(65536))
        except ConnectionResetError:  # comes once, before the answer, from a server that left with a request unread
            return ForkServerMessageDecoder().feed(channel.recv(65536))

    # ---- what agent and head do

    def run(self, *, until=None, kill_on_failure=True, on_failed=None):
        """Run the job until all workers have ended, or with `until`, have sent a message of that kind.

        `on_failed(worker)` is called for each worker that has sent Failed.
        """
        deadline = time.monotonic() + TIME_LIMIT
        while not all(worker.status is not None or (until and worker.received(until)) for worker in self.workers):
            assert time.monotonic() < deadline, f"not over after {TIME_LIMIT} s:\n{self.describe()}"
            self.poll(0.05)
            self.send_due()
            if on_failed:
                for worker in self.workers:
                    if worker.received(Failed):
                        on_failed(worker)
            if kill_on_failure and any(worker.received(Failed) or worker.status for worker in self.workers):
                for worker in self.workers:
                    if not worker.received(Failed):
                        worker.kill()
        return self.workers

    def poll(self, timeout):
        """Receive the messages and exits that come within `timeout` seconds."""
        by_channel = {worker.channel: worker for worker in self.workers if worker.channel.fileno() >= 0}
        for channel in select.select(list(by_channel), [], [], timeout)[0]:
            by_channel[channel].receive()
        for worker in self.workers:
            worker.reap()

    def send_due(self):
        """Send the messages whose time has come."""
        first, *others = self.workers
        done = [m for m in self.workers if m.received(Done) or m.received(Failed) or m.status is not None]
        ready = first.received(CoordinatorReady)
        steps = {
            "start": (self._all(Hello), [first], lambda: StartCoordinator(self.interface)),
            "join": (bool(ready), others, lambda: Join(ready[0].address)),
            "run": (self._all(DeviceReport), self.workers, Run),
            "leave": (len(done) == len(self.workers), others, Exit),
            "last": (first in done and all(m.status is not None for m in others), [first], Exit),
        }
        for name, (due, whom, message) in steps.items():
            if due and name not in self._sent:
                self._sent.add(name)
                for worker in whom:
                    worker.send(message())
        self.answer_calls()

    def answer_calls(self):
        """Answer calls that wait, once all ranks of the group have made them: they match if key and code are equal.

        All ranks are taken to compile the same programs.
        """
        waiting = {}
        for worker in self.workers:
            for call in worker.received(Call):
                key = (call.group, call.number, call.is_compiled)
                if call.waits_for_answer and key not in self._answered:
                    waiting.setdefault(key, {})[call.rank] = call
        for (group, number, is_compiled), calls in waiting.items():
            if len(calls) < len(ranks_of(group)):
                continue
            self._answered.add((group, number, is_compiled))
            alike = len({(call.key, call.code) for call in calls.values()}) == 1
            text = f"call #{number}: " + " | ".join(f"{rank}: {calls[rank].source_line}" for rank in sorted(calls))
            for rank in calls:
                self.workers[rank].send(Proceed(group, number) if alike else CallMismatch(group, number, text))

    def _all(self, kind):
        return all(worker.received(kind) for worker in self.workers)

    def describe(self):
        names = ([type(message).__name__ for message in worker.messages] for worker in self.workers)
        return "\n".join(f"{m.status} {name} {m.err[-200:]!r}" for m, name in zip(self.workers, names, strict=True))

    def close(self):
        if self.server:
            os.waitpid(self.server, 0)
        for worker in self.workers:
            worker.close()


def ranks_of(group):
    """ "0-2,5" → [0, 1, 2, 5]."""
    ends = [part.split("-") for part in group.split(",")]
    return [rank for part in ends for rank in range(int(part[0]), int(part[-1]) + 1)]


@contextlib.contextmanager
def worker_harnesses(folder):
    """Yields start(argv, size, …) → a WorkerHarness. Ends all workers at the end."""
    started = []
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(*arguments, **more):
        place = folder / f"harness-{len(started)}"
        place.mkdir(exist_ok=True)
        started.append(WorkerHarness(place, *arguments, **more))
        return started[-1]

    try:
        yield start
    finally:
        for harness in started:
            harness.close()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
