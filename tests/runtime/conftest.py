"""Starts real workers without the launcher: this process plays agent and head, in as few lines as will do."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxrun.contract import (
    FORK_DESCRIPTORS,
    Decoder,
    Done,
    Failed,
    Fork,
    Forked,
    Hello,
    Join,
    Lead,
    Leave,
    Listening,
    Proof,
    Run,
    WorkerEnv,
    encode,
)

ROOT = Path(__file__).parents[2]
JOB_ID = "5eed" * 8
_PR_SET_CHILD_SUBREAPER = 36
_TIMEOUT = 60.0


@dataclass
class Member:
    """One worker; `status` as os.waitstatus_to_exitcode gives it, None while it lives."""

    channel: socket.socket
    stacks: int
    out_path: Path
    err_path: Path
    pid: int = 0
    status: int | None = None
    messages: list = field(default_factory=list)
    decoder: Decoder = field(default_factory=Decoder)

    @property
    def out(self):
        return self.out_path.read_text(errors="surrogateescape")

    @property
    def err(self):
        return self.err_path.read_text(errors="surrogateescape")

    def said(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]

    def last_words(self):
        (words,) = self.said(Failed)
        return words


class Gang:
    """Workers of one job. `play` leads them from Hello to Leave; or take the steps one by one."""

    def __init__(self, folder, argv, size=1, *, fork=True, env=None, cwd=None, local=None, stdin=None, python=()):
        self.folder = folder
        self.argv = list(map(str, argv))
        self.cwd = cwd or folder
        self.environ = {**environment(), "JAXRUN_JOB_ID": JOB_ID, **(env or {})}
        self.local = local or {}
        self.stdin = stdin
        self.python = python
        self.answers = []
        self.server = None
        self.members = []
        ends = [self._connect(rank) for rank in range(size)]
        (self._fork if fork else self._fresh)(ends)

    # ---- starting

    def _connect(self, rank):
        ours, theirs = socket.socketpair()
        stacks = os.memfd_create("stacks")
        out, err = self.folder / f"out-{rank}", self.folder / f"err-{rank}"
        self.members.append(Member(ours, stacks, out, err))
        stdin = self.stdin if self.stdin is not None and rank == 0 else os.devnull
        write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [os.open(stdin, os.O_RDONLY), os.open(out, write, 0o644), os.open(err, write, 0o644)]
        return [*files, theirs.detach(), stacks]

    def told(self, rank, channel, stacks):
        size = len(self.members)
        env = WorkerEnv(JOB_ID, rank, size, rank, size, "here", channel, stacks, 20.0, **self.local)
        return env.to_env()

    def _fresh(self, ends):
        for rank, descriptors in enumerate(ends):
            *standard, channel, stacks = descriptors
            self.members[rank].pid = spawn(
                [sys.executable, *self.python, "-m", "jaxrun_runtime", *self.argv],
                {**self.environ, **self.told(rank, channel, stacks)},
                standard,
                [channel, stacks],
                self.cwd,
            )
            for descriptor in (*standard, channel):
                os.close(descriptor)

    def _fork(self, ends):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, *self.python, "-m", "jaxrun_runtime.forkserver", str(theirs.fileno()), *self.argv]
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(self.folder / "server", os.O_WRONLY | os.O_CREAT, 0o644)
        self.server = spawn(argv, self.environ, [null, null, log], [theirs.fileno()], self.cwd)
        os.close(null)
        os.close(log)
        theirs.close()
        ours.settimeout(_TIMEOUT)
        with ours:
            for rank, descriptors in enumerate(ends):
                request = encode(Fork(rank, self.told(rank, -1, -1)))
                with contextlib.suppress(BrokenPipeError):
                    socket.send_fds(ours, [request], descriptors)
                for descriptor in descriptors[: len(FORK_DESCRIPTORS) - 1]:
                    os.close(descriptor)
                answers = Decoder().feed(ours.recv(65536))
                self.answers += answers
                for answer in answers:
                    if isinstance(answer, Forked):
                        self.members[rank].pid = answer.pid

    # ---- leading

    def play(self, *, until=None, kill_on_failure=True, timeout=_TIMEOUT):
        """Do what the head does until all have ended; with `until`, until every worker has sent such a message."""
        deadline = time.monotonic() + timeout
        told = set()
        while not self._over(until):
            assert time.monotonic() < deadline, f"not over after {timeout} s: {self.describe()}"
            self.listen(0.05)
            self._lead(told, kill_on_failure)
        return self.members

    def _over(self, until):
        if until is not None:
            return all(member.said(until) or member.status is not None for member in self.members)
        return all(member.status is not None for member in self.members)

    def _lead(self, told, kill_on_failure):
        first, *others = self.members
        if self._all(Hello) and "lead" not in told:
            told.add("lead")
            self.tell(first, Lead("127.0.0.1"))
        if first.said(Listening) and "join" not in told:
            told.add("join")
            for member in others:
                self.tell(member, Join(first.said(Listening)[0].address))
        if self._all(Proof) and "run" not in told:
            told.add("run")
            for member in self.members:
                self.tell(member, Run())
        if all(member.said(Done) or member.status is not None for member in self.members):
            if "leave" not in told:
                told.add("leave")
                for member in others:
                    self.tell(member, Leave())
            if "last" not in told and all(member.status is not None for member in others):
                told.add("last")
                self.tell(first, Leave())
        if kill_on_failure and any(member.said(Failed) or member.status for member in self.members):
            for member in self.members:
                if not member.said(Failed):
                    self.kill(member)

    def _all(self, kind):
        return all(member.said(kind) for member in self.members)

    def tell(self, member, message):
        with contextlib.suppress(OSError):
            member.channel.sendall(encode(message))

    def listen(self, patience):
        """Take in the messages and exits that come within `patience` seconds."""
        open_ones = {member.channel: member for member in self.members if member.channel.fileno() >= 0}
        for channel in select.select(list(open_ones), [], [], patience)[0]:
            self._hear(open_ones[channel])
        for member in self.members:
            if member.pid and member.status is None:
                pid, status = os.waitpid(member.pid, os.WNOHANG)
                if pid:
                    self._hear(member)
                    member.status = os.waitstatus_to_exitcode(status)

    def _hear(self, member):
        while member.channel.fileno() >= 0:
            try:
                data = member.channel.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                member.channel.close()
                return
            member.messages += member.decoder.feed(data)

    def kill(self, member):
        if member.pid and member.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)

    def stacks(self, member):
        os.kill(member.pid, signal.SIGRTMIN + 7)
        time.sleep(0.2)
        return os.pread(member.stacks, 2**20, 0).decode()

    def describe(self):
        return "\n".join(f"{m.pid} {m.status} {m.messages} {m.out!r} {m.err!r}" for m in self.members)

    def close(self):
        for member in self.members:
            self.kill(member)
            if member.pid and member.status is None:
                os.waitpid(member.pid, 0)
            member.channel.close()
            os.close(member.stacks)
        if self.server:
            os.waitpid(self.server, 0)


def environment():
    """This process's own, with the checkout to import from, one thread for each pool, and two CPU devices."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    path = os.pathsep.join([str(ROOT / "launcher"), str(ROOT / "runtime")])
    fixed = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return {**kept, **fixed, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def spawn(argv, environ, standard, kept, cwd):
    """Like the agent: a session of its own, three standard streams, and the descriptors `kept` besides."""
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    stdin, stdout, stderr = standard
    process = subprocess.Popen(
        argv, env=environ, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=kept, cwd=cwd, start_new_session=True
    )
    process.returncode = 0  # its status is waited for elsewhere
    return process.pid


@pytest.fixture
def start(tmp_path):
    """start(argv, size, …) → a Gang, ended after the test whatever happens."""
    gangs = []
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def begin(*arguments, **more):
        folder = tmp_path / f"gang-{len(gangs)}"
        folder.mkdir()
        gangs.append(Gang(folder, *arguments, **more))
        return gangs[-1]

    yield begin
    for gang in gangs:
        gang.close()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def script(tmp_path):
    """script(text) → a path: a program to be run."""
    numbers = iter(range(100))

    def write(text, name=None):
        path = tmp_path / (name or f"program{next(numbers)}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
