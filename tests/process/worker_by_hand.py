"""Workers that speak the protocol by hand, without jax (harness.write_fake_runtime), and their fork server."""

import faulthandler
import os
import signal
import socket
import sys
import time

from msgspec.structs import replace

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import STACKS_SIGNAL, WorkerEnv
from jaxrun.protocol.forkserver_messages import (
    FORK_DESCRIPTORS,
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    ForkWorker,
    WorkerForked,
)
from jaxrun.protocol.worker_messages import (
    CoordinatorReady,
    DeviceReport,
    Done,
    Failed,
    Hello,
    RankSecret,
    SignalHandlers,
    WorkerMessageDecoder,
)


class Worker:
    def __init__(self, env):
        self.env = env
        self.rank = env.rank
        self.link = socket.socket(fileno=env.channel_fd)
        os.set_inheritable(env.channel_fd, False)
        os.set_inheritable(env.stacks_fd, False)
        self.decoder = WorkerMessageDecoder()

    def send(self, message):
        self.link.sendall(encode(message))

    def receive(self):
        messages = []
        while not messages:
            data = self.link.recv(4096)
            if not data:
                os._exit(70)
            messages = [each for each in self.decoder.feed(data) if not isinstance(each, RankSecret)]
        return messages[0]

    def hello(self, **changes):
        values = {"rank": self.rank, "host": self.env.host, "pid": os.getpid(), "time": time.time(), "started_at": 0.0}
        values |= {"versions": {}, "program_hash": "", "environment": {}}
        self.send(Hello(**{**values, **changes}))

    def run(self, platform="cpu"):
        """Everything up to Run, with a device of this platform."""
        faulthandler.enable(self.env.stacks_fd)
        faulthandler.register(STACKS_SIGNAL, self.env.stacks_fd)
        self.hello()
        self.receive()
        if self.rank == 0:
            self.send(CoordinatorReady(0, "127.0.0.1:1"))
        size, now = self.env.size, time.time()
        self.send(DeviceReport(self.rank, self.rank, size, 1, size, (platform,), platform, self.env.nonce, now, now))
        self.receive()

    def listen(self):
        """Say that the program listens to SIGTERM."""
        self.send(SignalHandlers(self.rank, interrupt=False, termination=True))

    def done(self):
        sys.stdout.flush()
        self.send(Done(self.rank, time.time()))
        self.receive()
        os._exit(0)

    def fail(self, text="bad record", status=1):
        traceback = f"Traceback (most recent call last):\nValueError: {text}\n"
        sys.stdout.flush()
        self.send(Failed(self.rank, time.time(), "program", status, "ValueError", text, traceback))
        os._exit(status)


def grandchild(pid_file, keep_streams=False):
    """A daemon: two forks and a session away from the worker."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if not keep_streams:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 1)
                os.dup2(null, 2)
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
            os.write(write, b".")
            time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    os.wait()


def live(env, code):
    worker = Worker(env)
    names = {
        name: getattr(worker, name)
        for name in ("hello", "run", "listen", "done", "fail", "send", "link", "rank", "env")
    }
    names |= {"grandchild": grandchild, "os": os, "signal": signal, "sys": sys, "time": time}
    exec(code, names)


def serve(mode):
    """As `python …/jaxrun_runtime/forkserver FD workers` of `jaxrun by_hand.py CODE…`.

    It forks, declines (at once, or after the first) or dies, as `mode` says.
    """
    channel = socket.socket(fileno=int(sys.argv[1]))
    (order,) = ForkServerMessageDecoder().feed(channel.recv(2**18))
    assert isinstance(order, ConfigureForkServer)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 2**18, len(FORK_DESCRIPTORS))
        if not request or mode == "die":
            os._exit(0)
        if mode == "decline":
            channel.send(encode(ForkDeclined("a thread was started", "")))
            os._exit(0)
        (worker,) = ForkServerMessageDecoder().feed(request)
        assert isinstance(worker, ForkWorker)
        if mode == "limit" and worker.rank:
            channel.send(encode(ForkDeclined("no process can be forked: Resource temporarily unavailable", "")))
            os._exit(1)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(worker, dict(zip(FORK_DESCRIPTORS, descriptors, strict=True)), order.program[1:])
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(encode(WorkerForked(worker.rank, pid)))


def _become(worker, descriptors, codes):
    os.setsid()
    for target, stream in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[stream], target)
        os.close(descriptors[stream])
    env = WorkerEnv.from_env(worker.environment)
    channel, stacks, flight = (descriptors[name] for name in ("channel", "stacks", "flight"))
    env = replace(env, channel_fd=channel, stacks_fd=stacks, flight_fd=flight)
    os.environ.update({**worker.environment, **env.to_env()})
    live(env, codes[env.rank])
